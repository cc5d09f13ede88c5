"""Element functions of quantised weights: their layout, their products, and the PyTorch twins.

Rows are cut into G groups of `group` columns, the last of which may be shorter. In each w = q · scale + zero,
with a signed code q of 8 or 4 bits. Codes of 8 bits are stored as int8 [N, K]. Codes of 4 bits are stored as
uint8 [N, G · H] with H = ⌈group / 2⌉: byte j of a group holds q_j + 8 in its low half and q_(H + j) + 8 in
the high half, so that both halves meet contiguous inputs and no code has to move beside its neighbour. Behind
the end of a row q is 0.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer.kernels.elements import IS_INTERPRETED, dot, int_dot, linear_ref
from trinfer.kernels.op import wide


@triton.jit
def low_codes(q):
    """The codes in the low halves of uint8 `q`, int8."""
    return (q & 15).to(tl.int8) - 8


@triton.jit
def high_codes(q):
    """The codes in the high halves of uint8 `q`, int8."""
    return (q >> 4).to(tl.int8) - 8


@triton.jit
def _dot_codes(codes, x, acc, AS_FLOAT: tl.constexpr):
    """acc + codes @ x: in int32 for codes x, else in float32, where codes are exact in every dtype of x."""
    if x.dtype == tl.int8 and AS_FLOAT:
        # exact, too: products of codes add up to less than 2**24 over 1,000 of them
        part = tl.zeros(acc.shape, dtype=tl.float32)
        acc += dot(codes.to(tl.bfloat16), x.to(tl.bfloat16), part).to(acc.dtype)
    elif x.dtype == tl.int8:
        acc = int_dot(codes, x, acc)
    else:
        if IS_INTERPRETED:
            # the interpreter turns integers into the bits of bfloat16
            codes = codes.to(tl.float32)
        acc = dot(codes.to(x.dtype), x, acc)
    return acc


@triton.jit
def load_scale(scale_ptr, g, offs_n, N, G, HAS_ZERO: tl.constexpr):
    """Scale and zero of group `g` of the rows `offs_n` of N, in float32; (scale, scale) without zeros."""
    width = G * 2 if HAS_ZERO else G
    ptrs = scale_ptr + offs_n * width + g
    scale = tl.load(ptrs, mask=offs_n < N, other=0.0).to(tl.float32)
    zero = scale
    if HAS_ZERO:
        zero = tl.load(ptrs + G, mask=offs_n < N, other=0.0).to(tl.float32)
    return scale, zero


@triton.jit
def _whole_rows(
    x_ptr,
    q_ptr,
    scale_ptr,
    N,
    K,
    H,
    stride_wn,
    BITS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x · wᵀ for one row x and the first BLOCK_N rows of w, with one scale and up to BLOCK_K columns each."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < H
    q_ptrs = q_ptr + offs_n[:, None] * stride_wn + offs_k[None, :]
    q = tl.load(q_ptrs, mask=(offs_n[:, None] < N) & mask_k[None, :], other=0)
    x = tl.load(x_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    total = tl.sum(x, 0) if HAS_ZERO or BITS == 4 else 0.0
    if BITS == 8:
        y = tl.sum(q.to(tl.float32) * x[None, :], 1)
    else:
        # the masks of the weight stand in all loads: past them the CPU backend knows that there is nothing
        upper = tl.load(x_ptr + H + offs_k, mask=mask_k & (offs_k < K - H), other=0.0).to(tl.float32)
        y = tl.sum((q & 15).to(tl.float32) * x[None, :] + (q >> 4).to(tl.float32) * upper[None, :], 1)
        total += tl.sum(upper, 0)
        y -= 8.0 * total
    scale, zero = load_scale(scale_ptr, 0, offs_n, N, 1, HAS_ZERO)
    y *= scale
    if HAS_ZERO:
        y += total * zero
    return y


@triton.jit
def _grouped_rows(
    x_ptr,
    q_ptr,
    scale_ptr,
    N,
    K,
    H,
    stride_wn,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x · wᵀ for one row x and the first BLOCK_N rows of w, at most a group and BLOCK_K columns at once."""
    group = K
    if GROUP > 0:
        group = GROUP
        H = GROUP if BITS == 8 else (GROUP + 1) // 2
    per_group = tl.cdiv(H, BLOCK_K)
    G = tl.cdiv(K, group)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    q_rows = q_ptr + offs_n[:, None] * stride_wn + offs_k[None, :]
    # summed once, after the loop: a reduction across threads costs more than the loads it waits for
    partial = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    totals = tl.zeros([BLOCK_K], dtype=tl.float32)
    for i in range(G * per_group):
        g = i // per_group
        h = i % per_group * BLOCK_K
        low = H - h
        high = group - H - h
        if HAS_TAIL:
            low = tl.minimum(low, K - g * group - h)
            high = tl.minimum(high, K - g * group - H - h)
        q_offset = g * group + h if BITS == 8 else g * H + h
        x_ptrs = x_ptr + (g * group + h) + offs_k
        q = tl.load(q_rows + q_offset, mask=(offs_n[:, None] < N) & (offs_k[None, :] < low), other=0)
        x = tl.load(x_ptrs, mask=offs_k < low, other=0.0).to(tl.float32)
        if BITS == 8:
            part = q.to(tl.float32) * x[None, :]
        else:
            upper = tl.load(x_ptrs + H, mask=offs_k < high, other=0.0).to(tl.float32)
            part = low_codes(q).to(tl.float32) * x[None, :] + high_codes(q).to(tl.float32) * upper[None, :]
            x += upper
        if GROUP == 0:
            partial += part
            if HAS_ZERO:
                totals += x
        else:
            scale, zero = load_scale(scale_ptr, g, offs_n, N, G, HAS_ZERO)
            partial += part * scale[:, None]
            if HAS_ZERO:
                partial += x[None, :] * zero[:, None]
    y = tl.sum(partial, 1)
    if GROUP == 0:
        scale, zero = load_scale(scale_ptr, 0, offs_n, N, 1, HAS_ZERO)
        y *= scale
        if HAS_ZERO:
            y += tl.sum(totals, 0) * zero
    return y


