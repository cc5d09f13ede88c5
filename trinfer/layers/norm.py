"""Normalisation layers."""

from typing import Any, cast

from torch import Tensor

from trinfer.kernels.layer_norm import layer_norm
from trinfer.kernels.norm_elements import Norm
from trinfer.kernels.rms_norm import rms_norm


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """The rows of x after `norm`, in a launch of its own."""
    if norm.kind == "layer":
        return cast(Tensor, layer_norm(x, norm.weight, norm.bias, norm.eps))
    assert norm.weight is not None
    y = rms_norm(x, norm.weight, norm.eps, weight_offset=norm.weight_offset, cast=norm.cast)
    return cast(Tensor, y)


def rms_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Forward of an RMS norm whose module has only a weight."""
    names = self._trinfer
    y = rms_norm(hidden_states, self.weight, names.eps, weight_offset=names.offset, cast=names.cast)
    return cast(Tensor, y)


def layer_norm_forward(self: Any, input: Tensor) -> Tensor:
    """Forward of `nn.LayerNorm` over the last dimension."""
    return cast(Tensor, layer_norm(input, self.weight, self.bias, self._trinfer.eps))
