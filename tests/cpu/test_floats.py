"""Conversions between all number formats, bit by bit, and the accuracy of functions of one number."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.cpu.arrays import normal, poisoned

HALVES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
NARROW = {**HALVES, torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def every(dtype: torch.dtype) -> Tensor:
    """All bit patterns of a dtype of 16 or 8 bits."""
    size, kind = (1 << 16, torch.int16) if dtype.itemsize == 2 else (1 << 8, torch.uint8)
    return torch.arange(size).to(kind).view(dtype)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal, where nan equals nan and the sign of zero counts."""
    a, e = actual.double(), expected.double()
    same = (a == e) & (a.signbit() == e.signbit()) | (a.isnan() & e.isnan())
    assert same.all(), f"{(~same).sum()} differ; first {a[~same][0]} instead of {e[~same][0]}"


@triton.jit
def _cast_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr, VIA: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n, mask=offs_n < N)
    tl.store(y_ptr + offs_n, x.to(VIA).to(y_ptr.dtype.element_ty), mask=offs_n < N)


def cast(x: Tensor, via: tl.dtype, to: torch.dtype) -> Tensor:
    y = torch.empty(x.shape, dtype=to)
    _cast_kernel[(triton.cdiv(x.numel(), 4096),)](x, y, x.numel(), BLOCK_N=4096, VIA=via)
    return y


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_narrow_number_widens(dtype):
    x = every(dtype)
    assert_same(cast(x, tl.float32, torch.float32), x.float())


@pytest.mark.parametrize("target", NARROW, ids=str)
@pytest.mark.parametrize("source", HALVES, ids=str)
def test_every_half_rounds_to_every_narrow_format(source, target):
    x = every(source)
    y = cast(x, tl.float32, target)
    expected = x.float().to(target)
    if target.itemsize == 1:
        # what lies outside saturates here and on GPUs, in torch it becomes nan or infinity
        expected = x.float().clamp(torch.finfo(target).min, torch.finfo(target).max).to(target)
    assert_same(y.float(), expected.float())


def float_bits(count: int) -> Tensor:
    """Floats of every exponent, with many that lie halfway between two halves."""
    random = np.random.default_rng(0).integers(0, 1 << 32, count, np.uint32)
    quarter = count // 4
    # ties and their neighbours for bf16 (lower 16 bits) and for fp16 (lower 13 bits)
    random[:quarter] = (random[:quarter] & 0xFFFF0000) | np.resize([0x8000, 0x7FFF, 0x8001, 0], quarter)
    ties = (random[quarter : 2 * quarter] & 0xFFFFE000) | np.resize([0x1000, 0x0FFF, 0x1001, 0], quarter)
    # exponents at which fp16 is normal, subnormal or overflows
    exponents = np.random.default_rng(1).integers(127 - 27, 127 + 18, quarter, np.uint32)
    random[quarter : 2 * quarter] = (ties & 0x807FFFFF) | (exponents << 23)
    return torch.from_numpy(random.view(np.float32))


@pytest.mark.parametrize("target", HALVES, ids=str)
def test_floats_round_to_nearest_even(target):
    x = float_bits(1 << 18)
    assert_same(cast(x, tl.float32, target), x.to(target))
    ends = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 65504, 65519.99, 65520, 3.4e38, 1e-45])
    assert_same(cast(ends, tl.float32, target), ends.to(target))


@pytest.mark.parametrize("target", HALVES, ids=str)
def test_doubles_narrow(target):
    x = float_bits(1 << 16).double()
    assert_same(cast(x, HALVES[target], torch.float32), x.to(target).float())
    y = normal(4096, dtype=torch.float64)
    assert_same(cast(y, tl.float32, torch.float64), y.float().double())


