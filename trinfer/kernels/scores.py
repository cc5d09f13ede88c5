"""What the attention kernels share: which keys a query may see, its bias, and the truth of both."""

import torch
import triton
import triton.language as tl
from torch import Tensor


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


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, kv_range: Tensor | None, bias: Tensor | None
) -> None:
    """Refuse attention arguments that do not fit together."""
    (B, H, M, D), (_, G, N, _) = q.shape, k.shape
    if k.shape != (B, G, N, D) or v.shape[:3] != (B, G, N) or H % max(1, G):
        raise ValueError(
            f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} - "
            "allowed: [B, H, M, D], [B, G, N, D], [B, G, N, Dv] with G dividing H - reshape them"
        )
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype} - allowed: one dtype - convert them")
    if max(D, v.shape[3]) > 256:
        raise ValueError(f"heads have {D} and {v.shape[3]} entries - allowed: up to 256 - split the heads")
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


def attend_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sm_scale: float,
    is_causal: bool,
    window: int | None,
    kv_range: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """[B, M, H, Dv]: softmax(q kᵀ · sm_scale + bias) v over the allowed keys; zeros for a row without any."""
    dtype, wider = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    group, (M, N) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    key = torch.arange(N, device=q.device)
    allowed = torch.ones(q.shape[0], 1, M, N, dtype=torch.bool, device=q.device)
    if kv_range is not None:
        start, end = kv_range[:, 0, None], kv_range[:, 1, None]
        valid = (key >= start) & (key < end)
        allowed &= valid[:, None, None, :]
        # what lies outside may be uninitialised memory, and 0 * nan is nan
        v = v.masked_fill(~valid[:, None, :, None], 0)
    distance = torch.arange(N - M, N, device=q.device)[:, None] - key
    if is_causal:
        allowed = allowed & (distance >= 0)
    if window is not None:
        allowed = allowed & (distance < window if is_causal else distance.abs() <= window)
    scores = q.to(wider) @ k.to(wider).repeat_interleave(group, 1).transpose(-1, -2) * sm_scale
    if bias is not None and bias.dtype == torch.bool:
        allowed = allowed & bias
    elif bias is not None:
        allowed = allowed & (bias > bias_floor(bias.dtype))
        scores = scores + bias.to(wider)
    p = scores.masked_fill(~allowed, float("-inf")).softmax(-1).masked_fill(~allowed, 0)
    o = p @ v.to(wider).repeat_interleave(group, 1)
    return o.transpose(1, 2).contiguous().to(dtype)


def bias_floor(dtype: torch.dtype) -> float:
    """A bias at or below this forbids its key: -inf, or the finfo.min of HF's additive masks."""
    return -65504.0 if dtype == torch.float16 else -1e30
