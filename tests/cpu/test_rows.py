"""Products of few rows with weights that are read where they lie."""

import pytest
import torch
import triton
import triton.language as tl

from tests.cpu.arrays import normal, poisoned
from tests.strategies import assert_close
from trinfer.cpu.check import is_checking


@triton.jit(do_not_specialize=["M", "N", "K", "stride_wn"])
def _linear_kernel(
    x_ptr, w_ptr, c_ptr, y_ptr, M, N, K, stride_wn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """y = c + x wᵀ in blocks of K; without c in one block."""
    offs_m, offs_n, offs_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    first = tl.program_id(0) * BN
    offs_y = offs_m[:, None] * N + first + offs_n[None, :]
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N - first)
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + (first + offs_n[None, :]) * stride_wn + offs_k[:, None]
    if c_ptr is None:
        x = tl.load(x_ptrs, mask=(offs_m[:, None] < M) & (offs_k[None, :] < K), other=0.0)
        w = tl.load(w_ptrs, mask=(offs_n[None, :] < N - first) & (offs_k[:, None] < K), other=0.0)
        y = tl.dot(x, w, input_precision="ieee", out_dtype=tl.float32)
    else:
        y = tl.load(c_ptr + offs_y, mask=mask, other=0.0)
        for k in range(0, K, BK):
            x = tl.load(x_ptrs + k, mask=(offs_m[:, None] < M) & (offs_k[None, :] < K - k), other=0.0)
            w = tl.load(w_ptrs + k, mask=(offs_n[None, :] < N - first) & (offs_k[:, None] < K - k), other=0.0)
            y = tl.dot(x, w, y, input_precision="ieee", out_dtype=tl.float32)
    tl.store(y_ptr + offs_y, y, mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("adds", [False, True])
def test_product_of_few_rows(dtype, adds):
    BM, BN, BK = 16, 32, 256
    for M in range(1, 17):
        # rows that end within a vector and within a block, and weights that are rows of something wider
        K, N = (300 if adds else 139) + 7 * M, 61 - M
        x, w = normal(M, K, dtype=dtype, seed=M), normal(N, K + 5, dtype=dtype, seed=M + 20)
        c, y = normal(M, N, seed=M + 40) if adds else None, poisoned(M, N)
        kernel = _linear_kernel[(-(-N // BN),)](x, w, c, y, M, N, K, K + 5, BM, BN, BK)
        # the sanitizer looks at every load
        assert ("t_rows_" in kernel.asm["c"]) != is_checking()
        truth = x.double() @ w[:, :K].double().T
        assert_close(y, truth if c is None else truth + c, torch.float32)


@triton.jit
def _unmasked_rows_kernel(x_ptr, w_ptr, y_ptr, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """What x holds behind K counts: only w is masked."""
    offs_m, offs_n, offs_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    x = tl.load(x_ptr + offs_m[:, None] * BK + offs_k[None, :])
    w = tl.load(w_ptr + offs_n[None, :] * BK + offs_k[:, None], mask=offs_k[:, None] < K, other=0.0)
    tl.store(y_ptr + offs_m[:, None] * BN + offs_n[None, :], tl.dot(x, w, input_precision="ieee"))


def test_infinity_behind_the_end_of_a_weight_is_not_dropped():
    x, w, y = normal(2, 256), normal(16, 256, seed=1), poisoned(2, 16)
    x[1, 250] = float("inf")
    _unmasked_rows_kernel[(1,)](x, w, y, 200, BM=2, BN=16, BK=256)
    assert_close(y[0], w[:, :200].double() @ x[0, :200].double(), torch.float32)
    assert y[1].isnan().all()


@triton.jit
def _other_kernel(x_ptr, w_ptr, y_ptr, N, other, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Rows of w behind N are not 0."""
    offs_m, offs_n, offs_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    x = tl.load(x_ptr + offs_m[:, None] * BK + offs_k[None, :])
    w = tl.load(w_ptr + offs_n[None, :] * BK + offs_k[:, None], mask=offs_n[None, :] < N, other=other)
    tl.store(y_ptr + offs_m[:, None] * BN + offs_n[None, :], tl.dot(x, w, input_precision="ieee"))


def test_weights_that_a_mask_replaces():
    x, w, y = normal(2, 256), normal(16, 256, seed=1), poisoned(2, 16)
    _other_kernel[(1,)](x, w, y, 10, 2.0, BM=2, BN=16, BK=256)
    w[10:] = 2
    assert_close(y, x.double() @ w.double().T, torch.float32)
