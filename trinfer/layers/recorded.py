"""A whole layer of fixed shape, recorded and replayed where the model's own forward runs around it."""

from typing import Any

import torch
from torch import Tensor

from trinfer.graphs import NotRecordable, signature
from trinfer.layers.block import handed_on, layer_states


def recorded_block_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Forward of a layer without a cache: as `block_forward`, by one replay.

    A call whose arguments are more than tensors and plain values runs launch by launch.
    """
    arguments = (hidden_states, args, kwargs)
    try:
        signature(arguments)
    except NotRecordable:
        return handed_on(self, layer_states(self, hidden_states, *args, **kwargs))
    addresses = tuple([parameter.data_ptr() for parameter in self.parameters()])

    def run(inputs: Any) -> Tensor:
        x, positional, named = inputs
        states = layer_states(self, x, *positional, **named)
        return states[0] if isinstance(states, tuple) else states

    with torch.no_grad():
        states = self._trinfer_pieces.run(run, arguments, addresses)
    return handed_on(self, (states, None) if self._trinfer.gives_tuple else states)