@triton.jit
def quant_row_product(
    x_ptr,
    q_ptr,
    scale_ptr,
    N,
    K,
    H,
    stride_wn,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPANS_K: tl.constexpr,
):
    """x · wᵀ for one row x and the first BLOCK_N rows of w, [BLOCK_N] float32."""
    if SPANS_K:
        y = _whole_rows(x_ptr, q_ptr, scale_ptr, N, K, H, stride_wn, BITS, HAS_ZERO, BLOCK_N, BLOCK_K)
    else:
        y = _grouped_rows(
            x_ptr, q_ptr, scale_ptr, N, K, H, stride_wn, BITS, GROUP, HAS_ZERO, HAS_TAIL, BLOCK_N, BLOCK_K
        )
    return y


@triton.jit
def quant_tile_product(
    x_ptr,
    q_ptr,
    scale_ptr,
    M,
    N,
    K,
    H,
    stride_xm,
    stride_wn,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AS_FLOAT: tl.constexpr,
):
    """w · xᵀ for the first BLOCK_M rows of x and BLOCK_N rows of w, [BLOCK_N, BLOCK_M] float32.

    H and BLOCK_K count stored columns, of a group and of a step. HAS_TAIL: the last group is shorter.
    GROUP 0: one group a row, whose scale is applied once, after the loop.
    """
    group = K
    if GROUP > 0:
        group = GROUP
        H = GROUP if BITS == 8 else (GROUP + 1) // 2
    per_group = tl.cdiv(H, BLOCK_K)
    G = tl.cdiv(K, group)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < M
    mask_n = offs_n < N
    q_rows = q_ptr + offs_n[:, None] * stride_wn + offs_k[None, :]
    x_rows = x_ptr + offs_m[None, :] * stride_xm + offs_k[:, None]
    # int32 sums of one scale hold all of a row of fewer than 2**17 columns
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=SUM if GROUP == 0 else tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for i in range(G * per_group):
        g = i // per_group
        h = i % per_group * BLOCK_K
        low = H - h
        high = group - H - h
        if HAS_TAIL:
            low = tl.minimum(low, K - g * group - h)
            high = tl.minimum(high, K - g * group - H - h)
        q_offset = g * group + h if BITS == 8 else g * H + h
        mask_q = mask_n[:, None] & (offs_k[None, :] < low)
        q = tl.load(q_rows + q_offset, mask=mask_q, other=0)
        x_ptrs = x_rows + (g * group + h)
        x = tl.load(x_ptrs, mask=(offs_k[:, None] < low) & mask_m[None, :], other=0)
        codes = q if BITS == 8 else low_codes(q)
        start = acc if GROUP == 0 else tl.zeros([BLOCK_N, BLOCK_M], dtype=SUM)
        part = _dot_codes(codes, x, start, AS_FLOAT)
        x_sum = x.to(tl.float32)
        if BITS == 4:
            mask_x = (offs_k[:, None] < high) & mask_m[None, :]
            x = tl.load(x_ptrs + H, mask=mask_x, other=0)
            part = _dot_codes(high_codes(q), x, part, AS_FLOAT)
            x_sum += x.to(tl.float32)
        if GROUP == 0:
            acc = part
            if HAS_ZERO:
                total += tl.sum(x_sum, 0)
        else:
            scale, zero = load_scale(scale_ptr, g, offs_n, N, G, HAS_ZERO)
            acc += part.to(tl.float32) * scale[:, None]
            if HAS_ZERO:
                acc += tl.sum(x_sum, 0)[None, :] * zero[:, None]
    y = acc.to(tl.float32)
    if GROUP == 0:
        scale, zero = load_scale(scale_ptr, 0, offs_n, N, G, HAS_ZERO)
        y *= scale[:, None]
        if HAS_ZERO:
            y += total[None, :] * zero[:, None]
    return y


