"""Products of tiles: rows that a mask leaves out are not multiplied, and a loop asks for its next weights."""

import re

import pytest
import torch
import triton
import triton.language as tl

from tests.cpu.arrays import normal, poisoned
from tests.strategies import assert_close
from trinfer.cpu.check import is_checking

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@triton.jit(do_not_specialize=["M"])
def _rows_kernel(x_ptr, w_ptr, c_ptr, y_ptr, M, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """y = c + x wᵀ, all rows of the tile: behind M those of c, or 0."""
    offs_m, offs_n, offs_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    x = tl.load(x_ptr + offs_m[:, None] * BK + offs_k[None, :], mask=offs_m[:, None] < M, other=0.0)
    w = tl.load(w_ptr + offs_n[None, :] * BK + offs_k[:, None])
    offs_y = offs_m[:, None] * BN + offs_n[None, :]
    if c_ptr is None:
        y = tl.dot(x, w, input_precision="ieee", out_dtype=tl.float32)
    else:
        y = tl.dot(x, w, tl.load(c_ptr + offs_y), input_precision="ieee", out_dtype=tl.float32)
    tl.store(y_ptr + offs_y, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("BN", [16, 64])
def test_rows_that_a_mask_leaves_out(dtype, adds, BN):
    BM, BK = 64, 32
    for M in (0, 1, 2, 7, 8, 20, 33, 63, 64, 65):
        x, w = normal(max(M, 1), BK, dtype=dtype, seed=M), normal(BN, BK, dtype=dtype, seed=M + 1)
        c, y = normal(BM, BN, seed=M + 2) if adds else None, poisoned(BM, BN)
        kernel = _rows_kernel[(1,)](x, w, c, y, M, BM, BN, BK)
        assert "const int rows" in kernel.asm["c"]
        truth = torch.zeros(BM, BN, dtype=torch.float64) if c is None else c.double()
        truth[:M] += x.double()[: min(M, BM)] @ w.double().T
        assert_close(y, truth, torch.float32)


@triton.jit(do_not_specialize=["N", "K", "step"])
def _walk_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    steps_ptr,
    N,
    K,
    step,
    WALK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y = x wᵀ in blocks of K, along pointers that move by a constant, an argument or what a step reads."""
    offs_m, offs_n, offs_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_n[None, :] * K + offs_k[:, None]
    y = tl.zeros([BM, BN], dtype=tl.float32)
    for k in range(0, K, BK):
        x = tl.load(x_ptrs, mask=offs_k[None, :] < K - k, other=0.0)
        w = tl.load(w_ptrs, mask=(offs_k[:, None] < K - k) & (offs_n[None, :] < N), other=0.0)
        y = tl.dot(x, w, y, input_precision="ieee", out_dtype=tl.float32)
        x_ptrs += BK
        if WALK == "constant":
            w_ptrs += BK
        elif WALK == "argument":
            w_ptrs += step
        else:
            w_ptrs += tl.load(steps_ptr + k // BK)
    tl.store(y_ptr + offs_m[:, None] * N + offs_n[None, :], y, mask=offs_n[None, :] < N)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("walk", "ahead"), [("constant", "32"), ("argument", "vstep"), ("loaded", None)])
def test_a_loop_asks_for_the_weights_of_its_next_step(dtype, walk, ahead):
    BM, BN, BK = 32, 32, 32
    N, K = 27, 75
    x, w, y = normal(BM, K, dtype=dtype, seed=1), normal(N, K, dtype=dtype, seed=2), poisoned(BM, N)
    steps = torch.full((3,), BK, dtype=torch.int32)
    code = _walk_kernel[(1,)](x, w, y, steps, N, K, BK, walk, BM, BN, BK).asm["c"]
    # once a row of w that is there; the sanitizer looks at every load
    found = re.findall(r"T_FETCH\(\w+ \+ (\w+), 32\)", code)
    assert found == ([ahead] if ahead is not None and not is_checking() else [])
    assert_close(y, x.double() @ w.double().T, torch.float32)
