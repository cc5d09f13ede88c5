"""Elementwise activations."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.elements import ACTIVATIONS, activate, activate_ref, check_act
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, nbytes


class _Key(NamedTuple):
    dtype: torch.dtype


@triton.jit
def _activation_kernel(x_ptr, y_ptr, N, ACT: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program per BLOCK_N entries."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N - first
    x = tl.load(x_ptr + first + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    tl.store(y_ptr + first + offs_n, activate(x, ACT).to(y_ptr.dtype.element_ty), mask=mask_n)


@launcher
def activation(x: Tensor, act: str) -> Tensor:
    """y = act(x), entry by entry.

    Args:
        x: [...] float16|bfloat16|float32, any strides; copied if not contiguous.
        act: gelu (erf), gelu_quick (x · sigmoid(1.702 x)), gelu_tanh, relu, relu2 (its square) or silu.

    Returns:
        y like x, contiguous.

    Raises:
        ValueError: unknown act.

    Numerics:
        In float32, rounded once. gelu_tanh is computed as x · sigmoid(2u): no overflow for any x.

    Source: https://arxiv.org/abs/1606.08415 (gelu and its tanh form)
    """
    check_act(act, ACTIVATIONS[1:])
    if not backend.runs_triton(x):
        return activation_ref(x, act)
    x = x.contiguous()
    y = torch.empty_like(x)
    N = x.numel()
    if N:
        config = choose(OP, _Key(x.dtype))
        launched("activation")
        launch(_activation_kernel, (-(-N // config["BLOCK_N"]),))(x, y, N, act, **config)
    return y


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit; `approximate` is "none" (erf) or "tanh", as in torch."""
    if approximate not in ("none", "tanh"):
        raise ValueError(
            f"approximate={approximate!r} is unknown - allowed: 'none', 'tanh' - pass one of these"
        )
    return activation(x, "gelu_tanh" if approximate == "tanh" else "gelu")


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return activation(x, "relu")


def activation_ref(x: Tensor, act: str) -> Tensor:
    """The truth of `activation`."""
    return activate_ref(x, act)


def _default(key: _Key) -> Config:
    return {"BLOCK_N": 1024, "num_warps": 4, "num_stages": 1}


def _inputs(N: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {"x": torch.randn(N, dtype=dtype, device=device), "act": "gelu"}


def _cost(x: Tensor, act: str) -> tuple[int, int]:
    return nbytes(x, x), 10 * x.numel()


_SPACE = tuple({"BLOCK_N": n, "num_warps": w} for n in (512, 1024, 2048, 4096) for w in (2, 4, 8))

OP = Op("activation", activation, activation_ref, _SPACE, _default, _inputs, _cost)
