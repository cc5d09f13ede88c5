"""Whole small kernels, one language feature each, against torch."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from tests.cpu.arrays import integers, normal, poisoned
from tests.strategies import assert_close


def close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, torch.float32)


@triton.jit
def _softmax_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    pid_m = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + pid_m * N + offs_n, mask=offs_n < N, other=float("-inf"))
    tl.store(y_ptr + pid_m * N + offs_n, tl.softmax(x), mask=offs_n < N)


def test_softmax():
    x, y = normal(8, 500), poisoned(8, 500)
    _softmax_kernel[(8,)](x, y, 500, BLOCK_N=512)
    close(y, x.double().softmax(1))


@triton.jit
def _layer_norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, N, eps, BLOCK_N: tl.constexpr):
    pid_m = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    x = tl.load(x_ptr + pid_m * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    d = tl.where(mask_n, x - tl.sum(x, 0) / N, 0.0)
    y = d * tl.rsqrt(tl.sum(d * d, 0) / N + eps)
    y = y * tl.load(w_ptr + offs_n, mask=mask_n) + tl.load(b_ptr + offs_n, mask=mask_n)
    tl.store(y_ptr + pid_m * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask_n)


def test_layer_norm():
    x, w, b, y = normal(8, 500), normal(500, seed=1), normal(500, seed=2), poisoned(8, 500)
    _layer_norm_kernel[(8,)](x, w, b, y, 500, 1e-5, BLOCK_N=512)
    close(y, F.layer_norm(x.double(), (500,), w.double(), b.double()))


@triton.jit
def _cumsum_kernel(x_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    tl.store(y_ptr + offs_n, tl.cumsum(tl.load(x_ptr + offs_n), 0))


def test_cumsum():
    x, y = normal(256), poisoned(256)
    _cumsum_kernel[(1,)](x, y, BLOCK_N=256)
    close(y, x.double().cumsum(0))


@triton.jit
def _cumulative_rows_kernel(x_ptr, sum_ptr, max_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offs)
    tl.store(sum_ptr + offs, tl.cumsum(x, AXIS, reverse=True))
    tl.store(max_ptr + offs, tl.associative_scan(x, AXIS, _larger))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@pytest.mark.parametrize("axis", [0, 1])
def test_scan_of_either_axis_and_direction(axis):
    x, sums, maxima = normal(16, 32), poisoned(16, 32), poisoned(16, 32)
    _cumulative_rows_kernel[(1,)](x, sums, maxima, M=16, N=32, AXIS=axis)
    close(sums, x.double().flip(axis).cumsum(axis).flip(axis))
    assert torch.equal(maxima, x.cummax(axis).values)


@triton.jit
def _affine_steps(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def _recurrence_kernel(a_ptr, b_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    pair = (tl.load(a_ptr + offs_n), tl.load(b_ptr + offs_n))
    a, y = tl.associative_scan(pair, 0, _affine_steps)
    tl.store(y_ptr + offs_n, y)


def test_associative_scan_of_pairs():
    a, b, y = normal(256).sigmoid(), normal(256, seed=1), poisoned(256)
    _recurrence_kernel[(1,)](a, b, y, BLOCK_N=256)
    steps = itertools.accumulate(
        zip(a.tolist(), b.tolist(), strict=True), lambda p, q: (p[0] * q[0], p[1] * q[0] + q[1])
    )
    close(y, torch.tensor([step[1] for step in steps], dtype=torch.float64))


@triton.jit
def _rotary_kernel(x_ptr, cos_ptr, sin_ptr, y_ptr, H, D: tl.constexpr, BLOCK_H: tl.constexpr):
    pid_m = tl.program_id(0)
    offs_h = tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, D // 2)
    mask = (offs_h < H)[:, None] & (offs_d[None, :] < D)
    offs = pid_m * H * D + offs_h[:, None] * D + offs_d[None, :]
    a = tl.load(x_ptr + offs, mask=mask)
    b = tl.load(x_ptr + offs + D // 2, mask=mask)
    cos = tl.load(cos_ptr + pid_m * D // 2 + offs_d)[None, :]
    sin = tl.load(sin_ptr + pid_m * D // 2 + offs_d)[None, :]
    tl.store(y_ptr + offs, a * cos - b * sin, mask=mask)
    tl.store(y_ptr + offs + D // 2, b * cos + a * sin, mask=mask)


@pytest.mark.parametrize("in_place", [False, True])
def test_rotary(in_place):
    x, cos, sin = normal(5, 9, 64), normal(5, 32, seed=1), normal(5, 32, seed=2)
    y = x.clone() if in_place else poisoned(5, 9, 64)
    _rotary_kernel[(5,)](y if in_place else x, cos, sin, y, 9, D=64, BLOCK_H=16)
    (a, b), c, s = x.double().chunk(2, -1), cos[:, None], sin[:, None]
    close(y, torch.cat([a * c - b * s, b * c + a * s], -1))


@triton.jit
def _turn_pairs_kernel(x_ptr, y_ptr, D: tl.constexpr):
    offs_d = tl.arange(0, D)
    a, b = tl.split(tl.reshape(tl.load(x_ptr + offs_d), (D // 2, 2)))
    tl.store(y_ptr + offs_d, tl.reshape(tl.join(-b, a), (D,)))


def test_split_join_reshape():
    x, y = normal(256), poisoned(256)
    _turn_pairs_kernel[(1,)](x, y, D=256)
    assert torch.equal(y, torch.stack([-x[1::2], x[::2]], -1).flatten())


@triton.jit
def _shape_kernel(x_ptr, y_ptr, z_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    offs = tl.arange(0, M * N * K)
    x = tl.reshape(tl.load(x_ptr + offs), (M, N, K))
    tl.store(y_ptr + offs, tl.ravel(tl.permute(x, (2, 0, 1))))
    tl.store(z_ptr + offs, tl.ravel(tl.flip(x, 1)))


def test_permute_and_flip():
    x, y, z = normal(4, 8, 16), poisoned(16, 4, 8), poisoned(4, 8, 16)
    _shape_kernel[(1,)](x, y, z, M=4, N=8, K=16)
    assert torch.equal(y, x.permute(2, 0, 1))
    assert torch.equal(z, x.flip(1))


@triton.jit
def _cat_kernel(x_ptr, y_ptr, z_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    both = tl.cat(tl.load(x_ptr + offs_n), tl.load(y_ptr + offs_n) * 2, can_reorder=True)
    tl.store(z_ptr + tl.arange(0, 2 * BLOCK_N), both)


def test_cat():
    x, y, z = normal(64), normal(64, seed=1), poisoned(128)
    _cat_kernel[(1,)](x, y, z, BLOCK_N=64)
    assert torch.equal(z.sort().values, torch.cat([x, 2 * y]).sort().values)


@triton.jit
def _trans_kernel(x_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr):
    offs_m = tl.arange(0, M)
    offs_n = tl.arange(0, N)
    x = tl.load(x_ptr + offs_m[:, None] * N + offs_n[None, :])
    tl.store(y_ptr + offs_n[:, None] * M + offs_m[None, :], tl.trans(x))


def test_trans():
    x, y = normal(16, 32), poisoned(32, 16)
    _trans_kernel[(1,)](x, y, M=16, N=32)
    assert torch.equal(y, x.T)


@triton.jit
def _gather_kernel(x_ptr, index_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y_ptr + offs, tl.gather(tl.load(x_ptr + offs), tl.load(index_ptr + offs), AXIS))


@pytest.mark.parametrize("axis", [0, 1])
def test_gather(axis):
    x, y = normal(16, 64), poisoned(16, 64)
    index = integers(0, x.shape[axis], 16, 64, dtype=torch.int64)
    _gather_kernel[(1,)](x, index, y, M=16, N=64, AXIS=axis)
    assert torch.equal(y, x.gather(axis, index))


@triton.jit
def _sort_kernel(x_ptr, y_ptr, N: tl.constexpr, DESCENDING: tl.constexpr):
    offs_n = tl.arange(0, N)
    tl.store(y_ptr + offs_n, tl.sort(tl.load(x_ptr + offs_n), descending=DESCENDING))


@pytest.mark.parametrize("descending", [False, True])
def test_sort(descending):
    x, y = normal(64), poisoned(64)
    _sort_kernel[(1,)](x, y, N=64, DESCENDING=descending)
    assert torch.equal(y, x.sort(descending=descending).values)


@triton.jit
def _topk_kernel(x_ptr, y_ptr, N: tl.constexpr, K: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, K), tl.topk(tl.load(x_ptr + tl.arange(0, N)), K))


def test_topk():
    x, y = normal(32), poisoned(8)
    _topk_kernel[(1,)](x, y, N=32, K=8)
    assert torch.equal(y, x.topk(8).values)


@triton.jit
def _histogram_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr, BINS: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=0)
    tl.store(y_ptr + tl.arange(0, BINS), tl.histogram(x, BINS, mask=offs_n < N))


def test_histogram_counts_what_lies_in_its_bins():
    x, y = integers(-5, 70, 1000), poisoned(64, dtype=torch.int32)
    _histogram_kernel[(1,)](x, y, 1000, BLOCK_N=1024, BINS=64)
    assert y.tolist() == torch.bincount(x[(x >= 0) & (x < 64)], minlength=64).tolist()


@triton.jit
def _int4_gemv_kernel(x_ptr, w_ptr, scale_ptr, y_ptr, N, K: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, K // 2)
    mask_n = offs_n < N
    w = tl.load(w_ptr + offs_n[:, None] * (K // 2) + offs_k[None, :], mask=mask_n[:, None], other=0)
    low = (w & 15).to(tl.float32) - 8
    high = (w >> 4).to(tl.float32) - 8
    even = tl.load(x_ptr + 2 * offs_k)[None, :]
    odd = tl.load(x_ptr + 2 * offs_k + 1)[None, :]
    scale = tl.load(scale_ptr + offs_n, mask=mask_n, other=0.0)
    tl.store(y_ptr + offs_n, tl.sum(low * even + high * odd, 1) * scale, mask=mask_n)


def test_int4_gemv_on_uint8():
    x, scale, y = normal(128), normal(100, seed=1), poisoned(100)
    packed = integers(0, 256, 100, 64, dtype=torch.uint8)
    _int4_gemv_kernel[(13,)](x, packed, scale, y, 100, K=128, BLOCK_N=8)
    w = torch.stack([(packed & 15).double() - 8, (packed >> 4).double() - 8], -1).view(100, 128)
    close(y, w @ x.double() * scale.double())


@triton.jit
def _random_kernel(uniform_ptr, normal_ptr, bits_ptr, seed, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    tl.store(uniform_ptr + offs_n, tl.rand(seed, offs_n))
    tl.store(normal_ptr + offs_n, tl.randn(seed, offs_n))
    tl.store(bits_ptr + offs_n, tl.randint(seed, offs_n))


def philox(seed: int, counter: int) -> int:
    """The first word of Philox-4x32-10, as `tl.randint` returns it."""
    c, k = [counter, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


@pytest.mark.parametrize("seed", [1234, (77 << 32) + 5])
def test_random_numbers_are_philox(seed):
    uniform, gauss, bits = poisoned(4096), poisoned(4096), poisoned(4096, dtype=torch.int32)
    _random_kernel[(1,)](uniform, gauss, bits, seed, BLOCK_N=4096)
    assert (bits[:64].to(torch.int64) & 0xFFFFFFFF).tolist() == [philox(seed, n) for n in range(64)]
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.02
    assert abs(gauss.mean()) < 0.05 and abs(gauss.std() - 1) < 0.05


@triton.jit
def _descriptor_kernel(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    y = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    m = tl.program_id(0) * BLOCK_M
    n = tl.program_id(1) * BLOCK_N
    y.store([m, n], x.load([m, n]) * 2)


def test_tensor_descriptor():
    x, y = normal(30, 50), poisoned(30, 50)
    _descriptor_kernel[(2, 4)](x, y, 30, 50, BLOCK_M=16, BLOCK_N=16)
    assert torch.equal(y, 2 * x)


@triton.jit
def _range_options_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for n in tl.range(0, N, BLOCK_N, num_stages=3, loop_unroll_factor=2):
        acc += tl.load(x_ptr + n + offs_n)
    for i in tl.static_range(4):
        acc += tl.load(x_ptr + i * BLOCK_N + offs_n) * i
    tl.store(y_ptr + offs_n, acc)


def test_range_options_and_static_range():
    x, y = normal(1024), poisoned(128)
    _range_options_kernel[(1,)](x, y, 1024, BLOCK_N=128)
    rows = x.double().view(8, 128)
    close(y, rows.sum(0) + (rows[:4] * torch.arange(4.0)[:, None]).sum(0))


@triton.jit
def _long_chain_kernel(x_ptr, y_ptr, STEPS: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n)
    y = x
    for _ in tl.static_range(STEPS):
        y = y * 0.5 + x
    square = x
    for _ in tl.static_range(40):
        square = square * square
    tl.store(y_ptr + offs_n, y + square)


def test_hundreds_of_unrolled_steps():
    x, y = normal(16).clamp(-0.9, 0.9), poisoned(16)
    _long_chain_kernel[(1,)](x, y, STEPS=400, BLOCK_N=16)
    close(y, 2 * x.double())


@triton.autotune([triton.Config({"BLOCK_N": 64}), triton.Config({"BLOCK_N": 256}, num_warps=8)], key=["N"])
@triton.jit
def _tuned_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(y_ptr + offs_n, tl.load(x_ptr + offs_n, mask=offs_n < N) * 3, mask=offs_n < N)


def test_autotune():
    x, y = normal(1000), poisoned(1000)
    _tuned_kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK_N"]),)](x, y, 1000)
    assert torch.equal(y, 3 * x)


@triton.heuristics({"IS_EVEN": lambda given: given["N"] % given["BLOCK_N"] == 0})
@triton.jit
def _heuristic_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr, IS_EVEN: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if IS_EVEN:
        tl.store(y_ptr + offs_n, tl.load(x_ptr + offs_n) * 3)
    else:
        tl.store(y_ptr + offs_n, tl.load(x_ptr + offs_n, mask=offs_n < N) * 3, mask=offs_n < N)


@pytest.mark.parametrize("size", [1000, 1024])
def test_heuristics(size):
    x, y = normal(size), poisoned(size)
    _heuristic_kernel[(8,)](x, y, size, BLOCK_N=128)
    assert torch.equal(y, 3 * x)


@triton.jit
def _double(x):
    return x + x, x * x


@triton.jit
def _tuple_kernel(ptrs, sizes, scale, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < sizes[0]
    twice, square = _double(tl.load(ptrs[0] + offs_n, mask=mask_n))
    tl.store(ptrs[1] + offs_n, twice * scale[0] + square * scale[1][0], mask=mask_n)


def test_tuple_arguments():
    x, y = normal(50), poisoned(50)
    _tuple_kernel[(1,)]((x, y), (50, 7), (2.0, (0.5, None)), BLOCK_N=64)
    close(y, 4 * x.double() + 0.5 * x.double() ** 2)
