"""Token, position and type tables."""

from typing import Any

from torch import Tensor

from trinfer.kernels.embedding import embedding


def embedding_forward(self: Any, input: Tensor) -> Tensor:
    """Forward of `nn.Embedding`.

    Raises:
        IndexError: an id outside the table.
    """
    check_ids(input, self.weight.shape[0])
    return embedding(input, self.weight)


def check_ids(ids: Tensor, rows: int) -> None:
    """Refuse ids outside a table of `rows` rows.

    Raises:
        IndexError: as above; looked for on a CPU only, where it costs no wait for the device.
    """
    if ids.device.type == "cpu" and ids.numel():
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= rows:
            raise IndexError(f"ids from {low} to {high} in a table of {rows} rows; allowed: 0 to {rows - 1}")
