"""Normalisation layers."""

from typing import Any, cast

from torch import Tensor

from trinfer.kernels.layer_norm import layer_norm
from trinfer.kernels.rms_norm import rms_norm


def rms_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Forward of an RMS norm whose module has only a weight."""
    names = self._trinfer
    y = rms_norm(hidden_states, self.weight, names.eps, weight_offset=names.offset, cast=names.cast)
    return cast(Tensor, y)


def layer_norm_forward(self: Any, input: Tensor) -> Tensor:
    """Forward of `nn.LayerNorm` over the last dimension."""
    return cast(Tensor, layer_norm(input, self.weight, self.bias, self._trinfer.eps))
