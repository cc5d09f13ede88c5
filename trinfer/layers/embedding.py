"""Token, position and type tables."""

from typing import Any

from torch import Tensor

from trinfer.kernels.embedding import embedding


def embedding_forward(self: Any, input: Tensor) -> Tensor:
    """Forward of `nn.Embedding`.

    Raises:
        IndexError: an id outside the table; looked for on a CPU only, where it costs no wait for the device.
    """
    rows = self.weight.shape[0]
    if input.device.type == "cpu" and input.numel():
        low, high = (int(bound) for bound in input.aminmax())
        if low < 0 or high >= rows:
            raise IndexError(f"ids from {low} to {high} in a table of {rows} rows; allowed: 0 to {rows - 1}")
    return embedding(input, self.weight)
