"""Element functions of the products of few rows: each weight is read once, in the order of memory."""

import triton
import triton.language as tl

from trinfer.kernels.elements import dot
from trinfer.kernels.norm_elements import normalise, normalise_row, row_statistics


@triton.jit
def load_row(
    x_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    K,
    eps,
    NORM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPANS_K: tl.constexpr,
):
    """(row, mean, rstd) of a row of x: all of it, normalised, if BLOCK_K spans it, else its statistics."""
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    mean = 0.0
    rstd = 0.0
    row = tl.zeros([BLOCK_K], dtype=tl.float32)
    if SPANS_K:
        row = tl.load(x_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        if NORM != "none":
            row = normalise_row(
                row,
                norm_weight_ptr,
                norm_bias_ptr,
                offs_k,
                mask_k,
                K,
                eps,
                NORM,
                WEIGHT_OFFSET,
                x_ptr.dtype.element_ty,
            ).to(tl.float32)
    elif NORM != "none":
        means, rstds = row_statistics(x_ptr, 1, K, eps, 0, NORM, 1, BLOCK_K)
        mean = tl.sum(means, 0)
        rstd = tl.sum(rstds, 0)
    return row, mean, rstd


@triton.jit
def row_product(
    row,
    mean,
    rstd,
    x_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    w_ptr,
    N,
    K,
    stride_wn,
    stride_wk,
    NORM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPANS_K: tl.constexpr,
):
    """x · wᵀ for what `load_row` gave of a row x and the first BLOCK_N rows of w, [BLOCK_N] float32."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_n = offs_n < N
    if SPANS_K:
        w_ptrs = w_ptr + offs_n[:, None] * stride_wn + offs_k[None, :] * stride_wk
        mask = mask_n[:, None] & (offs_k[None, :] < K)
        product = tl.load(w_ptrs, mask=mask, other=0.0).to(tl.float32) * row[None, :]
        if NORM != "none":
            # the row is not known to be 0 behind K, and a loop on a CPU ends where all that follows is 0
            product = tl.where(mask, product, 0.0)
        acc = tl.sum(product, 1)
    else:
        acc = tl.zeros([BLOCK_N], dtype=tl.float32)
        # summed once, after the loop: a reduction across threads costs more than the loads it waits for
        partial = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        if IS_TRANSPOSED:
            # the weight is stored [K, N]: walk it in memory order, one vector of outputs an input
            w_ptrs = w_ptr + offs_k[:, None] * stride_wk + offs_n[None, :]
        else:
            w_ptrs = w_ptr + offs_n[:, None] * stride_wn + offs_k[None, :] * stride_wk
        for k in range(0, K, BLOCK_K):
            mask_k = offs_k < K - k
            x = tl.load(x_ptr + k + offs_k, mask=mask_k, other=0.0)
            if NORM != "none":
                x = normalise(
                    x,
                    mean,
                    rstd,
                    norm_weight_ptr,
                    norm_bias_ptr,
                    k + offs_k,
                    mask_k,
                    NORM,
                    WEIGHT_OFFSET,
                    x_ptr.dtype.element_ty,
                )
            x = x.to(tl.float32)
            if IS_TRANSPOSED:
                w = tl.load(w_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0).to(tl.float32)
                acc += tl.sum(w * x[:, None], 0)
            else:
                w = tl.load(w_ptrs, mask=mask_n[:, None] & mask_k[None, :], other=0.0).to(tl.float32)
                partial += w * x[None, :]
            w_ptrs += BLOCK_K * stride_wk
        if not IS_TRANSPOSED:
            acc = tl.sum(partial, 1)
    return acc


@triton.jit
def tile_product(
    mean,
    rstd,
    x_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    w_ptr,
    M,
    N,
    K,
    stride_wn,
    stride_wk,
    NORM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """w · xᵀ for up to BLOCK_M rows of x and the first BLOCK_N rows of w, [BLOCK_N, BLOCK_M] float32."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    # the weight is the left operand: 64 of its rows fill a tensor core tile that a few rows of x would not
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    w_ptrs = w_ptr + offs_n[:, None] * stride_wn + offs_k[None, :] * stride_wk
    x_ptrs = x_ptr + offs_m[None, :] * K + offs_k[:, None]
    for k in range(0, K, BLOCK_K):
        w = tl.load(w_ptrs, mask=(offs_n[:, None] < N) & (offs_k[None, :] < K - k), other=0.0)
        mask_k = offs_k[:, None] < K - k
        x = tl.load(x_ptrs, mask=(offs_m[None, :] < M) & mask_k, other=0.0)
        if NORM != "none":
            x = normalise(
                x,
                mean[None, :],
                rstd[None, :],
                norm_weight_ptr,
                norm_bias_ptr,
                k + offs_k[:, None],
                mask_k,
                NORM,
                WEIGHT_OFFSET,
                x_ptr.dtype.element_ty,
            )
        acc = dot(w, x, acc)
        w_ptrs += BLOCK_K * stride_wk
        x_ptrs += BLOCK_K
    return acc
