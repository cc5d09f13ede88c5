"""Element functions that several kernels share, each with its PyTorch twin for the references."""

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer.kernels.op import unit_strides

# Triton reads this variable when @triton.jit decorates, so reading it once here always agrees with it
IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

ACTIVATIONS = ("none", "gelu", "gelu_quick", "gelu_tanh", "relu", "relu2", "silu")
# those of a gate: what they do with up as well is in `gate_up`
GATED_ACTIVATIONS = (*ACTIVATIONS, "swiglu_clamped")


@triton.jit
def activate(x, ACT: tl.constexpr):
    """The activation named `ACT` of float32 `x`."""
    if ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACT == "gelu_quick":
        x = x / (1.0 + tl.exp(-1.702 * x))
    elif ACT == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) = sigmoid(2u), which needs one exponential and cannot overflow to nan
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACT == "relu":
        # not maximum(x, 0): that would turn nan into 0
        x = tl.where(x < 0.0, 0.0, x)
    elif ACT == "relu2":
        x = tl.where(x < 0.0, 0.0, x * x)
    elif ACT == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def gate_up(gate, up, ACT: tl.constexpr):
    """activate(gate) · up in float32, or the gate of gpt-oss, which clamps both."""
    if ACT == "swiglu_clamped":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        y = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        y = activate(gate, ACT) * up
    return y


@triton.jit
def pick_segment(pid, w0_ptr, w1_ptr, w2_ptr, N0, N1, N2, BLOCK_N: tl.constexpr):
    """Where block `pid` of the outputs lies: (weight, segment, first row, rows, first output column)."""
    w_ptr = w0_ptr
    segment = pid * 0
    column = pid * 0
    N = N0
    if w1_ptr is not None:
        if pid >= tl.cdiv(N0, BLOCK_N):
            w_ptr = w1_ptr
            segment += 1
            column = N0
            N = N1
            pid -= tl.cdiv(N0, BLOCK_N)
    if w2_ptr is not None:
        if (segment == 1) & (pid >= tl.cdiv(N1, BLOCK_N)):
            w_ptr = w2_ptr
            segment += 1
            column = N0 + N1
            N = N2
            pid -= tl.cdiv(N1, BLOCK_N)
    return w_ptr, segment, pid * BLOCK_N, N, column


