"""Normalisation layers."""

from typing import Any, cast

from torch import Tensor

from trinfer.kernels.layer_norm import layer_norm
from trinfer.kernels.norm_elements import Norm
from trinfer.kernels.rms_norm import rms_norm
from trinfer.layers import records


def normalise(x: Tensor, norm: Norm, add: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """The rows of x after `norm`, plus `add`, in a launch of its own."""
    options: dict[str, Any] = {"weight_offset": norm.weight_offset, "add": add, "out": out}
    if norm.kind == "layer":
        return cast(Tensor, layer_norm(x, norm.weight, norm.bias, norm.eps, **options))
    assert norm.weight is not None
    return cast(Tensor, rms_norm(x, norm.weight, norm.eps, cast=norm.cast, **options))


def rms_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Forward of an RMS norm whose module has only a weight."""
    return normalise(hidden_states, norm_of(self, self._trinfer))


def layer_norm_forward(self: Any, input: Tensor) -> Tensor:
    """Forward of a layer norm over the last dimension."""
    return normalise(input, norm_of(self, self._trinfer))


def norm_of(module: Any, norm: records.Norm) -> Norm:
    """The norm whose weights `module` holds, as the kernels take it."""
    return Norm(module.weight, getattr(module, "bias", None), norm.eps, norm.kind, norm.offset, norm.cast)