@triton.jit
def _toward_zero_kernel(x_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.load(x_ptr + offs_n).to(y_ptr.dtype.element_ty, fp_downcast_rounding="rtz")
    tl.store(y_ptr + offs_n, y)


@pytest.mark.parametrize("target", HALVES, ids=str)
def test_rounding_towards_zero(target):
    x = float_bits(1 << 14)
    x = x[x.isfinite()][:8192]
    y = torch.empty(8192, dtype=target)
    _toward_zero_kernel[(2,)](x, y, BLOCK_N=4096)
    nearest = x.to(target)
    down = torch.nextafter(nearest, torch.zeros_like(nearest))
    assert_same(y, torch.where(nearest.float().abs() > x.abs(), down, nearest))


@triton.jit
def _bitcast_kernel(x_ptr, bits_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    bits = tl.load(x_ptr + offs_n).to(bits_ptr.dtype.element_ty, bitcast=True)
    tl.store(bits_ptr + offs_n, bits)
    flipped = (bits ^ 1).to(y_ptr.dtype.element_ty, bitcast=True)
    tl.store(y_ptr + offs_n, flipped)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        *((torch.bfloat16, torch.int16), (torch.float16, torch.int16), (torch.float16, torch.uint16)),
        *((torch.float32, torch.int32), (torch.float64, torch.int64), (torch.int32, torch.uint32)),
        *((torch.float8_e5m2, torch.uint8), (torch.float8_e4m3fn, torch.int8)),
    ],
    ids=str,
)
def test_bitcast(dtype, bits):
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 1024 * dtype.itemsize).astype(np.uint8))
    x = x.view(dtype)
    number = x.float()
    if dtype.is_floating_point:
        x = (
            torch.where(number.isnan(), torch.ones_like(number), number).to(dtype)
            if dtype.itemsize < 8
            else x
        )
    raw, y = torch.empty(1024, dtype=bits), torch.empty(1024, dtype=dtype)
    _bitcast_kernel[(1,)](x, raw, y, BLOCK_N=1024)
    assert torch.equal(raw.view(torch.uint8), x.view(torch.uint8))
    low = torch.zeros(dtype.itemsize, dtype=torch.uint8)
    low[0] = 1
    wanted = (x.view(torch.uint8).view(-1, dtype.itemsize) ^ low).view(dtype).flatten()
    assert_same(y, wanted)


@triton.jit
def _half_arithmetic_kernel(a_ptr, b_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    a = tl.load(a_ptr + offs_n)
    b = tl.load(b_ptr + offs_n)
    tl.store(y_ptr + 0 * BLOCK_N + offs_n, a + b)
    tl.store(y_ptr + 1 * BLOCK_N + offs_n, a - b)
    tl.store(y_ptr + 2 * BLOCK_N + offs_n, a * b)
    tl.store(y_ptr + 3 * BLOCK_N + offs_n, (a * b) * b - a)
    tl.store(y_ptr + 4 * BLOCK_N + offs_n, tl.maximum(a, -b))
    tl.store(y_ptr + 5 * BLOCK_N + offs_n, tl.where(a < b, tl.abs(a), b))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64], ids=str)
def test_arithmetic_of_halves_and_doubles_rounds_every_step(dtype):
    a, b = normal(1024, dtype=dtype), normal(1024, seed=1, dtype=dtype)
    y = poisoned(6, 1024, dtype=dtype)
    _half_arithmetic_kernel[(1,)](a, b, y, BLOCK_N=1024)
    expected = [a + b, a - b, a * b, (a * b) * b - a, torch.maximum(a, -b), torch.where(a < b, a.abs(), b)]
    if dtype == torch.float64:
        torch.testing.assert_close(y, torch.stack(expected), rtol=1e-14, atol=1e-14)
    else:
        assert torch.equal(y, torch.stack(expected))


