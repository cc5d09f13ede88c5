"""Activation of a gate times the up projection, the middle of a gated MLP."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.elements import ACTIVATIONS, activate, activate_ref, check_act
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, as_rows, nbytes


class _Key(NamedTuple):
    dtype: torch.dtype
    N: int


@triton.jit
def _gated_activation_kernel(
    gate_ptr, up_ptr, y_ptr, N, stride_gm, stride_um, ACT: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One program per (row, BLOCK_N entries)."""
    pid_m = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    gate = tl.load(gate_ptr + pid_m * stride_gm + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + pid_m * stride_um + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    # the model rounds the activation before it multiplies
    y = activate(gate, ACT).to(y_ptr.dtype.element_ty).to(tl.float32) * up
    tl.store(y_ptr + pid_m * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask_n)


@launcher
def gated_activation(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """y = act(gate) · up.

    Args:
        gate: [..., N] float16|bfloat16|float32, any strides; halves of one tensor are read in place.
        up: like gate.
        act: gelu (erf), gelu_quick (x · sigmoid(1.702 x)), gelu_tanh, relu, relu2 or silu.

    Returns:
        y like gate, contiguous.

    Raises:
        ValueError: gate and up differ in shape or dtype, or unknown act.

    Numerics:
        In float32; the activation is rounded to the dtype before the product, as HF models do.

    Source: https://arxiv.org/abs/2002.05202
    """
    check_act(act, ACTIVATIONS[1:])
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {tuple(gate.shape)} {gate.dtype}, up {tuple(up.shape)} {up.dtype} - "
            "allowed: equal shapes and dtypes - split or convert them"
        )
    if not backend.runs_triton(gate):
        return gated_activation_ref(gate, up, act)
    y = gate.new_empty(gate.shape)
    g, u = as_rows(gate), as_rows(up)
    M, N = g.shape
    if M and N:
        config = choose(OP, _Key(gate.dtype, N))
        launched("gated_activation")
        launch(_gated_activation_kernel, (M, -(-N // config["BLOCK_N"])))(
            g, u, y, N, g.stride(0), u.stride(0), act, **config
        )
    return y


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, the middle of a SwiGLU MLP."""
    return gated_activation(gate, up, "silu")


def gated_activation_ref(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """The truth of `gated_activation`."""
    return activate_ref(gate, act) * up


def _default(key: _Key) -> Config:
    block = min(2048, max(16, triton.next_power_of_2(key.N)))
    return {"BLOCK_N": block, "num_warps": min(4, max(1, block // 256)), "num_stages": 1}


def _inputs(M: int, N: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    gate, up = torch.randn(2, M, N, dtype=dtype, device=device)
    return {"gate": gate, "up": up, "act": "silu"}


def _cost(gate: Tensor, up: Tensor, act: str) -> tuple[int, int]:
    return nbytes(gate, up, gate), 10 * gate.numel()


_SPACE = tuple({"BLOCK_N": n, "num_warps": w} for n in (512, 1024, 2048, 4096) for w in (2, 4, 8))

OP = Op("gated_activation", gated_activation, gated_activation_ref, _SPACE, _default, _inputs, _cost)
