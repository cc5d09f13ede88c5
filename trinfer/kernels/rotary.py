"""Rotary position embedding of queries and keys in one launch."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.heads import check_rotated, copy_heads, rotate_ref
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, nbytes, unit_stride, wide


class _Key(NamedTuple):
    dtype: torch.dtype
    H: int
    D: int
    R: int


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
    k_ptr += pid_b * stride_kb + pid_m * stride_km
    q_out_ptr += token * H * D
    k_out_ptr += token * G * D
    for part in tl.static_range(2):
        copy_heads(
            q_ptr if part == 0 else k_ptr,
            q_out_ptr if part == 0 else k_out_ptr,
            None,
            cos_ptr,
            sin_ptr,
            H if part == 0 else G,
            stride_qh if part == 0 else stride_kg,
            D,
            0.0,
            0.0,
            D,
            R,
            IS_INTERLEAVED,
            BLOCK_H,
            BLOCK_R,
            BLOCK_T,
        )


@launcher
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
        launch(_rotary_kernel, (M, B))(
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
    check_rotated(cos.shape[-1], D)


def rotary_ref(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """The truth of `rotary`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    y, z = (rotate_ref(x.to(wide(x)), cos, sin, interleaved).to(x.dtype) for x in (q, k))
    return y, z


def _default(key: _Key) -> Config:
    half = triton.next_power_of_2(max(1, key.R // 2))
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
