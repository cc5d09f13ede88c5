"""Reductions over every axis, with ties, and products of tiles."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.cpu.arrays import integers, normal, poisoned


@triton.jit
def _product(a, b):
    return a * b


@triton.jit
def _fold(x, AXIS: tl.constexpr, OP: tl.constexpr):
    if OP == "sum":
        y = tl.sum(x, AXIS)
    elif OP == "max":
        y = tl.max(x, AXIS)
    elif OP == "min":
        y = tl.min(x, AXIS)
    elif OP == "xor":
        y = tl.xor_sum(x, AXIS)
    else:
        y = tl.reduce(x, AXIS, _product)
    return y


@triton.jit
def _reduce_1d_kernel(x_ptr, y_ptr, N: tl.constexpr, OP: tl.constexpr):
    tl.store(y_ptr, _fold(tl.load(x_ptr + tl.arange(0, N)), 0, OP))


@triton.jit
def _reduce_2d_kernel(x_ptr, y_ptr, z_ptr, M: tl.constexpr, N: tl.constexpr, OP: tl.constexpr):
    offs_m = tl.arange(0, M)
    offs_n = tl.arange(0, N)
    x = tl.load(x_ptr + offs_m[:, None] * N + offs_n[None, :])
    tl.store(y_ptr + offs_n, _fold(x, 0, OP))
    tl.store(z_ptr + offs_m, _fold(x, 1, OP))


@triton.jit
def _reduce_3d_kernel(
    x_ptr, y_ptr, L: tl.constexpr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, OP: tl.constexpr
):
    offs_l = tl.arange(0, L)[:, None, None]
    offs_m = tl.arange(0, M)[None, :, None]
    offs_n = tl.arange(0, N)[None, None, :]
    x = tl.load(x_ptr + (offs_l * M + offs_m) * N + offs_n)
    y = tl.ravel(_fold(x, AXIS, OP))
    tl.store(y_ptr + tl.arange(0, y.shape[0]), y)


OPS = {
    "sum": lambda x, axis: x.sum(axis, dtype=x.dtype),
    "max": lambda x, axis: x.amax(axis),
    "min": lambda x, axis: x.amin(axis),
    "xor": lambda x, axis: torch.as_tensor(np.bitwise_xor.reduce(x.numpy(), axis)),
    "product": lambda x, axis: x.prod(axis, dtype=x.dtype),
}


def numbers(op: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_floating_point:
        return integers(-100, 100, *shape, dtype=dtype)
    return normal(*shape, dtype=dtype) if op != "product" else (1 + normal(*shape) / 50).to(dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32], ids=str)
def test_every_axis(op, dtype):
    if op == "xor" and dtype.is_floating_point:
        pytest.skip("xor is for integers")
    fold = OPS[op]
    x, y = numbers(op, 256, dtype=dtype), poisoned(1, dtype=dtype)
    _reduce_1d_kernel[(1,)](x, y, N=256, OP=op)
    torch.testing.assert_close(y[0], fold(x, 0), rtol=1e-4, atol=1e-4)
    x, y, z = numbers(op, 16, 64, dtype=dtype), poisoned(64, dtype=dtype), poisoned(16, dtype=dtype)
    _reduce_2d_kernel[(1,)](x, y, z, M=16, N=64, OP=op)
    torch.testing.assert_close(y, fold(x, 0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(z, fold(x, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("op", ["sum", "min"])
def test_every_axis_of_three(op, axis):
    x = integers(-100, 100, 4, 8, 32)
    y = poisoned(x.numel() // x.shape[axis], dtype=torch.int32)
    _reduce_3d_kernel[(1,)](x, y, L=4, M=8, N=32, AXIS=axis, OP=op)
    assert torch.equal(y, OPS[op](x, axis).flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_every_type(op, dtype):
    x, y, z = numbers(op, 16, 64, dtype=dtype), poisoned(64, dtype=dtype), poisoned(16, dtype=dtype)
    _reduce_2d_kernel[(1,)](x, y, z, M=16, N=64, OP=op)
    # a sum of halves is rounded after every step
    tolerance = {"rtol": 0.02, "atol": 0.3} if dtype.itemsize == 2 else {"rtol": 1e-12, "atol": 1e-12}
    wide = x.double() if dtype.is_floating_point else x
    for actual, expected in ((y, OPS[op](wide, 0)), (z, OPS[op](wide, 1))):
        torch.testing.assert_close(actual.to(expected.dtype), expected, **tolerance)
        assert torch.equal(actual.to(dtype), actual)


def test_sums_wrap():
    x, y = integers(1 << 30, (1 << 31) - 1, 256), poisoned(1, dtype=torch.int32)
    _reduce_1d_kernel[(1,)](x, y, N=256, OP="sum")
    assert y[0] == x.sum().to(torch.int32)


def test_maximum_of_infinities_and_nans():
    # nan only among numbers: of nothing but nans the maximum is -inf here, on a GPU it is nan
    y = poisoned(1)
    for values, expected in [
        ([-torch.inf] * 16, -torch.inf),
        ([-torch.inf] * 15 + [-3e38], -3e38),
        ([torch.nan] * 15 + [2.0], 2.0),
        ([2.0, torch.nan] * 8, 2.0),
    ]:
        _reduce_1d_kernel[(1,)](torch.tensor(values), y, N=16, OP="max")
        torch.testing.assert_close(y[0], torch.tensor(expected), equal_nan=True)
        _reduce_1d_kernel[(1,)](-torch.tensor(values), y, N=16, OP="min")
        torch.testing.assert_close(y[0], torch.tensor(-expected), equal_nan=True)


@triton.jit
def _arg_kernel(
    x_ptr, y_ptr, z_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, TAKES_FIRST: tl.constexpr
):
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offs)
    high = tl.argmax(x, AXIS, tie_break_left=TAKES_FIRST)
    low, at = tl.min(x, AXIS, return_indices=True, return_indices_tie_break_left=TAKES_FIRST)
    offs_y = tl.arange(0, high.shape[0])
    tl.store(y_ptr + offs_y, high)
    tl.store(y_ptr + high.shape[0] + offs_y, at)
    tl.store(z_ptr + offs_y, low)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("takes_first", [True, False])
def test_argmax_and_argmin_with_ties(axis, takes_first):
    x = integers(0, 5, 32, 16)
    kept = x.shape[1 - axis]
    y, z = poisoned(2, kept, dtype=torch.int32), poisoned(kept, dtype=torch.int32)
    _arg_kernel[(1,)](x, y, z, M=32, N=16, AXIS=axis, TAKES_FIRST=takes_first)
    assert torch.equal(z, x.amin(axis))
    if takes_first:
        assert np.array_equal(y[0].numpy(), np.argmax(x.numpy(), axis))
        assert np.array_equal(y[1].numpy(), np.argmin(x.numpy(), axis))
    for places, best in ((y[0], x.amax(axis)), (y[1], x.amin(axis))):
        assert torch.equal(x.gather(axis, places.long().unsqueeze(axis)).squeeze(axis), best)


@triton.jit
def _row_argmax_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    pid_m = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + pid_m * N + offs_n, mask=offs_n < N, other=float("-inf"))
    tl.store(y_ptr + pid_m, tl.argmax(x, 0))


def test_argmax_of_masked_rows():
    x, y = normal(8, 500), poisoned(8, dtype=torch.int32)
    _row_argmax_kernel[(8,)](x, y, 500, BLOCK_N=512)
    assert y.tolist() == x.argmax(1).tolist()


@triton.jit
def _whole_kernel(x_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offs)
    y = tl.sum(x) * 2 + tl.max(x, 1, keep_dims=True) + tl.max(tl.sum(x, 0, keep_dims=True))
    tl.store(y_ptr + offs, x + y)


def test_whole_tiles_and_kept_axes():
    x, y = normal(16, 8), poisoned(16, 8)
    _whole_kernel[(1,)](x, y, M=16, N=8)
    torch.testing.assert_close(y, x + x.sum() * 2 + x.amax(1, keepdim=True) + x.sum(0).max())


@triton.jit
def _narrow_axes_kernel(x_ptr, y_ptr, z_ptr, M: tl.constexpr, N: tl.constexpr):
    offs_m = tl.arange(0, M)
    offs_n = tl.arange(0, N)
    x = tl.load(x_ptr + offs_m[:, None] * N + offs_n[None, :])
    tl.store(y_ptr + offs_m, tl.sum(x, 1))
    tl.store(z_ptr + offs_n, tl.max(x, 0))


@pytest.mark.parametrize("shape", [(1, 16), (16, 1), (1, 1), (2, 2)])
def test_axes_of_one(shape):
    x, y, z = normal(*shape), poisoned(shape[0]), poisoned(shape[1])
    _narrow_axes_kernel[(1,)](x, y, z, M=shape[0], N=shape[1])
    torch.testing.assert_close(y, x.sum(1))
    torch.testing.assert_close(z, x.amax(0))


@triton.jit
def _long_row_kernel(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * N + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs_m, tl.sum(x * x, 1), mask=offs_m < M)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 500, 512])
def test_sums_of_long_rows(dtype, columns):
    x, y = normal(13, columns, dtype=dtype), poisoned(13)
    _long_row_kernel[(4,)](x, y, 13, columns, BLOCK_M=4, BLOCK_N=512)
    torch.testing.assert_close(y.double(), x.double().square().sum(1), rtol=1e-5, atol=1e-5)


@triton.jit
def _rows_times_a_row_kernel(x_ptr, row_ptr, y_ptr, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask = offs_n < N
    # 1 past N: the sums do not end there, and are written in two parts
    row = 1.0 / (tl.load(row_ptr + offs_n, mask=mask, other=0.0) + 1.0)
    x = tl.load(x_ptr + offs_m[:, None] * N + offs_n[None, :], mask=mask[None, :], other=0.0)
    tl.store(y_ptr + offs_m, tl.sum(x * row[None, :], 1))


@pytest.mark.parametrize("columns", [63, 100, 128])
def test_long_sums_in_two_parts(columns):
    x, row, y = normal(8, columns), normal(columns, seed=1).abs(), poisoned(8)
    _rows_times_a_row_kernel[(1,)](x, row, y, columns, BLOCK_M=8, BLOCK_N=128)
    torch.testing.assert_close(y.double(), x.double() @ (1 / (row.double() + 1)), rtol=1e-5, atol=1e-5)


@triton.jit
def _codes_kernel(x_ptr, q_ptr, y_ptr, M, N, H, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < H)[None, :]
    q = tl.load(q_ptr + offs_m[:, None] * H + offs_n[None, :], mask=mask, other=0)
    low = (q & 15).to(tl.int8) - 8
    high = (q >> 4).to(tl.int8) - 8
    x = tl.load(x_ptr + offs_n, mask=offs_n < H, other=0.0)
    upper = tl.load(x_ptr + H + offs_n, mask=offs_n < N - H, other=0.0)
    y = tl.sum(low.to(tl.float32) * x[None, :] + high.to(tl.float32) * upper[None, :], 1)
    tl.store(y_ptr + offs_m, y, mask=offs_m < M)


@pytest.mark.parametrize("columns", [1, 65, 127, 192, 511, 1000, 1024])
def test_sums_of_codes_whose_rows_end_in_several_places(columns):
    half = (columns + 1) // 2
    x, q, y = normal(columns), integers(0, 256, 13, half, dtype=torch.uint8), poisoned(13)
    _codes_kernel[(4,)](x, q, y, 13, columns, half, BLOCK_M=4, BLOCK_N=512)
    codes = torch.cat(((q & 15).double() - 8, (q >> 4).double() - 8), 1)[:, :columns]
    torch.testing.assert_close(y.double(), codes @ x.double(), rtol=1e-4, atol=1e-4)


@triton.jit
def _unsigned_zeros_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=0)
    # past N: 248 of an unsigned byte, 124, 17
    y = (x - 8).to(tl.float32) + ((x - 8) >> 1).to(tl.float32) + (x.to(tl.int16) + 17).to(tl.float32)
    tl.store(y_ptr, tl.sum(y, 0))


def test_numbers_that_masked_loads_leave():
    x, y = integers(8, 200, 256, dtype=torch.uint8), poisoned(1)
    _unsigned_zeros_kernel[(1,)](x, y, 100, BLOCK_N=256)
    x = torch.where(torch.arange(256) < 100, x, 0)
    low = x - 8
    assert y == (low.int() + (low >> 1).int() + x.int() + 17).sum()


@triton.jit
def _dot_kernel(
    a_ptr, b_ptr, c_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    A_IS_TURNED: tl.constexpr, B_IS_TURNED: tl.constexpr, OUT: tl.constexpr, HAS_C: tl.constexpr,
):  # fmt: skip
    offs_m = tl.arange(0, M)[:, None]
    offs_n = tl.arange(0, N)[None, :]
    offs_ak = tl.arange(0, K)[None, :]
    offs_bk = tl.arange(0, K)[:, None]
    a = tl.load(a_ptr + (offs_ak * M + offs_m if A_IS_TURNED else offs_m * K + offs_ak))
    b = tl.load(b_ptr + (offs_n * K + offs_bk if B_IS_TURNED else offs_bk * N + offs_n))
    if HAS_C:
        c = tl.load(c_ptr + offs_m * N + offs_n)
        y = tl.dot(a, b, c, input_precision="ieee", out_dtype=OUT)
    else:
        y = tl.dot(a, b, input_precision="ieee", out_dtype=OUT)
    tl.store(y_ptr + offs_m * N + offs_n, y)


DOTS = {
    "float32": (torch.float32, torch.float32, tl.float32),
    "bfloat16": (torch.bfloat16, torch.float32, tl.float32),
    "float16": (torch.float16, torch.float32, tl.float32),
    "float16 in float16": (torch.float16, torch.float16, tl.float16),
    "float64": (torch.float64, torch.float64, tl.float64),
    "int8": (torch.int8, torch.int32, tl.int32),
    "float8": (torch.float8_e5m2, torch.float32, tl.float32),
}


@pytest.mark.parametrize("kind", DOTS)
@pytest.mark.parametrize("shape", [(16, 32, 64), (8, 16, 4), (1, 2, 2), (64, 16, 32)])
def test_dot(kind, shape):
    (M, N, K), (dtype, out, out_tl) = shape, DOTS[kind]
    for a_is_turned, b_is_turned, has_c in [(False, False, False), (True, True, True)]:
        a, b = numbers("sum", M, K, dtype=dtype), numbers("sum", K, N, dtype=dtype)
        c, y = numbers("sum", M, N, dtype=out) if has_c else None, poisoned(M, N, dtype=out)
        stored = [x.T.contiguous() if t else x for x, t in ((a, a_is_turned), (b, b_is_turned))]
        _dot_kernel[(1,)](
            *stored, c, y, M=M, N=N, K=K,
            A_IS_TURNED=a_is_turned, B_IS_TURNED=b_is_turned, OUT=out_tl, HAS_C=has_c,
        )  # fmt: skip
        expected = a.double() @ b.double() + (c.double() if has_c else 0)
        tolerance = {torch.float16: 0.02, torch.float64: 1e-12}.get(out, 1e-4)
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * 10)


@triton.jit
def _batched_dot_kernel(
    a_ptr, b_ptr, y_ptr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    offs_b = tl.arange(0, B)[:, None, None]
    offs_m = tl.arange(0, M)
    offs_n = tl.arange(0, N)
    offs_k = tl.arange(0, K)
    a = tl.load(a_ptr + (offs_b * M + offs_m[None, :, None]) * K + offs_k[None, None, :])
    b = tl.load(b_ptr + (offs_b * K + offs_k[None, :, None]) * N + offs_n[None, None, :])
    y = tl.dot(a, b, input_precision="ieee")
    tl.store(y_ptr + (offs_b * M + offs_m[None, :, None]) * N + offs_n[None, None, :], y * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dot_of_three_dimensions(dtype):
    a, b = normal(4, 16, 32, dtype=dtype), normal(4, 32, 16, seed=1, dtype=dtype)
    y = poisoned(4, 16, 16)
    _batched_dot_kernel[(1,)](a, b, y, B=4, M=16, N=16, K=32)
    torch.testing.assert_close(y.double(), 2 * a.double() @ b.double(), rtol=1e-4, atol=1e-4)


@triton.jit
def _named_like_the_code_kernel(a_ptr, y_ptr, N: tl.constexpr):
    # every name here is one that the emitted C has itself
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    batch = tl.load(a_ptr + offs)
    at = batch + 1
    step = tl.argmax(at, 1)
    last = tl.cumsum(batch, 0)
    i = tl.dot(batch, at, last, input_precision="ieee")
    acc = tl.sum(i, 1)
    part = tl.sum(tl.reshape(i, (N * N,)), 0)
    register = tl.max(acc, 0)
    begin = tl.associative_scan(i, 1, _product)
    tl.store(y_ptr + offs, i + step[:, None] + acc[:, None] + part + register + begin)


def test_variables_named_like_the_emitted_code():
    a, y = normal(16, 16) / 4, poisoned(16, 16)
    _named_like_the_code_kernel[(1,)](a, y, N=16)
    wide = a.double()
    i = wide @ (wide + 1) + wide.cumsum(0)
    expected = i + wide.argmax(1)[:, None] + i.sum(1)[:, None] + i.sum() + i.sum(1).max() + i.cumprod(1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-3)


@triton.jit
def _named_like_long_sums_kernel(x_ptr, y_ptr, share_i0, acc_row0, M: tl.constexpr, N: tl.constexpr):
    offs_m = tl.arange(0, M)
    x = tl.load(x_ptr + offs_m[:, None] * share_i0 + tl.arange(0, N)[None, :])
    tl.store(y_ptr + offs_m, tl.sum(x * acc_row0, 1))


def test_arguments_named_like_the_emitted_code():
    x, y = normal(8, 128), poisoned(8)
    _named_like_long_sums_kernel[(1,)](x, y, 128, 3.0, M=8, N=128)
    torch.testing.assert_close(y.double(), 3 * x.double().sum(1), rtol=1e-5, atol=1e-5)
