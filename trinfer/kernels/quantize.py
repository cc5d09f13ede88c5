"""Quantisation of rows to codes of 8 or 4 bits, for weights once and for activations at every product."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, as_rows, nbytes, wide
from trinfer.kernels.quant_elements import group_size, stored_columns

# the smallest normal number as least scale: zeros get codes of 0 and nothing divides by 0
SMALLEST = tl.constexpr(2.0**-126)


class _Key(NamedTuple):
    dtype: torch.dtype
    group: int
    bits: int
    symmetric: bool


@triton.jit
def _codes(x, scale, zero, mask, TOP: tl.constexpr, BOTTOM: tl.constexpr):
    """The codes nearest to (x - zero) / scale, int8; 0 where masked off."""
    q = (x - zero[:, None]) * (1.0 / scale)[:, None]
    # to the nearest integer, ties to even: the sum has no bits left for a fraction
    q = tl.minimum(tl.maximum(q, BOTTOM), TOP) + 12582912.0 - 12582912.0
    return tl.where(mask, q, 0.0).to(tl.int8)


# M is the number of tokens and changes from call to call: it must not recompile
@triton.jit(do_not_specialize=["M"])
def _quantize_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    M,
    K,
    group,
    stride_xm,
    stride_qm,
    BITS: tl.constexpr,
    IS_SYMMETRIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per group of BLOCK_M rows: once over it for the scale, once for the codes."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M
    pid_g = tl.program_id(1)
    G = tl.num_programs(1)
    H = group if BITS == 8 else (group + 1) // 2
    first = pid_g * group
    width = tl.minimum(group, K - first)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < M - row
    x_ptrs = x_ptr + row * stride_xm + first + offs_m[:, None] * stride_xm + offs_k[None, :]

    low = tl.full([BLOCK_M], 0.0 if IS_SYMMETRIC else float("inf"), dtype=tl.float32)
    high = tl.full([BLOCK_M], 0.0 if IS_SYMMETRIC else float("-inf"), dtype=tl.float32)
    for k in range(0, width, BLOCK_K):
        mask = mask_m[:, None] & (offs_k[None, :] < width - k)
        x = tl.load(x_ptrs + k, mask=mask, other=0.0).to(tl.float32)
        if IS_SYMMETRIC:
            high = tl.maximum(high, tl.max(tl.abs(x), 1))
        else:
            low = tl.minimum(low, tl.min(tl.where(mask, x, float("inf")), 1))
            high = tl.maximum(high, tl.max(tl.where(mask, x, float("-inf")), 1))
    TOP: tl.constexpr = 2 ** (BITS - 1) - 1
    BOTTOM: tl.constexpr = -TOP if IS_SYMMETRIC else -TOP - 1
    if IS_SYMMETRIC:
        scale = tl.maximum(high / TOP, SMALLEST)
        zero = tl.zeros_like(scale)
    else:
        # halved first: the range of large numbers of both signs may be beyond float32
        scale = tl.maximum((high * 0.5 - low * 0.5) / (TOP + 0.5), SMALLEST)
        # a group of one value has code 0 everywhere, and that value as its zero
        zero = tl.where(high > low, low - scale * BOTTOM, low)

    for k in range(0, H if BITS == 4 else width, BLOCK_K):
        left = tl.minimum(H, width) - k
        mask = mask_m[:, None] & (offs_k[None, :] < left)
        x = tl.load(x_ptrs + k, mask=mask, other=0.0).to(tl.float32)
        q = _codes(x, scale, zero, mask, TOP, BOTTOM)
        if BITS == 4:
            mask_x = mask_m[:, None] & (offs_k[None, :] < tl.minimum(H, width - H) - k)
            x = tl.load(x_ptrs + (H + k), mask=mask_x, other=0.0).to(tl.float32)
            upper = _codes(x, scale, zero, mask_x, TOP, BOTTOM)
            q = (q + 8).to(tl.uint8) | ((upper + 8).to(tl.uint8) << 4)
            mask = mask_m[:, None] & (offs_k[None, :] < H - k)
        start = row * stride_qm + (pid_g * H + k)
        tl.store(q_ptr + start + offs_m[:, None] * stride_qm + offs_k[None, :], q, mask=mask)
    if IS_SYMMETRIC:
        tl.store(scale_ptr + (row + offs_m) * G + pid_g, scale, mask=mask_m)
    else:
        scale_ptrs = scale_ptr + (row + offs_m) * (2 * G) + pid_g
        tl.store(scale_ptrs, scale, mask=mask_m)
        tl.store(scale_ptrs + G, zero, mask=mask_m)


@launcher
def quantize(
    x: Tensor, *, bits: int = 8, group: int | None = None, symmetric: bool = True
) -> tuple[Tensor, Tensor]:
    """q = round((x - zero) / scale) with one scale (and zero) for each `group` columns of a row.

    Args:
        x: [..., K] float16|bfloat16|float32, any strides; copied if its rows are not contiguous.
        bits: 8 or 4.
        group: columns that share a scale, the last group of a row may be shorter; None for whole rows.
        symmetric: zero is 0 and q in ±127 or ±7; else zero is chosen for each group, q in -128..127 or -8..7.

    Returns:
        q: [..., K] int8, or uint8 [..., G · ⌈group / 2⌉] with two codes of 4 bits a byte (quant_elements.py).
        scale: [..., G] float32, or [..., 2, G] with the zeros behind the scales of each row.

    Raises:
        ValueError: other bits, group below 1.

    Numerics:
        |x - (q · scale + zero)| is at most half a scale. Scales are never 0: zeros have codes of 0.
    """
    K = x.shape[-1]
    if bits not in (8, 4):
        raise ValueError(f"bits={bits} cannot be stored - allowed: 8 or 4 - pass one of these")
    width = group_size(K, group)
    if not backend.runs_triton(x):
        return quantize_ref(x, bits=bits, group=group, symmetric=symmetric)
    G = -(-K // width)
    stored = (*x.shape[:-1], stored_columns(K, width, bits))
    q = x.new_empty(stored, dtype=torch.int8 if bits == 8 else torch.uint8)
    scale = x.new_empty((*x.shape[:-1], *(() if symmetric else (2,)), G), dtype=torch.float32)
    if x.numel() == 0:
        return q, scale
    rows = as_rows(x)
    M = rows.shape[0]
    config = choose(OP, _Key(x.dtype, width, bits, symmetric))
    grid = (-(-M // config["BLOCK_M"]), G)
    launched("quantize")
    launch(_quantize_kernel, grid)(
        rows, q, scale, M, K, width, rows.stride(0), q.shape[-1], bits, symmetric, **config
    )
    return q, scale


def quantize_ref(
    x: Tensor, *, bits: int = 8, group: int | None = None, symmetric: bool = True
) -> tuple[Tensor, Tensor]:
    """The truth of `quantize`."""
    K, top = x.shape[-1], 2 ** (bits - 1) - 1
    width = group_size(K, group)
    G = -(-K // width)
    padded = torch.nn.functional.pad(x.to(wide(x)), (0, G * width - K)).unflatten(-1, (G, width))
    is_there = (torch.arange(G * width, device=x.device) < K).view(G, width)
    if symmetric:
        scale = (padded.abs().amax(-1) / top).clamp_min(SMALLEST.value)
        zero = torch.zeros_like(scale)
    else:
        low = padded.masked_fill(~is_there, float("inf")).amin(-1)
        high = padded.masked_fill(~is_there, float("-inf")).amax(-1)
        scale = ((high / 2 - low / 2) / (top + 0.5)).clamp_min(SMALLEST.value)
        zero = torch.where(high > low, low + scale * (top + 1), low)
    codes = (
        ((padded - zero[..., None]) / scale[..., None]).round().clamp(-top if symmetric else -top - 1, top)
    )
    codes = codes.masked_fill(~is_there, 0).to(torch.int8)
    if bits == 8:
        q = codes.flatten(-2)[..., :K]
    else:
        H = -(-width // 2)
        low_half, high_half = torch.nn.functional.pad(codes + 8, (0, 2 * H - width), value=8).split(H, -1)
        q = (low_half | high_half << 4).to(torch.uint8).flatten(-2)
    return q.contiguous(), scale if symmetric else torch.stack((scale, zero), -2)


def _default(key: _Key) -> Config:
    columns = triton.next_power_of_2(key.group if key.bits == 8 else -(-key.group // 2))
    if backend.kind() != "gpu":
        return _config(1, max(16, min(1024, columns)), 4)
    if columns <= 128:
        return _config(max(1, 1024 // columns), columns, 4)
    return _config(1, min(2048, columns), 4)


def _config(BLOCK_M: int, BLOCK_K: int, num_warps: int) -> dict[str, Any]:
    return {"BLOCK_M": BLOCK_M, "BLOCK_K": BLOCK_K, "num_warps": num_warps, "num_stages": 1}


def _inputs(M: int, K: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {"x": torch.randn(M, K, dtype=dtype, device=device)}


def _cost(x: Tensor, *, bits: int = 8, group: int | None = None, symmetric: bool = True) -> tuple[int, int]:
    rows, K = x.numel() // max(1, x.shape[-1]), x.shape[-1]
    width = group_size(K, group)
    scales = -(-K // width) * (4 if symmetric else 8)
    return nbytes(x) + rows * (stored_columns(K, width, bits) + scales), 4 * x.numel()


_SPACE = tuple(_config(m, k, w) for m in (1, 2, 4, 8) for k in (256, 512, 1024, 2048) for w in (2, 4, 8))

OP = Op("quantize", quantize, quantize_ref, _SPACE, _default, _inputs, _cost)
