"""Activation of a gate times the up projection."""

from torch import Tensor

from trinfer.kernels.elements import activate_ref


def gated_activation(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """y = act(gate) · up."""
    return gated_activation_ref(gate, up, act)


def gated_activation_ref(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """The truth of `gated_activation`."""
    return activate_ref(gate, act) * up


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, the middle of a SwiGLU MLP."""
    return gated_activation(gate, up, "silu")
