"""Rotary position embedding of queries and keys in one launch."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.op import Op, launched, nbytes, unit_stride, wide


class _Key(NamedTuple):
    dtype: torch.dtype
    H: int
    D: int
    R: int


@triton.jit
def _rotate_heads(
    x_ptr,
    y_ptr,
    cos_ptr,
    sin_ptr,
    H,
    stride_xh,
    D: tl.constexpr,
    R: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Rotate the first R entries of the H heads of one token and copy the others."""
    offs_r = tl.arange(0, BLOCK_R)
    mask_r = offs_r < R // 2
    # entry a and entry b are the two coordinates of a rotated plane
    if IS_INTERLEAVED:
        a = 2 * offs_r
        b = a + 1
    else:
        a = offs_r
        b = offs_r + R // 2
    cos_a = tl.load(cos_ptr + a, mask=mask_r, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin_ptr + a, mask=mask_r, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos_ptr + b, mask=mask_r, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin_ptr + b, mask=mask_r, other=0.0).to(tl.float32)[None, :]
    for h in range(0, H, BLOCK_H):
        offs_h = h + tl.arange(0, BLOCK_H)[:, None]
        mask = (offs_h < H) & mask_r[None, :]
        x_row = x_ptr + offs_h * stride_xh
        y_row = y_ptr + offs_h * D
        x_a = tl.load(x_row + a[None, :], mask=mask, other=0.0).to(tl.float32)
        x_b = tl.load(x_row + b[None, :], mask=mask, other=0.0).to(tl.float32)
        y_a = x_a * cos_a - x_b * sin_a
        y_b = x_b * cos_b + x_a * sin_b
        tl.store(y_row + a[None, :], y_a.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_row + b[None, :], y_b.to(y_ptr.dtype.element_ty), mask=mask)
        if R < D:
            offs_t = R + tl.arange(0, BLOCK_T)
            mask_t = (offs_h < H) & (offs_t[None, :] < D)
            tail = tl.load(x_row + offs_t[None, :], mask=mask_t, other=0.0)
            tl.store(y_row + offs_t[None, :], tail, mask=mask_t)


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    H,
    G,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kg,
    stride_km,
    stride_cb,
    stride_cm,
    D: tl.constexpr,
    R: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program per (token, batch): all its query and key heads."""
    pid_m = tl.program_id(0).to(tl.int64)
    pid_b = tl.program_id(1).to(tl.int64)
    token = pid_b * tl.num_programs(0) + pid_m
    cos_ptr += pid_b * stride_cb + pid_m * stride_cm
    sin_ptr += pid_b * stride_cb + pid_m * stride_cm
    q_ptr += pid_b * stride_qb + pid_m * stride_qm
    q_out_ptr += token * H * D
    _rotate_heads(
        q_ptr, q_out_ptr, cos_ptr, sin_ptr, H, stride_qh, D, R, IS_INTERLEAVED, BLOCK_H, BLOCK_R, BLOCK_T
    )
    k_ptr += pid_b * stride_kb + pid_m * stride_km
    k_out_ptr += token * G * D
    _rotate_heads(
        k_ptr, k_out_ptr, cos_ptr, sin_ptr, G, stride_kg, D, R, IS_INTERLEAVED, BLOCK_H, BLOCK_R, BLOCK_T
    )


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """x · cos + rotate(x) · sin for the first R entries of each head of q and k; the others pass through.

    Args:
        q: [B, H, M, D] float16|bfloat16|float32, any strides.
        k: [B, G, M, D], any strides.
        cos: [B or 1, M, R] float16|bfloat16|float32, R even and at most D.
        sin: like cos.
        interleaved: False rotates entry i with i + R/2; cos and sin hold R/2 angles, twice in a row (Llama).
            True rotates entry 2i with 2i + 1; they hold each angle twice side by side (GPT-J, Cohere).

    Returns:
        The pair (q, k), each [B, heads, M, D] laid out in memory as [B, M, heads, D].

    Raises:
        ValueError: shapes that do not fit together, R odd or above D.

    Numerics:
        Products and sum in float32, rounded once; cos and sin are used as precise as they come.

    Source: https://arxiv.org/abs/2104.09864
    """
    _check(q, k, cos, sin)
    if not backend.runs_triton(q):
        return rotary_ref(q, k, cos, sin, interleaved=interleaved)
    B, H, M, D = q.shape
    G, R = k.shape[1], cos.shape[-1]
    q_out, k_out = q.new_empty((B, M, H, D)), k.new_empty((B, M, G, D))
    if B and M:
        q, k = unit_stride(q), unit_stride(k)
        if cos.stride() != sin.stride() or cos.stride(-1) != 1:
            cos, sin = cos.contiguous(), sin.contiguous()
        config = choose(OP, _Key(q.dtype, H, D, R))
        launched("rotary")
        _rotary_kernel[(M, B)](
            q,
            k,
            cos,
            sin,
            q_out,
            k_out,
            H,
            G,
            *q.stride()[:3],
            *k.stride()[:3],
            cos.stride(0) if cos.shape[0] > 1 else 0,
            cos.stride(1),
            D,
            R,
            interleaved,
            **config,
        )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    B, _, M, D = q.shape
    if (
        (k.shape[0], *k.shape[2:]) != (B, M, D)
        or cos.shape[:2] not in ((1, M), (B, M))
        or cos.shape != sin.shape
    ):
        raise ValueError(
            f"q is {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)} - "
            "allowed: [B, H, M, D], [B, G, M, D] and twice [B or 1, M, R] - reshape them"
        )
    if cos.shape[-1] > D or cos.shape[-1] % 2:
        raise ValueError(
            f"cos rotates R={cos.shape[-1]} entries - allowed: even numbers up to D={D} - check the table"
        )


def rotary_ref(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """The truth of `rotary`."""
    return _rotate_ref(q, cos, sin, interleaved), _rotate_ref(k, cos, sin, interleaved)


def _rotate_ref(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    R = cos.shape[-1]
    head, tail = x[..., :R].to(wide(x)), x[..., R:]
    if interleaved:
        turned = torch.stack((-head[..., 1::2], head[..., 0::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-head[..., R // 2 :], head[..., : R // 2]), -1)
    y = head * cos.unsqueeze(1).to(wide(x)) + turned * sin.unsqueeze(1).to(wide(x))
    return torch.cat((y.to(x.dtype), tail), -1)


def _default(key: _Key) -> Config:
    half = triton.next_power_of_2(key.R // 2)
    # a GPU takes all heads of a token at once if they fit its registers; a CPU gains nothing from that
    heads = min(triton.next_power_of_2(key.H), max(1, 2048 // half)) if backend.kind() == "gpu" else 8
    tail = triton.next_power_of_2(max(1, key.D - key.R))
    return {"BLOCK_H": heads, "BLOCK_R": half, "BLOCK_T": tail, "num_warps": 4, "num_stages": 1}


def _inputs(
    B: int, H: int, G: int, M: int, D: int, R: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    angles = torch.rand(1, M, R // 2, device=device).repeat(1, 1, 2) * 6.28
    return {
        "q": torch.randn(B, M, H, D, dtype=dtype, device=device).transpose(1, 2),
        "k": torch.randn(B, M, G, D, dtype=dtype, device=device).transpose(1, 2),
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
    }


def _cost(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> tuple[int, int]:
    return nbytes(q, q, k, k, cos, sin), 3 * (q.numel() + k.numel())


_SPACE = tuple({"BLOCK_H": h, "num_warps": w} for h in (1, 4, 8, 16, 32) for w in (1, 2, 4, 8))

OP = Op("rotary", rotary, rotary_ref, _SPACE, _default, _inputs, _cost)
