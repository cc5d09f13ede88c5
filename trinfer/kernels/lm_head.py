"""Logits of up to 16 rows and the most likely token of each, in one launch."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.argmax_elements import argmax_memory, finish_argmax, rank
from trinfer.kernels.elements import as_segments, linear_ref
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.norm_elements import Norm, norm_options, normalise_ref
from trinfer.kernels.op import Op, nbytes, next_power_of_2, output_of
from trinfer.kernels.row_elements import (
    hold_rows,
    load_rows,
    row_moments,
    row_product,
    tile_product,
    whole_rows,
)

MAX_ROWS = 16


class _Key(NamedTuple):
    dtype: torch.dtype
    rows: int
    V: int
    K: int
    is_transposed: bool
    has_norm: bool


@triton.jit
def _tanh(x):
    """tanh of float32 x, to 1e-7 of it everywhere."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    # near 0 that difference cancels; 62/2835 x⁹ is what this leaves out
    s = x * x
    near = x * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 - s * (17.0 / 315.0))))
    return tl.where(s < 0.04, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _logits(y, b_ptr, y_ptr, offs_y, offs_n, mask, V, scale, softcap, DTYPE: tl.constexpr):
    """Ranks of what a product gave, after bias, scale and cap; stores it as logits where there is room."""
    if b_ptr is not None:
        y += tl.load(b_ptr + offs_n, mask=offs_n < V, other=0.0).to(tl.float32)
    y *= scale
    if softcap is not None:
        y = softcap * _tanh(y / softcap)
    # ranked as rounded: the token is the argmax of the logits that are stored
    y = y.to(DTYPE)
    if y_ptr is not None:
        tl.store(y_ptr + offs_y, y, mask=mask)
    return rank(y.to(tl.float32), offs_n, mask)


# M is the batch and changes from call to call: it must not recompile
@triton.jit(do_not_specialize=["M"])
def _lm_head_kernel(
    x_ptr,
    nw_ptr,
    nb_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    scratch_ptr,
    token_ptr,
    M,
    V,
    K,
    stride_wn,
    stride_wk,
    eps,
    scale,
    softcap,
    NORM: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    IS_FLOAT32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPANS_K: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program per BLOCKS times BLOCK_N entries of the vocabulary, all rows of x."""
    spans: tl.constexpr = SPANS_K and not IS_TRANSPOSED
    dtype: tl.constexpr = tl.float32 if IS_FLOAT32 else x_ptr.dtype.element_ty
    start = tl.program_id(0) * (BLOCKS * BLOCK_N)
    if BLOCK_M == 1 and not spans:
        for m in range(M):
            x_row = x_ptr + m * K
            mean, rstd = row_moments(x_row, K, eps, NORM, BLOCK_K)
            best = tl.zeros([BLOCK_N], dtype=tl.int64)
            for i in range(BLOCKS):
                first = start + i * BLOCK_N
                offs_n = first + tl.arange(0, BLOCK_N)
                w_block = w_ptr + first.to(tl.int64) * stride_wn
                # fmt: off
                y = row_product(
                    mean, rstd, x_row, nw_ptr, nb_ptr, w_block, V - first, K, stride_wn, stride_wk,
                    NORM, NORM_OFFSET, IS_TRANSPOSED, BLOCK_N, BLOCK_K,
                )
                # fmt: on
                offs_y = m * V + offs_n
                ranks = _logits(y, b_ptr, y_ptr, offs_y, offs_n, offs_n < V, V, scale, softcap, dtype)
                best = tl.maximum(best, ranks)
            tl.atomic_max(scratch_ptr + m, tl.max(best, 0), sem="relaxed")
    else:
        offs_m = tl.arange(0, BLOCK_M)
        # fmt: off
        rows, means, rstds = load_rows(
            x_ptr, nw_ptr, nb_ptr, M, K, eps, NORM, NORM_OFFSET, BLOCK_M, BLOCK_K, spans
        )
        # fmt: on
        best = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.int64)
        for i in range(BLOCKS):
            first = start + i * BLOCK_N
            offs_n = first + tl.arange(0, BLOCK_N)[:, None]
            w_block = w_ptr + first.to(tl.int64) * stride_wn
            # fmt: off
            y = tile_product(
                rows, means, rstds, x_ptr, nw_ptr, nb_ptr, w_block, M, V - first, K, stride_wn, stride_wk,
                NORM, NORM_OFFSET, BLOCK_M, BLOCK_N, BLOCK_K, spans,
            )
            # fmt: on
            offs_y = offs_m[None, :] * V + offs_n
            mask = (offs_m[None, :] < M) & (offs_n < V)
            ranks = _logits(y, b_ptr, y_ptr, offs_y, offs_n, mask, V, scale, softcap, dtype)
            best = tl.maximum(best, ranks)
        tl.atomic_max(scratch_ptr + offs_m, tl.max(best, 0), mask=offs_m < M, sem="relaxed")
    finish_argmax(scratch_ptr, scratch_ptr + M, token_ptr, M, tl.num_programs(0), 16)


@launcher
def lm_head(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    dtype: torch.dtype | None = None,
    has_logits: bool = True,
    logits: Tensor | None = None,
    scratch: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """logits = cap((norm(x) · weightᵀ + bias) · scale) and token = argmax(logits), reading weight once.

    Args:
        x: [..., K] float16|bfloat16|float32 with at most 16 rows, any strides.
        weight: [V, K] with any strides.
        bias: [V].
        norm: a `Norm` of the rows of x, done in the same launch.
        scale: factor of the logits (Cohere, Granite).
        softcap: cap(y) = softcap · tanh(y / softcap) (Gemma 2); None for none.
        dtype: of the logits, x.dtype or float32; None for x.dtype, which is what HF models compare.
        has_logits: False stores none.
        logits: [..., V] of `dtype`, contiguous, memory for the logits.
        scratch: int64 [2 · rows] or more, zeros before the first launch; every launch leaves zeros.
        out: int64 [...], memory for the tokens.

    Returns:
        (logits [..., V] or None, tokens [...] int64). Equal logits give the lowest token, nan is above all.

    Raises:
        ValueError: more than 16 rows, an empty vocabulary, shapes, dtypes or memory that do not fit.

    Numerics:
        Everything in float32 and one rounding to `dtype`; the token is the argmax of the rounded logits.
    """
    (weight,), (bias,) = as_segments(x, weight, bias, False, None)
    norm_tensors, norm_constants = norm_options(x, norm)
    dtype = x.dtype if dtype is None else dtype
    (V, K), M = weight.shape, x.shape[:-1].numel()
    _check(x, V, dtype, has_logits, logits)
    scratch, tokens = argmax_memory(x, scratch, out)
    if has_logits:
        logits = output_of((*x.shape[:-1], V), logits, x, (x, weight, bias), dtype, "logits")
    if not backend.runs_triton(x):
        y, token = lm_head_ref(x, weight, bias, norm=norm, scale=scale, softcap=softcap, dtype=dtype)
        return logits if logits is None or y is None else logits.copy_(y), tokens.copy_(token)
    if M == 0:
        return logits, tokens
    is_transposed = weight.stride(0) == 1 and weight.stride(1) != 1
    key = _Key(x.dtype, next_power_of_2(M), V, K, is_transposed, norm is not None)
    config = hold_rows(choose(OP, key), M)
    pointers = (x.contiguous(), *norm_tensors[:2], weight, bias, logits, scratch, tokens)
    scalars = (M, V, K, *weight.stride(), norm_tensors[2], scale, softcap)
    launched("lm_head", *pointers)
    launch(_lm_head_kernel, (-(-V // (config["BLOCK_N"] * config["BLOCKS"])),))(
        *pointers, *scalars, *norm_constants, is_transposed, dtype == torch.float32, **config
    )
    return logits, tokens


def _check(x: Tensor, V: int, dtype: torch.dtype, has_logits: bool, logits: Tensor | None) -> None:
    rows, K = x.shape[:-1].numel(), x.shape[-1]
    if dtype not in (x.dtype, torch.float32):
        raise ValueError(f"dtype={dtype} - allowed: {x.dtype}, torch.float32 - pass one of these or None")
    if logits is not None and not has_logits:
        raise ValueError("has_logits=False comes with logits - allowed: one of them - leave logits out")
    if rows > MAX_ROWS or V == 0 or K == 0:
        raise ValueError(
            f"x has {rows} rows of {K} for a vocabulary of {V} - allowed: up to {MAX_ROWS} rows, no empty "
            "sizes - pass the last position of each sequence only"
        )


def lm_head_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    dtype: torch.dtype | None = None,
    has_logits: bool = True,
    logits: Tensor | None = None,
    scratch: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """The truth of `lm_head`."""
    y = linear_ref(normalise_ref(x, norm), weight, bias, "none", False, None) * scale
    if softcap is not None:
        y = softcap * torch.tanh(y / softcap)
    y = y if dtype is None or x.dtype == torch.float64 else y.to(dtype)
    token = y.argmax(-1)
    y = y if logits is None else logits.copy_(y)
    return y if has_logits else None, token if out is None else out.copy_(token)


def _default(key: _Key) -> Config:
    if backend.kind() != "gpu":
        if key.is_transposed:
            return _config(1, 64, 16)
        blocks = whole_rows(key.dtype, key.rows, key.V, key.K, key.has_norm)
        return _config(*blocks, SPANS_K=blocks[2] >= key.K)
    if key.rows > 1:
        # float32 rows that are normalised on the way take registers: with larger blocks they spill
        is_tight = key.has_norm and key.dtype == torch.float32
        return _config(16, 32, 32 if is_tight else 128, 2, num_stages=3)
    if key.is_transposed:
        return _config(1, 64, 16)
    # several blocks a program: each program normalises the row anew and makes one atomic update
    if key.K % 256:
        return _config(1, 16, 64, 4)
    return _config(1, 2, 512, 16) if key.K <= 2048 else _config(1, 2, 1024, 8)


def _config(
    BLOCK_M: int, BLOCK_N: int, BLOCK_K: int, BLOCKS: int = 1, SPANS_K: bool = False, num_stages: int = 1
) -> Config:
    return {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_K,
        "SPANS_K": SPANS_K,
        "BLOCKS": BLOCKS,
        "num_warps": 4,
        "num_stages": num_stages,
    }


def _inputs(M: int, V: int, K: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    weight = torch.randn(V, K, device=device) / K**0.5
    x = torch.randn(M, K, dtype=dtype, device=device)
    norm = Norm(torch.ones(K, dtype=dtype, device=device))
    return {"x": x, "weight": weight.to(dtype), "norm": norm}


def _cost(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> tuple[int, int]:
    M, V = x.shape[:-1].numel(), weight.shape[0]
    return nbytes(x, weight, bias) + M * V * x.element_size() + 8 * M, 2 * M * weight.numel()


_SPACE = (
    *(
        {**_config(1, n, k, blocks), "num_warps": w}
        for n in (1, 2, 4, 8, 16)
        for k in (64, 512, 1024)
        for blocks in (1, 4, 16)
        for w in (4, 8)
    ),
    *(
        _config(16, n, k, blocks, num_stages=s)
        for n in (32, 64)
        for k in (64, 128)
        for blocks in (1, 4)
        for s in (2, 3)
    ),
)

OP = Op("lm_head", lm_head, lm_head_ref, _SPACE, _default, _inputs, _cost)
