"""The feed-forward half of a layer: as one module, or spread over modules of the layer."""

from typing import Any, cast

from torch import Tensor

from trinfer.kernels.layer_norm import layer_norm
from trinfer.layers.linear import product, segments


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    """down(act(gate(x)) · up(x)) in two launches; the layer itself adds the residual."""
    names = self._trinfer
    ups = (names.gate, names.up) if names.gate else (names.up,)
    h = product(x, *segments(self, ups, names.transposed), act=names.act, gated=bool(names.gate))
    return product(h, *segments(self, (names.down,), names.transposed))


def dense_act_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """act(dense(x)) in one launch."""
    names = self._trinfer
    return product(hidden_states, *segments(self, (names.dense,)), act=names.act)


def dense_add_norm_forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """norm(dense(x) + input_tensor), the close of a post-norm half layer, in two launches."""
    names = self._trinfer
    h = product(hidden_states, *segments(self, (names.dense,)), residual=input_tensor)
    norm = getattr(self, names.norm)
    return cast(Tensor, layer_norm(h, norm.weight, norm.bias, names.eps))
