"""What the attention kernels share: which keys a query may see, its bias, and the truth of both."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer.kernels.elements import dot, load_tile


@triton.jit
def mask_keys(keep, key, pos, window, IS_CAUSAL: tl.constexpr):
    """`keep` without the keys that a query at `pos` may not see."""
    if IS_CAUSAL:
        keep = keep & (key <= pos)
        if window is not None:
            keep = keep & (key > pos - window)
    elif window is not None:
        keep = keep & (key >= pos - window) & (key <= pos + window)
    return keep


@triton.jit
def load_range(kv_range_ptr, pid_b, N):
    """First and one past the last valid key of a sequence."""
    lo = 0
    hi = N
    if kv_range_ptr is not None:
        lo = tl.maximum(tl.load(kv_range_ptr + 2 * pid_b), 0)
        hi = tl.minimum(tl.load(kv_range_ptr + 2 * pid_b + 1), N)
    return lo, hi


@triton.jit
def add_bias(s, keep, ptrs, mask):
    """Scores in units of log2(e) plus a bias, and which of them remain allowed (see `bias_floor`)."""
    bias = tl.load(ptrs, mask=mask, other=0)
    if bias.dtype == tl.uint8:
        keep = keep & (bias != 0)
    else:
        floor = -65504.0 if bias.dtype == tl.float16 else -1e30
        bias = bias.to(tl.float32)
        keep = keep & (bias > floor)
        s += bias * 1.4426950408889634
    return s, keep


@triton.jit
def scale_scores(s, sm_scale, softcap):
    """Scores in units of log2(e): scaled, then bent by softcap · tanh(s / softcap)."""
    if softcap is None:
        s *= sm_scale * 1.4426950408889634
    else:
        x = s * (sm_scale / softcap)
        # cannot overflow to nan, but loses the digits of a small x: those the series has
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))
        y = x * x
        series = x + x * y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835))))
        s = tl.where(y < 0.0625, series, tanh) * (softcap * 1.4426950408889634)
    return s


@triton.jit
def attend_cache(
    q,
    k_ptr,
    v_ptr,
    bias_ptrs,
    lo,
    hi,
    pos,
    mask_h,
    slope,
    stride_kn,
    stride_vn,
    softcap,
    sm_scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Weighted values, sum and maximum of the scores of a few heads over the keys lo..hi."""
    BLOCK_H: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_DV)
    m_i = tl.full([BLOCK_H], -1e20, dtype=tl.float32)
    l_i = tl.zeros([BLOCK_H], dtype=tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], dtype=tl.float32)
    for n in range(lo, hi, BLOCK_N):
        mask_n = offs_n < hi - n
        base = tl.cast(n, tl.int64)
        if BLOCK_H == 1:
            # one head: a product of tiles would leave most of a tensor core or vector register idle
            k_ptrs = k_ptr + base * stride_kn + (offs_n[:, None] * stride_kn + offs_d[None, :])
            k = load_tile(k_ptrs, mask_n[:, None], offs_d[None, :] < D, True, BLOCK_D != D).to(tl.float32)
            s = k * q.to(tl.float32)
            if BLOCK_D != D:
                # zero already, but only this says so where the tile of k ends before that of q
                s = tl.where(offs_d[None, :] < D, s, 0.0)
            s = tl.sum(s, 1)[None, :]
        else:
            k_ptrs = k_ptr + base * stride_kn + (offs_n[None, :] * stride_kn + offs_d[:, None])
            k = load_tile(k_ptrs, mask_n[None, :], offs_d[:, None] < D, True, BLOCK_D != D)
            s = dot(q, k, tl.zeros([BLOCK_H, BLOCK_N], dtype=tl.float32))
        s = scale_scores(s, sm_scale, softcap)
        keep = mask_n[None, :]
        if slope is not None:
            s += slope[:, None] * ((n + offs_n - pos).to(tl.float32) * 1.4426950408889634)[None, :]
        if bias_ptrs is not None:
            mask = mask_h[:, None] & mask_n[None, :]
            s, keep = add_bias(s, keep, bias_ptrs[:, None] + base + offs_n[None, :], mask)
        # far below the first maximum, so that the weight of what is not allowed is exactly zero
        s = tl.where(keep, s, -1e30)
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        v_ptrs = v_ptr + base * stride_vn + (offs_n[:, None] * stride_vn + offs_v[None, :])
        v = load_tile(v_ptrs, mask_n[:, None], offs_v[None, :] < DV, True, BLOCK_DV != DV)
        if BLOCK_H == 1:
            acc = acc * alpha[:, None] + tl.sum(v.to(tl.float32) * tl.trans(p), 0)[None, :]
        else:
            acc = dot(p.to(v.dtype), v, acc * alpha[:, None])
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def fold_key(acc, l_i, m_i, s, v):
    """Fold one more score a row, in units of log2(e), and its value into weighted values, sum and maximum."""
    m_new = tl.maximum(m_i, s)
    p = tl.exp2(s - m_new)
    alpha = tl.exp2(m_i - m_new)
    return acc * alpha[:, None] + p[:, None] * v, l_i * alpha + p, m_new


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> Tensor:
    """[num_heads] float32: the slopes of ALiBi, a geometric series down to 2 ** -max_bias.

    For a head count that is no power of two, every other slope of the next power of two comes first, and of
    those left out as many as are missing follow.

    Source: https://arxiv.org/abs/2108.12409
    """
    whole = triton.next_power_of_2(num_heads)
    slopes = torch.exp2(torch.arange(1, whole + 1, dtype=torch.float64) * (-max_bias / whole)).float()
    return slopes if whole == num_heads else torch.cat((slopes[1::2], slopes[::2]))[:num_heads]


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    kv_range: Tensor | None,
    bias: Tensor | None,
    alibi: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Refuse attention arguments that do not fit together."""
    (B, H, _, D), (_, G, N, _) = q.shape, k.shape
    if k.shape != (B, G, N, D) or v.shape[:3] != (B, G, N) or H % max(1, G):
        raise ValueError(
            f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} - "
            "allowed: [B, H, M, D], [B, G, N, D], [B, G, N, Dv] with G dividing H - reshape them"
        )
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype} - allowed: one dtype - convert them")
    if max(D, v.shape[3]) > 256:
        raise ValueError(f"heads have {D} and {v.shape[3]} entries - allowed: up to 256 - split the heads")
    if alibi is not None and (alibi.shape != (H,) or alibi.dtype != torch.float32):
        raise ValueError(
            f"alibi is {tuple(alibi.shape)} {alibi.dtype} - allowed: ({H},) torch.float32, a slope for each "
            "query head - call alibi_slopes"
        )
    if sinks is not None and sinks.shape != (H,):
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)} - allowed: ({H},), a logit a query head - reshape it"
        )
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap} - allowed: above 0 - pass None for scores without a cap")
    _check_masks(q, k, window, kv_range, bias)


def _check_masks(
    q: Tensor, k: Tensor, window: int | None, kv_range: Tensor | None, bias: Tensor | None
) -> None:
    (B, H, M, _), N = q.shape, k.shape[2]
    if window is not None and window < 1:
        raise ValueError(
            f"window={window} lets nothing be seen - allowed: 1 or more - pass None for no window"
        )
    if kv_range is not None and (kv_range.shape != (B, 2) or kv_range.dtype != torch.int32):
        raise ValueError(
            f"kv_range is {tuple(kv_range.shape)} {kv_range.dtype} - allowed: ({B}, 2) torch.int32, "
            "first and one past the last valid key of each sequence - convert it"
        )
    if bias is not None:
        fits = [n in ok for n, ok in zip(bias.shape, ((1, B), (1, H), (1, M), (N,)), strict=False)]
        if bias.dim() != 4 or not all(fits):
            raise ValueError(
                f"bias has shape {tuple(bias.shape)} - allowed: [{B} or 1, {H} or 1, {M} or 1, {N}] for this "
                "q and k - reshape it"
            )


def check_packed(
    q: Tensor, k: Tensor, bias: Tensor | None, q_range: Tensor | None, max_queries: int | None
) -> None:
    """Refuse packed queries that do not fit."""
    if (q_range is None) != (max_queries is None):
        raise ValueError(
            f"q_range is {'missing' if q_range is None else 'there'}, max_queries={max_queries} - allowed: "
            "both or none - pass the largest number of queries of a sequence"
        )
    if q_range is None or max_queries is None:
        return
    if len(q) != 1 or q_range.shape != (len(k), 2) or q_range.dtype != torch.int32:
        raise ValueError(
            f"q is {tuple(q.shape)}, q_range {tuple(q_range.shape)} {q_range.dtype} - allowed: [1, H, T, D] "
            f"and ({len(k)}, 2) torch.int32, a range for each sequence of k - reshape or convert them"
        )
    if q.shape[2] and not 1 <= max_queries <= q.shape[2]:
        raise ValueError(
            f"max_queries={max_queries} - allowed: 1 to {q.shape[2]}, the queries of q - pass the largest "
            "number of queries of a sequence"
        )
    if bias is not None:
        raise ValueError("q_range comes with bias - allowed: one of them - pad the queries, or use kv_range")


def attend_packed_ref(
    q: Tensor, k: Tensor, v: Tensor, sm_scale: float, is_causal: bool, options: Any, q_range: Tensor
) -> Tensor:
    """[1, T, H, Dv]: `attend_ref` of one sequence after the other, its last query at its last valid key."""
    window, kv_range, bias, alibi, softcap, sinks = options
    N, o = k.shape[2], q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])
    for b, (first, end) in enumerate(q_range.tolist()):
        valid = None if kv_range is None else kv_range[b : b + 1]
        last = N if valid is None else min(N, int(valid[0, 1]))
        position = torch.arange(last - end + first, last, device=q.device)[None]
        sequence = q[:, :, first:end], k[b : b + 1], v[b : b + 1]
        others = window, valid, bias, alibi, softcap, sinks, position
        o[:, first:end] = attend_ref(*sequence, sm_scale, is_causal, *others)
    return o


def attend_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sm_scale: float,
    is_causal: bool,
    window: int | None,
    kv_range: Tensor | None,
    bias: Tensor | None,
    alibi: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    position: Tensor | None = None,
) -> Tensor:
    """[B, M, H, Dv]: softmax(scores and sinks) v over the allowed keys; zeros for a row without any.

    scores = cap(q kᵀ · sm_scale) + bias + alibi · (key - query position). Positions are [B or 1, M], by
    default those of the last M keys.
    """
    dtype, wider = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    group, (M, N) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    position = torch.arange(N - M, N, device=q.device)[None] if position is None else position
    distance = position[:, None, :, None] - torch.arange(N, device=q.device)
    allowed = _allowed(distance, is_causal, window, kv_range, bias)
    scores = q.to(wider) @ k.to(wider).repeat_interleave(group, 1).transpose(-1, -2) * sm_scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None and bias.dtype != torch.bool:
        scores = scores + bias.to(wider)
    if alibi is not None:
        scores = scores - alibi.to(wider)[:, None, None] * distance
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(wider)[:, None, None].expand_as(scores[..., :1])), -1)
    p = scores.softmax(-1)[..., :N].masked_fill(~allowed, 0)
    if kv_range is not None:
        # what lies outside may be uninitialised memory, and 0 * nan is nan
        v = v.masked_fill(~_in_range(kv_range, N)[:, None, :, None], 0)
    o = p @ v.to(wider).repeat_interleave(group, 1)
    return o.transpose(1, 2).contiguous().to(dtype)


def _allowed(
    distance: Tensor, is_causal: bool, window: int | None, kv_range: Tensor | None, bias: Tensor | None
) -> Tensor:
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if is_causal:
        allowed = distance >= 0
    if window is not None:
        allowed = allowed & (distance < window if is_causal else distance.abs() <= window)
    if kv_range is not None:
        allowed = allowed & _in_range(kv_range, distance.shape[-1])[:, None, None]
    if bias is not None:
        allowed = allowed & (bias if bias.dtype == torch.bool else bias > bias_floor(bias.dtype))
    return allowed


def _in_range(kv_range: Tensor, N: int) -> Tensor:
    key = torch.arange(N, device=kv_range.device)
    return (key >= kv_range[:, :1]) & (key < kv_range[:, 1:])


def bias_floor(dtype: torch.dtype) -> float:
    """A bias at or below this forbids its key: -inf, or the finfo.min of HF's additive masks."""
    return -65504.0 if dtype == torch.float16 else -1e30