@triton.jit
def _ends_kernel(a_ptr, b_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    a = tl.load(a_ptr + offs_n)
    b = tl.load(b_ptr + offs_n)
    tl.store(y_ptr + 0 * BLOCK_N + offs_n, tl.maximum(a, b))
    tl.store(y_ptr + 1 * BLOCK_N + offs_n, tl.minimum(a, b))
    tl.store(y_ptr + 2 * BLOCK_N + offs_n, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(y_ptr + 3 * BLOCK_N + offs_n, tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(y_ptr + 4 * BLOCK_N + offs_n, a / b)
    tl.store(y_ptr + 5 * BLOCK_N + offs_n, (a < b).to(tl.float32) + 2 * (a == b).to(tl.float32))
    tl.store(y_ptr + 6 * BLOCK_N + offs_n, (a >= b).to(tl.float32) + 2 * (a != b).to(tl.float32))
    tl.store(y_ptr + 7 * BLOCK_N + offs_n, tl.where(~(a < b), 1.0, 0.0))
    tl.store(y_ptr + 8 * BLOCK_N + offs_n, tl.clamp(a, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(y_ptr + 9 * BLOCK_N + offs_n, a % b)
    tl.store(y_ptr + 10 * BLOCK_N + offs_n, tl.div_rn(a, b))


def test_infinities_and_nans():
    ends = torch.tensor([0.0, -0.0, 1.0, -2.5, 1e-40, 3e38, math.inf, -math.inf, math.nan])
    grid = torch.cartesian_prod(ends, ends)
    a, b = (torch.nn.functional.pad(x, (0, 128 - len(grid)), value=1.0) for x in grid.T)
    y = poisoned(11, 128)
    _ends_kernel[(1,)](a.contiguous(), b.contiguous(), y, BLOCK_N=128)
    with np.errstate(invalid="ignore"):
        modulo = np.fmod(a.numpy(), b.numpy())
    rows = [torch.fmax(a, b), torch.fmin(a, b), torch.maximum(a, b), torch.minimum(a, b), a / b]
    rows += [(a < b) + 2.0 * (a == b), (a >= b) + 2.0 * (a != b), (~(a < b)).float()]
    rows += [a.clamp(-1, 1), torch.from_numpy(modulo), a / b]
    for k, expected in enumerate(rows):
        same = (y[k] == expected) | (y[k].isnan() & expected.isnan())
        assert same.all(), (k, a[~same], b[~same], y[k][~same])


FUNCTIONS = {
    "exp": (np.exp, 1.5),
    "exp2": (np.exp2, 1.5),
    "log": (np.log, 1),
    "log2": (np.log2, 2),
    "erf": (np.vectorize(math.erf), 3),
    "tanh": (np.tanh, 2),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 3),
    "sin": (np.sin, 1),
    "cos": (np.cos, 1),
    "sqrt": (np.sqrt, 0.5),
    "sqrt_rn": (np.sqrt, 0.5),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 2),
}
"""The function in float64, and the largest error in units in the last place of the float32 result."""


@triton.jit
def _function_kernel(x_ptr, y_ptr, N, NAME: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=1.0)
    if NAME == "tanh":
        y = tl.extra.libdevice.tanh(x)
    elif NAME == "sigmoid":
        y = tl.sigmoid(x)
    else:
        y = getattr(tl, NAME)(x)
    tl.store(y_ptr + offs_n, y, mask=offs_n < N)


def apply(name: str, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _function_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), NAME=name, BLOCK_N=1024)
    return y


def ulps(actual: Tensor, truth: np.ndarray) -> np.ndarray:
    """The error in units in the last place; below the normal range in the smallest such unit."""
    _, exponent = np.frexp(truth)
    unit = np.exp2(np.maximum(exponent - 24, -149).astype(np.float64))
    return np.abs(actual.double().numpy() - truth) / unit


def wide_range(name: str, count: int) -> Tensor:
    """Numbers where the function is neither 0 nor infinite: spread evenly, and by their exponents."""
    random = np.random.default_rng(0)
    positive = name in ("log", "log2", "sqrt", "sqrt_rn", "rsqrt")
    bound = {"exp": 88, "exp2": 127, "sin": 1e4, "cos": 1e4, "sigmoid": 80}.get(name, 10)
    # down to where exp and exp2 become the smallest denormal number, and log starts from one
    lowest = {"exp": -103.2, "exp2": -148.9}.get(name, -bound)
    even = random.uniform(lowest, bound, count)
    small = np.exp2(
        random.uniform(-148.9 if positive else -126, 128 if positive else math.log2(bound), count)
    )
    small *= 1 if positive else random.choice([-1, 1], count)
    near_one = 1 + random.uniform(-0.1, 0.1, count)
    parts = [np.abs(even) if positive else even, small, near_one]
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_accuracy(name):
    function, bound = FUNCTIONS[name]
    x = wide_range(name, 20_000)
    error = ulps(apply(name, x), function(x.double().numpy()))
    worst = error.argmax()
    assert error[worst] <= bound, f"{error[worst]:.2f} ulp at {x[worst]:.9g}"


INF, NAN, TINY = math.inf, math.nan, 1e-45
ENDS = {
    "exp": {INF: INF, -INF: 0, NAN: NAN, 0.0: 1, 89.0: INF, -104.0: 0, TINY: 1, 88.5: math.exp(88.5)},
    "exp2": {INF: INF, -INF: 0, NAN: NAN, 0.0: 1, 128.0: INF, -150.5: 0, TINY: 1, -149.0: 2.0**-149},
    "log": {INF: INF, -INF: NAN, NAN: NAN, -0.0: -INF, -1.0: NAN, 1.0: 0, TINY: -103.2789},
    "log2": {INF: INF, -INF: NAN, NAN: NAN, 0.0: -INF, -1.0: NAN, 1.0: 0, 8.0: 3, TINY: -149},
    "erf": {INF: 1, -INF: -1, NAN: NAN, 0.0: 0, 9.0: 1, -9.0: -1, TINY: TINY, 1e-30: 1.1283792e-30},
    "tanh": {INF: 1, -INF: -1, NAN: NAN, 0.0: 0, 50.0: 1, -50.0: -1, TINY: TINY, 1e-30: 1e-30},
    "sigmoid": {INF: 1, -INF: 0, NAN: NAN, 0.0: 0.5, 200.0: 1, -200.0: 0},
    "sin": {INF: NAN, -INF: NAN, NAN: NAN, 0.0: 0, TINY: TINY},
    "cos": {INF: NAN, -INF: NAN, NAN: NAN, 0.0: 1, TINY: 1},
    "sqrt": {INF: INF, -INF: NAN, NAN: NAN, 0.0: 0, -1.0: NAN, 4.0: 2, TINY: 3.7433921e-23},
    "sqrt_rn": {INF: INF, NAN: NAN, 0.0: 0, -1.0: NAN, 4.0: 2},
    "rsqrt": {INF: 0, -INF: NAN, NAN: NAN, 0.0: INF, -1.0: NAN, 4.0: 0.5},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ends(name):
    x = torch.tensor(list(ENDS[name]))
    expected = torch.tensor(list(ENDS[name].values()))
    # in every lane of a vector and in its rest
    y = apply(name, x.repeat(37)).view(37, -1)
    torch.testing.assert_close(y, expected.expand(37, -1), rtol=3e-7, atol=0, equal_nan=True)


@triton.jit
def _double_functions_kernel(x_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n)
    y = tl.exp(x) + tl.log(tl.abs(x) + 1) + tl.sin(x) * tl.cos(x) + tl.sqrt(tl.abs(x)) + tl.erf(x)
    tl.store(y_ptr + offs_n, y + tl.floor(x) - tl.ceil(x) + tl.exp2(x) * tl.rsqrt(tl.abs(x) + 1))
    tl.store(y_ptr + BLOCK_N + offs_n, tl.cumsum(x, 0) + tl.sum(x, 0) + tl.max(x, 0))


def test_doubles():
    x, y = normal(256, dtype=torch.float64), poisoned(2, 256, dtype=torch.float64)
    _double_functions_kernel[(1,)](x, y, BLOCK_N=256)
    expected = x.exp() + x.abs().log1p() + x.sin() * x.cos() + x.abs().sqrt() + x.erf()
    expected += x.floor() - x.ceil() + x.exp2() * (x.abs() + 1).rsqrt()
    torch.testing.assert_close(y[0], expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(y[1], x.cumsum(0) + x.sum() + x.max(), rtol=1e-13, atol=1e-13)


@triton.jit
def _library_kernel(x_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n)
    # named like the functions that it calls
    pow = tl.extra.libdevice.pow(tl.abs(x), x)
    sqrt = tl.sqrt(tl.abs(x))
    atan = tl.extra.libdevice.atan2(x, sqrt + 1)
    tl.store(y_ptr + offs_n, pow + sqrt + atan + tl.extra.libdevice.round(x) + tl.extra.libdevice.log1p(sqrt))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_libdevice(dtype):
    x, y = normal(256, dtype=dtype), poisoned(256, dtype=dtype)
    _library_kernel[(1,)](x, y, BLOCK_N=256)
    wide = x.double()
    root = wide.abs().sqrt()
    expected = wide.abs() ** wide + root + torch.atan2(wide, root + 1) + wide.round() + root.log1p()
    torch.testing.assert_close(y, expected.to(dtype))