@triton.jit
def load_bias(b0_ptr, b1_ptr, b2_ptr, segment, offs_n, N):
    """The biases of rows `offs_n` of the N in `segment`, in float32; a segment without one gives zeros."""
    bias = tl.zeros_like(offs_n).to(tl.float32)
    if b0_ptr is not None:
        width = tl.where(segment == 0, N, 0)
        bias += tl.load(b0_ptr + offs_n, mask=offs_n < width, other=0.0).to(tl.float32)
    if b1_ptr is not None:
        width = tl.where(segment == 1, N, 0)
        bias += tl.load(b1_ptr + offs_n, mask=offs_n < width, other=0.0).to(tl.float32)
    if b2_ptr is not None:
        width = tl.where(segment == 2, N, 0)
        bias += tl.load(b2_ptr + offs_n, mask=offs_n < width, other=0.0).to(tl.float32)
    return bias


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with float32 accumulation and no shortened float32 inputs."""
    if IS_INTERPRETED:
        # the interpreter keeps bfloat16 as integers and multiplies those
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def int_dot(a, b, acc):
    """acc + a @ b of int8 tiles in int32."""
    return tl.dot(a, b, acc, input_precision="ieee", out_dtype=tl.int32)


@triton.jit
def load_tile(ptrs, mask_0, mask_1, USES_0: tl.constexpr, USES_1: tl.constexpr):
    """A tile masked along the dimensions that may overrun; a GPU loads faster without a mask."""
    if USES_0:
        if USES_1:
            x = tl.load(ptrs, mask=mask_0 & mask_1, other=0.0)
        else:
            x = tl.load(ptrs, mask=mask_0, other=0.0)
    else:
        if USES_1:
            x = tl.load(ptrs, mask=mask_1, other=0.0)
        else:
            x = tl.load(ptrs)
    return x


def activate_ref(x: Tensor, act: str) -> Tensor:
    """The PyTorch truth of `activate`, in the dtype of `x`."""
    if act == "gelu":
        return torch.nn.functional.gelu(x)
    if act == "gelu_quick":
        return x * torch.sigmoid(1.702 * x)
    if act == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    if act == "relu":
        return torch.relu(x)
    if act == "relu2":
        return torch.relu(x).square()
    return torch.nn.functional.silu(x) if act == "silu" else x


def gate_up_ref(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """The PyTorch truth of `gate_up`, in the dtype of `gate`."""
    if act == "swiglu_clamped":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return activate_ref(gate, act) * up


def check_act(act: str, allowed: tuple[str, ...] = ACTIVATIONS) -> None:
    """Refuse an unknown activation name."""
    if act not in allowed:
        raise ValueError(
            f"act={act!r} is not an activation - allowed: {', '.join(allowed)} - pass one of these"
        )


def as_segments(
    x: Tensor, weight: Any, bias: Any, gated: bool, residual: Tensor | None
) -> tuple[tuple, tuple]:
    """Weights and biases of a product as tuples of equal length; refuses parts that do not fit together."""
    weights = weight if type(weight) is tuple else (weight,)
    biases = bias if type(bias) is tuple else (None,) * len(weights) if bias is None else (bias,)
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
    K, dtype, strides = x.shape[-1], x.dtype, weights[0].stride()
    for w, b in zip(weights, biases, strict=True):
        shape = w.shape
        if len(shape) != 2 or shape[1] != K or w.dtype != dtype:
            raise _misfit(x, w, b, strides)
        if w.stride() != strides and common_strides(weights)[1] is not None:
            raise _misfit(x, w, b, strides)
        if b is not None and (b.dtype != dtype or b.shape != shape[:1]):
            raise _misfit(x, w, b, strides)
    if residual is not None:
        shape = (*x.shape[:-1], weights[0].shape[0] if gated else sum(w.shape[0] for w in weights))
        if residual.shape != shape or residual.dtype != x.dtype:
            raise ValueError(
                f"residual is {tuple(residual.shape)} {residual.dtype} - allowed: {shape} {x.dtype}, "
                "as the result is - expand or convert it"
            )
    return weights, biases if bias is None else unit_strides(*biases)


def _misfit(x: Tensor, w: Tensor, b: Tensor | None, strides: tuple[int, ...]) -> ValueError:
    """What is wrong with a segment and its bias."""
    if w.dim() != 2 or w.shape[1] != x.shape[-1]:
        return ValueError(
            f"weight has shape {tuple(w.shape)} - allowed: (N, {x.shape[-1]}) for this x - transpose it"
        )
    if w.dtype != x.dtype or (b is not None and b.dtype != x.dtype):
        return ValueError(
            f"x is {x.dtype}, weight {w.dtype}, bias {None if b is None else b.dtype} - "
            "allowed: one dtype for all - convert them, e.g. with model.to(dtype)"
        )
    if b is not None and b.shape != w.shape[:1]:
        return ValueError(
            f"bias has shape {tuple(b.shape)} - allowed: ({w.shape[0]},) - pass this layer's bias"
        )
    # one launch reads all segments with the same strides
    return ValueError(
        f"weight segments have strides {strides} and {w.stride()} - allowed: equal strides, or all of them "
        "transposed, (1, N) - make them contiguous"
    )


def common_strides(weights: tuple[Tensor, ...]) -> tuple[int, int | None]:
    """Strides of all segments; None for the second where each has its own, the number of its outputs."""
    first, second = strides = weights[0].stride()
    if any(w.stride() != strides for w in weights) and all(w.stride() == (1, len(w)) for w in weights):
        return 1, None
    return first, second


def pad_to_three(values: Any) -> tuple:
    """`values` with None for the segments that are not there."""
    return (*values, *(None,) * (3 - len(values)))


def linear_ref(x: Tensor, weight: Any, bias: Any, act: str, gated: bool, residual: Tensor | None) -> Tensor:
    """act(x @ weight^T + bias) + residual; gated: act(x @ gate^T) * (x @ up^T) + residual."""
    check_act(act, GATED_ACTIVATIONS if gated else ACTIVATIONS)
    weights, biases = as_segments(x, weight, bias, gated, residual)
    parts = [torch.nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    y = gate_up_ref(parts[0], parts[1], act) if gated else activate_ref(torch.cat(parts, -1), act)
    return y if residual is None else y + residual


def as_experts(x: Tensor, weight: Any, bias: Any, gated: bool) -> tuple[tuple, tuple]:
    """Weights [E, N, K] and biases [E, N] as tuples of equal length; refuses parts that do not fit."""
    weights = weight if type(weight) is tuple else (weight,)
    biases = bias if type(bias) is tuple else (bias,) * len(weights) if bias is None else (bias,)
    if len(weights) != 1 + gated or len(biases) != len(weights):
        raise ValueError(
            f"{len(weights)} weights and {len(biases)} biases with gated={gated} - allowed: one of each, "
            "or (gate, up) pairs if gated - split the fused parameter into views"
        )
    (E, N, K), first = weights[0].shape, weights[0]
    for w, b in zip(weights, biases, strict=True):
        if w.shape != (E, N, K) or x.shape[-1] != K or w.dtype != x.dtype or w.stride() != first.stride():
            raise ValueError(
                f"weight is {tuple(w.shape)} {w.dtype} with strides {w.stride()} - allowed: "
                f"({E}, {N}, {x.shape[-1]}) {x.dtype}, gate and up with equal strides - "
                "convert or transpose it"
            )
        if b is not None and (b.shape != (E, N) or b.dtype != x.dtype or b.stride(1) != 1):
            raise ValueError(
                f"bias is {tuple(b.shape)} {b.dtype} - allowed: ({E}, {N}) {x.dtype} with contiguous rows - "
                "pass one row an expert"
            )
    return weights, biases


def experts_ref(x: Tensor, ids: Tensor, weight: Any, bias: Any, act: str, gated: bool) -> Tensor:
    """Rows of x times the weights of their experts, one expert after the other; zeros for rows without."""
    weights, biases = as_experts(x, weight, bias, gated)
    y = x.new_zeros(len(x), weights[0].shape[1])
    for e in range(len(weights[0])):
        rows = (ids == e).nonzero().flatten()
        parts = tuple(w[e] for w in weights), tuple(None if b is None else b[e] for b in biases)
        y[rows] = linear_ref(x[rows], *parts, act, gated, None)
    return y
