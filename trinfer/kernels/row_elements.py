"""Element functions of the products of few rows: each weight is read once, in the order of memory."""

import torch
import triton
import triton.language as tl

from trinfer.autotune import Config
from trinfer.kernels.elements import dot
from trinfer.kernels.norm_elements import normalise, row_statistics
from trinfer.kernels.op import next_power_of_2

# of a tile of rows, which a program holds on the stack of a CPU twice, as they are and packed, beside weights
_MOST_ELEMENTS = 1 << 18
# (BLOCK_M, BLOCK_N, BLOCK_K) of rows that are longer
_IN_BLOCKS = 16, 32, 1024


def whole_rows(dtype: torch.dtype, M: int, N: int, K: int, has_norm: bool) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_K) on a CPU, which reads whole rows of a weight where they lie.

    Many very long rows of x come in blocks of K, that is, with BLOCK_K < K.

    Each program copies, and perhaps normalises, all rows of x: several rows want more rows of the weight a
    program than one does, and `python -m bench.tune` tells how near a search these blocks are.
    """
    # products of shorter tiles copy the weight
    columns = max(256, triton.next_power_of_2(K))
    # the sanitizer copies these rows to the stack
    size = 1 << (17 if dtype == torch.float32 or columns > 1 << 14 else 18)
    most = min(256 if M > 2 and has_norm else 128, size // columns)
    share = N // (2 * torch.get_num_threads())
    # rows that are not there cost little; few kinds of blocks are few compilations
    block = 1 if M == 1 else 4 if M <= 4 else 16
    if block * columns > _MOST_ELEMENTS:
        block = next_power_of_2(M)
    if block * columns > _MOST_ELEMENTS:
        return _IN_BLOCKS
    least = max(1, min(16, _MOST_ELEMENTS // 2 // columns))
    return block, max(least, min(most, 1 << max(5, share.bit_length() - 1))), columns


def hold_rows(config: Config, M: int, of_two: bool = False) -> Config:
    """The configuration with a block for all M rows: only rows one by one, without SPANS_K, are a loop.

    A product of two inputs holds tiles of two weights, with half as many rows each.
    """
    if not config["SPANS_K"]:
        return config
    if of_two:
        if max(config["BLOCK_M"], M) * config["BLOCK_K"] > _MOST_ELEMENTS // 2:
            keys = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
            return {**config, **dict(zip(keys, _IN_BLOCKS, strict=True)), "SPANS_K": False}
        rows = config["BLOCK_N"]
        config = {**config, "BLOCK_N": max(min(16, rows), rows // 2)}
    return config if config["BLOCK_M"] >= M else {**config, "BLOCK_M": next_power_of_2(M)}


@triton.jit
def row_moments(x_ptr, K, eps, NORM: tl.constexpr, BLOCK_K: tl.constexpr):
    """(mean, rstd) of a row of x, which `row_product` normalises with."""
    mean = 0.0
    rstd = 0.0
    if NORM != "none":
        means, rstds = row_statistics(x_ptr, 1, K, eps, 0, NORM, 1, BLOCK_K)
        mean = tl.sum(means, 0)
        rstd = tl.sum(rstds, 0)
    return mean, rstd


@triton.jit
def row_product(
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
):
    """x · wᵀ for a row x with these moments and the first BLOCK_N rows of w, [BLOCK_N] float32."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_n = offs_n < N
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
def load_rows(
    x_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    M,
    K,
    eps,
    NORM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPANS_K: tl.constexpr,
):
    """(rows, means, rstds) of up to BLOCK_M rows of x: if BLOCK_K spans them all of them, normalised and 0
    behind M and K, else their statistics."""
    offs_k = tl.arange(0, BLOCK_K)
    means = tl.zeros([BLOCK_M], dtype=tl.float32)
    rstds = means
    rows = tl.zeros([BLOCK_M, BLOCK_K], dtype=x_ptr.dtype.element_ty)
    if NORM != "none":
        means, rstds = row_statistics(x_ptr, M, K, eps, K, NORM, BLOCK_M, 128 if SPANS_K else BLOCK_K)
    if SPANS_K:
        offs_m = tl.arange(0, BLOCK_M)[:, None]
        mask = (offs_m < M) & (offs_k[None, :] < K)
        rows = tl.load(x_ptr + offs_m * K + offs_k[None, :], mask=mask, other=0.0)
        if NORM != "none":
            rows = normalise(
                rows,
                means[:, None],
                rstds[:, None],
                norm_weight_ptr,
                norm_bias_ptr,
                offs_k[None, :],
                offs_k[None, :] < K,
                NORM,
                WEIGHT_OFFSET,
                x_ptr.dtype.element_ty,
            )
            rows = tl.where(mask, rows, 0.0)
    return rows, means, rstds


@triton.jit
def tile_product(
    rows,
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
    SPANS_K: tl.constexpr,
):
    """w · xᵀ for what `load_rows` gave of x and the first BLOCK_N rows of w, [BLOCK_N, BLOCK_M] float32."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    if SPANS_K:
        w_ptrs = w_ptr + offs_n[None, :] * stride_wn + offs_k[:, None] * stride_wk
        w = tl.load(w_ptrs, mask=(offs_n[None, :] < N) & (offs_k[:, None] < K), other=0.0)
        acc = tl.trans(dot(rows, w, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)))
    else:
        # the weight is the left operand: 64 of its rows fill a tensor core tile that few rows of x would not
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
