"""Heads on their way from the product that made them to attention: RMS norm of each, then rotation."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer.kernels.op import unit_stride


class Prologue(NamedTuple):
    """What each head of q and k passes before it attends: an RMS norm, then a rotation by its position.

    q_weight, k_weight: [D], what the norm multiplies with after adding weight_offset (1.0 for Gemma).
    cos, sin: [P, R] contiguous, a row a position, R even and at most D; the other entries pass through.
        The attention factor of a scaled rotary embedding belongs into the table.
    interleaved: see `rotary`.
    """

    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 1e-6
    weight_offset: float = 0.0
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False

    @property
    def tables(self) -> tuple[Tensor | None, ...]:
        """What a kernel reads, in the order of its arguments."""
        return self.q_weight, self.k_weight, self.cos, self.sin

    def constants(self, D: int) -> tuple[float, float, int, bool]:
        """What a kernel is compiled for: eps, weight_offset, number of rotated entries, interleaved."""
        return self.eps, self.weight_offset, self.rotated(D), self.interleaved

    def rotated(self, D: int) -> int:
        """How many entries of a head come in pairs."""
        return D // 2 * 2 if self.cos is None else self.cos.shape[-1]


@triton.jit
def head_offsets(head, stride_h, stride_o, RUN: tl.constexpr):
    """Where heads lie that come evenly, or in runs of RUN."""
    head = head.to(tl.int64)
    if RUN is None:
        offset = head * stride_h
    else:
        offset = head // RUN * stride_o + head % RUN * stride_h
    return offset


@triton.jit
def _load_partners(ptrs, offs_d, mask, is_first, is_second, SHIFT: tl.constexpr):
    """The other entry of each rotated pair."""
    above = tl.load(ptrs + offs_d + SHIFT, mask=mask & is_first, other=0.0).to(tl.float32)
    below = tl.load(ptrs + offs_d - SHIFT, mask=mask & is_second, other=0.0).to(tl.float32)
    return above + below


@triton.jit
def load_heads(
    x_ptrs,
    mask,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    row,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Heads at `x_ptrs`, normalised and rotated (by row `row`) by what is there: float32 [heads, BLOCK_D]."""
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    x_ptrs = x_ptrs[:, None]
    mask = mask[:, None]
    x = tl.load(x_ptrs + offs_d, mask=mask & (offs_d < D), other=0.0).to(tl.float32)
    y = x
    if weight_ptr is not None:
        rstd = tl.rsqrt(tl.sum(x * x, 1) / D + EPS)[:, None]
        w = tl.load(weight_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
        y = x * rstd * (w + OFFSET)
    if cos_ptr is not None:
        SHIFT: tl.constexpr = 1 if IS_INTERLEAVED else R // 2
        if IS_INTERLEAVED:
            is_first = (offs_d < R) & (offs_d % 2 == 0)
            is_second = (offs_d < R) & (offs_d % 2 == 1)
        else:
            is_first = offs_d < SHIFT
            is_second = (offs_d >= SHIFT) & (offs_d < R)
        partner = _load_partners(x_ptrs, offs_d, mask, is_first, is_second, SHIFT)
        if weight_ptr is not None:
            w = _load_partners(weight_ptr, offs_d, offs_d < R, is_first, is_second, SHIFT)
            partner *= rstd * (w + OFFSET)
        offs_r = tl.cast(row, tl.int64) * R + offs_d
        cos = tl.load(cos_ptr + offs_r, mask=offs_d < R, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + offs_r, mask=offs_d < R, other=0.0).to(tl.float32)
        # where nothing rotates, not even the sign of a zero may change
        y = tl.where(offs_d < R, y * cos + partner * tl.where(is_first, -sin, sin), y)
    return y


@triton.jit
def copy_heads(
    x_ptr,
    y_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    H,
    stride_xh,
    stride_yh,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Store the H heads of one token, normalised and rotated by what is there; no entry is read twice."""
    offs_r = tl.arange(0, BLOCK_R)[None, :]
    offs_t = R + tl.arange(0, BLOCK_T)[None, :]
    mask_r = offs_r < R // 2
    # entry a and entry b are the two coordinates of a rotated plane
    if IS_INTERLEAVED:
        a = 2 * offs_r
        b = a + 1
    else:
        a = offs_r
        b = offs_r + R // 2
    if cos_ptr is not None:
        cos_a = tl.load(cos_ptr + a, mask=mask_r, other=0.0).to(tl.float32)
        sin_a = tl.load(sin_ptr + a, mask=mask_r, other=0.0).to(tl.float32)
        cos_b = tl.load(cos_ptr + b, mask=mask_r, other=0.0).to(tl.float32)
        sin_b = tl.load(sin_ptr + b, mask=mask_r, other=0.0).to(tl.float32)
    for h in range(0, H, BLOCK_H):
        offs_h = h + tl.arange(0, BLOCK_H)[:, None]
        mask_h = offs_h < H
        x_row = x_ptr + offs_h * stride_xh
        y_row = y_ptr + offs_h * stride_yh
        y_a = tl.load(x_row + a, mask=mask_h & mask_r, other=0.0).to(tl.float32)
        y_b = tl.load(x_row + b, mask=mask_h & mask_r, other=0.0).to(tl.float32)
        if R < D:
            tail = tl.load(x_row + offs_t, mask=mask_h & (offs_t < D), other=0.0).to(tl.float32)
        if weight_ptr is not None:
            squares = tl.sum(y_a * y_a, 1) + tl.sum(y_b * y_b, 1)
            if R < D:
                squares += tl.sum(tail * tail, 1)
            rstd = tl.rsqrt(squares / D + EPS)[:, None]
            w_a = tl.load(weight_ptr + a, mask=mask_r, other=0.0).to(tl.float32)
            w_b = tl.load(weight_ptr + b, mask=mask_r, other=0.0).to(tl.float32)
            y_a *= rstd * (w_a + OFFSET)
            y_b *= rstd * (w_b + OFFSET)
            if R < D:
                w = tl.load(weight_ptr + offs_t, mask=offs_t < D, other=0.0).to(tl.float32)
                tail *= rstd * (w + OFFSET)
        if cos_ptr is not None:
            x_a = y_a
            y_a = x_a * cos_a - y_b * sin_a
            y_b = y_b * cos_b + x_a * sin_b
        tl.store(y_row + a, y_a.to(y_ptr.dtype.element_ty), mask=mask_h & mask_r)
        tl.store(y_row + b, y_b.to(y_ptr.dtype.element_ty), mask=mask_h & mask_r)
        if R < D:
            tl.store(y_row + offs_t, tail.to(y_ptr.dtype.element_ty), mask=mask_h & (offs_t < D))


def check_prologue(prologue: Prologue, D: int) -> None:
    """Refuse norm weights and tables that do not fit heads of D entries."""
    for name, weight in (("q_weight", prologue.q_weight), ("k_weight", prologue.k_weight)):
        if weight is not None and weight.shape != (D,):
            raise ValueError(
                f"{name} has shape {tuple(weight.shape)} - allowed: ({D},), one for each entry of a head - "
                "pass the weight of this norm"
            )
    cos, sin = prologue.cos, prologue.sin
    if (cos is None) != (sin is None):
        raise ValueError("cos or sin is missing - allowed: both or none - pass both tables")
    if cos is None or sin is None:
        return
    if cos.dim() != 2 or cos.shape != sin.shape or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(
            f"cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)} - allowed: twice [positions, R], "
            "contiguous - reshape them"
        )
    check_rotated(cos.shape[-1], D)


def check_rotated(R: int, D: int) -> None:
    """Refuse a table that rotates more than a head has."""
    if R > D or R % 2:
        raise ValueError(f"cos rotates R={R} entries - allowed: even numbers up to D={D} - check the table")


def check_new_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    new: tuple[Tensor, Tensor] | None,
    prologue: Prologue,
    out: Tensor | None,
) -> None:
    """Refuse what does not fit one query a sequence and its new key and value."""
    (B, H, M, D), (G, _, DV) = q.shape, v.shape[1:]
    if M != 1:
        raise ValueError(f"q holds {M} queries - allowed: 1 - call attention for more")
    check_prologue(prologue, D)
    if out is not None and (out.shape != (B, 1, H, DV) or out.dtype != q.dtype or not out.is_contiguous()):
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} - allowed: ({B}, 1, {H}, {DV}) {q.dtype}, contiguous - "
            "leave it out"
        )
    if new is None:
        return
    shapes, allowed = [tuple(x.shape) for x in new], [(B, G, 1, D), (B, G, 1, DV)]
    if shapes != allowed or {x.dtype for x in new} != {q.dtype}:
        raise ValueError(
            f"new is {shapes[0]} {new[0].dtype}, {shapes[1]} {new[1].dtype} - allowed: {allowed[0]} and "
            f"{allowed[1]} {q.dtype}, the key and value of this token - reshape or convert them"
        )
    if bias is not None:
        raise ValueError("new comes with bias - allowed: one of them - write the new key first")
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError(
            f"k has strides {k.stride()}, v {v.stride()} - allowed: 1 in the last dimension of a cache that "
            "takes a new key - lay it out as [B, G, N, D]"
        )


def as_heads(x: Tensor) -> tuple[Tensor, int | None, int, Tensor | None]:
    """(x as [B, H, 1, D], heads in a run, distance of runs, x) of heads in one dimension or in two.

    In two, the first has the right shape and strides, but only its first run lies where it says: a kernel
    gets the last.
    """
    if x.dim() == 4:
        return x, None, 0, None
    B, runs, run, M, D = x.shape
    x = unit_stride(x)
    return x.as_strided((B, runs * run, M, D), (x.stride(0), *x.stride()[2:])), run, x.stride(1), x


def flat_heads(x: Tensor) -> Tensor:
    """Heads in one dimension; a copy if they come in two that do not lie evenly."""
    return x.flatten(1, 2) if x.dim() > 4 else x


def new_heads(new: tuple[Tensor, Tensor] | None) -> tuple[Any, int | None, int, tuple[Any, Any]]:
    """`as_heads` of the new key and value with equal strides, as the slices of one product have them."""
    if new is None:
        return None, None, 0, (None, None)
    k, v = new
    is_alike = k.stride()[:-2] == v.stride()[:-2] and k.stride(-1) == v.stride(-1) == 1
    if not is_alike and k.shape[:-1] == v.shape[:-1]:
        both = torch.cat((flat_heads(k), flat_heads(v)), -1)
        k, v = both[..., : k.shape[-1]], both[..., k.shape[-1] :]
    (k, run, stride, k_runs), (v, _, _, v_runs) = as_heads(k), as_heads(v)
    return (k, v), run, stride, (k if run is None else k_runs, v if run is None else v_runs)


def rotate_ref(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x · cos + rotate(x) · sin for the first R entries of x [..., D], in the dtype of x."""
    R = cos.shape[-1]
    head, tail = x[..., :R], x[..., R:]
    if interleaved:
        turned = torch.stack((-head[..., 1::2], head[..., 0::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-head[..., R // 2 :], head[..., : R // 2]), -1)
    return torch.cat((head * cos.to(x.dtype) + turned * sin.to(x.dtype), tail), -1)


def prologue_ref(x: Tensor, weight: Tensor | None, prologue: Prologue, rows: Tensor) -> Tensor:
    """The PyTorch truth of `load_heads` for x [B, heads, M, D] at the rows [B, M] of the table."""
    y = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if weight is not None:
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + prologue.eps)
        y = y * (weight.to(y.dtype) + prologue.weight_offset)
    if prologue.cos is not None and prologue.sin is not None:
        rows = rows.clamp(min=0).long()
        y = rotate_ref(y, prologue.cos[rows][:, None], prologue.sin[rows][:, None], prologue.interleaved)
    return y.to(x.dtype)
