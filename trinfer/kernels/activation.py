"""Elementwise activations."""

from torch import Tensor

from trinfer.kernels.elements import activate_ref


def activation(x: Tensor, act: str) -> Tensor:
    """y = act(x)."""
    return activation_ref(x, act)


def activation_ref(x: Tensor, act: str) -> Tensor:
    """The truth of `activation`."""
    return activate_ref(x, act)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit; approximate: "none" (erf) or "tanh"."""
    return activation(x, "gelu_tanh" if approximate == "tanh" else "gelu")


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return activation(x, "relu")
