"""The feed-forward half of a layer: as one module, or spread over modules of the layer."""

from typing import Any, cast

from torch import Tensor

from trinfer.kernels.layer_norm import layer_norm
from trinfer.layers.linear import halves, product, segments


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    """down(act(gate(x)) · up(x)) in two launches; the layer itself adds the residual."""
    return _mlp(self, x, None)


def residual_mlp_forward(self: Any, hidden_states: Tensor, residual: Tensor) -> Tensor:
    """Forward of an MLP that adds the residual of its layer."""
    return _mlp(self, hidden_states, residual)


def _mlp(self: Any, x: Tensor, residual: Tensor | None) -> Tensor:
    names = self._trinfer
    if names.gate_up:
        ups = halves(getattr(self, names.gate_up))
    else:
        ups = segments(self, (names.gate, names.up) if names.gate else (names.up,), names.transposed)
    h = product(x, *ups, act=names.act, gated=bool(names.gate or names.gate_up))
    return product(h, *segments(self, (names.down,), names.transposed), residual=residual)


def dense_act_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """act(dense(x)) in one launch."""
    names = self._trinfer
    return product(hidden_states, *segments(self, (names.dense,)), act=names.act)


def dense_add_norm_forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """norm(dense(x) + input_tensor), the close of a half layer, in one launch or two."""
    names = self._trinfer
    h = product(hidden_states, *segments(self, (names.dense,)), residual=input_tensor)
    if not names.norm:
        return h
    norm = getattr(self, names.norm)
    return cast(Tensor, layer_norm(h, norm.weight, norm.bias, names.eps))