def group_size(K: int, group: int | None) -> int:
    """Columns of a group of rows of K: all of them without `group`."""
    if group is not None and group < 1:
        raise ValueError(
            f"group={group} holds no column - allowed: 1 or more, None for whole rows - pass one"
        )
    return max(1, K) if group is None or group >= K else group


def stored_columns(K: int, group: int, bits: int) -> int:
    """Columns of the tensor that holds the codes of rows of K."""
    return K if bits == 8 else -(-K // group) * -(-group // 2)


def dequantize(q: Tensor, scale: Tensor, K: int, *, group: int | None = None) -> Tensor:
    """w = q · scale + zero: the weight [N, K] that `quantize` stored, in the dtype of `scale`.

    Args:
        q: [N, K] int8 codes, or uint8 with two codes of 4 bits a byte.
        scale: [N, G], or [N, 2, G] with the zeros behind the scales of each row.
        K: columns of the weight.
        group: columns that share a scale, None for whole rows.

    Returns:
        [N, K].
    """
    group = group_size(K, group)
    G = scale.shape[-1]
    if q.dtype == torch.uint8:
        halves = q.unflatten(-1, (G, -(-group // 2))).to(torch.int16)
        codes = torch.cat(((halves & 15) - 8, (halves >> 4) - 8), -1)[..., :group].flatten(-2)[..., :K]
    else:
        codes = q
    each = torch.arange(K, device=q.device) // group
    if scale.dim() == q.dim():
        return codes.to(scale.dtype) * scale[..., each]
    return codes.to(scale.dtype) * scale[..., 0, :][..., each] + scale[..., 1, :][..., each]


def quant_segments(
    x: Tensor, weight: Any, scale: Any, bias: Any, group: int | None, gated: bool
) -> tuple[tuple, tuple, tuple]:
    """Weights, scales and biases of a product as tuples of equal length; refuses what does not fit."""
    weights = weight if type(weight) is tuple else (weight,)
    scales = scale if type(scale) is tuple else (scale,)
    biases = bias if type(bias) is tuple else (None,) * len(weights) if bias is None else (bias,)
    if not 1 <= len(weights) <= 3 or (gated and len(weights) != 2):
        allowed = "exactly 2 (gate, up)" if gated else "1 to 3"
        raise ValueError(
            f"weight has {len(weights)} segments - allowed: {allowed} - split or concatenate them"
        )
    if len(biases) != len(weights) or len(scales) != len(weights):
        raise ValueError(
            f"scale has {len(scales)} entries, bias {len(biases)} - allowed: {len(weights)}, one per weight "
            "segment - pass tuples, with None for a segment without bias"
        )
    group = group_size(x.shape[-1], group)
    for w, s in zip(weights, scales, strict=True):
        _check_codes(w, s, x.shape[-1], group)
        if w.dtype != weights[0].dtype or s.dtype != scales[0].dtype or s.dim() != scales[0].dim():
            raise ValueError(
                f"segments are {w.dtype} with scales {s.dtype} of {s.dim()} dimensions, the first "
                f"{weights[0].dtype} with {scales[0].dtype} of {scales[0].dim()} - allowed: one kind - "
                "quantise all segments alike"
            )
    for w, b in zip(weights, biases, strict=True):
        if b is not None and (b.shape != w.shape[:1] or not b.is_floating_point()):
            raise ValueError(
                f"bias is {tuple(b.shape)} {b.dtype} - allowed: ({w.shape[0]},) of a floating point type - "
                "pass this layer's bias"
            )
    return weights, scales, biases


def _check_codes(w: Tensor, s: Tensor, K: int, group: int) -> None:
    bits = {torch.int8: 8, torch.uint8: 4}.get(w.dtype)
    if bits is None or w.dim() != 2 or w.shape[1] != stored_columns(K, group, bits):
        raise ValueError(
            f"weight is {tuple(w.shape)} {w.dtype} - allowed: (N, {K}) torch.int8 or "
            f"(N, {stored_columns(K, group, 4)}) torch.uint8 for rows of {K} in groups of {group} - "
            "pass what quantize gives, with its group"
        )
    G = -(-K // group)
    if s.shape not in ((w.shape[0], G), (w.shape[0], 2, G)) or not s.is_floating_point():
        raise ValueError(
            f"scale is {tuple(s.shape)} {s.dtype} - allowed: ({w.shape[0]}, {G}), or ({w.shape[0]}, 2, {G}) "
            "with zeros, of a floating point type - pass what quantize gives, with its group"
        )
    if not s.is_contiguous() or (w.stride(1) != 1 and w.shape[1] > 1):
        raise ValueError(
            f"weight has strides {w.stride()}, scale {s.stride()} - allowed: contiguous rows - "
            "make them contiguous"
        )


def layout_of(w: Tensor, K: int, group: int | None) -> tuple[int, int, int, bool]:
    """Bits of a code, columns of a group (0: whole rows), those stored, whether the last group is shorter."""
    bits, group = 8 if w.dtype == torch.int8 else 4, group_size(K, group)
    H = stored_columns(group, group, bits)
    return (bits, 0, H, bits == 4 and K % 2 > 0) if group == K else (bits, group, H, K % group > 0)


def check_residual(y: Tensor, residual: Tensor | None) -> None:
    """Refuse a residual that cannot be added to the result."""
    if residual is not None and (residual.shape != y.shape or residual.dtype != y.dtype):
        raise ValueError(
            f"residual is {tuple(residual.shape)} {residual.dtype} - allowed: {tuple(y.shape)} {y.dtype}, "
            "as the result is - expand or convert it"
        )


def quant_linear_ref(
    x: Tensor,
    segments: tuple[tuple, tuple, tuple],
    group: int | None,
    act: str,
    gated: bool,
    residual: Tensor | None,
) -> Tensor:
    """The product of x with the dequantised weights, in float32 (or float64), rounded to x.dtype once."""
    weights, scales, biases = segments
    kind = wide(x)
    parts = zip(weights, scales, strict=True)
    dense = tuple(dequantize(w, s.to(kind), x.shape[-1], group=group) for w, s in parts)
    wider = tuple(b if b is None else b.to(kind) for b in biases)
    return linear_ref(
        x.to(kind), dense, wider, act, gated, residual if residual is None else residual.to(kind)
    ).to(x.dtype)
