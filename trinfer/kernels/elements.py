"""Element functions that several kernels share, each with its PyTorch twin for the references."""

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton reads this variable when @triton.jit decorates, so reading it once here always agrees with it
IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "silu")


@triton.jit
def activate(x, ACT: tl.constexpr):
    """The activation named `ACT` of float32 `x`."""
    if ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) = sigmoid(2u), which needs one exponential and cannot overflow to nan
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACT == "relu":
        # not maximum(x, 0): that would turn nan into 0
        x = tl.where(x < 0.0, 0.0, x)
    elif ACT == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


def activate_ref(x: Tensor, act: str) -> Tensor:
    """The PyTorch truth of `activate`, in the dtype of `x`."""
    if act == "gelu":
        return torch.nn.functional.gelu(x)
    if act == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    if act == "relu":
        return torch.relu(x)
    return torch.nn.functional.silu(x) if act == "silu" else x


def check_act(act: str, allowed: tuple[str, ...] = ACTIVATIONS) -> None:
    """Refuse an unknown activation name."""
    if act not in allowed:
        raise ValueError(
            f"act={act!r} is not an activation - allowed: {', '.join(allowed)} - pass one of these"
        )


def as_segments(weight: Tensor | tuple[Tensor, ...], bias: Any, gated: bool) -> tuple[tuple, tuple]:
    """Weights and biases of a product as tuples of equal length, checked against each other."""
    weights = weight if isinstance(weight, tuple) else (weight,)
    biases = bias if isinstance(bias, tuple) else (bias,) * len(weights) if bias is None else (bias,)
    if not 1 <= len(weights) <= 3 or (gated and len(weights) != 2):
        allowed = "exactly 2 (gate, up)" if gated else "1 to 3"
        raise ValueError(
            f"weight has {len(weights)} segments - allowed: {allowed} - split or concatenate them"
        )
    if len(biases) != len(weights):
        raise ValueError(
            f"bias has {len(biases)} entries - allowed: {len(weights)}, one per weight segment - "
            "pass a tuple with None for a segment without bias"
        )
    return weights, biases


def linear_ref(x: Tensor, weight: Any, bias: Any, act: str, gated: bool, residual: Tensor | None) -> Tensor:
    """act(x @ weight^T + bias) + residual; gated: act(x @ gate^T) * (x @ up^T) + residual."""
    weights, biases = as_segments(weight, bias, gated)
    parts = [torch.nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    y = activate_ref(parts[0], act) * parts[1] if gated else activate_ref(torch.cat(parts, -1), act)
    return y if residual is None else y + residual


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
    """softmax(q kᵀ · sm_scale + bias) v over the allowed keys; a row without any gives zeros; [B, M, H, Dv]."""
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
    """An attention bias at or below this forbids the key: -inf, or the finfo.min that HF's additive masks hold."""
    return -65504.0 if dtype == torch.float16 else -1e30
