"""Token, position and type tables, and the patches of an image."""

from typing import Any

from torch import Tensor

from trinfer.kernels.embedding import embedding
from trinfer.layers.linear import product


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


def patches_forward(self: Any, input: Tensor) -> Tensor:
    """Forward of an `nn.Conv2d` whose windows neither overlap nor leave gaps, as one product."""
    (height, width), weight = self.kernel_size, self.weight.flatten(1)
    rows, columns = input.shape[-2] // height, input.shape[-1] // width
    x = input[..., : rows * height, : columns * width]
    x = x.unflatten(-1, (columns, width)).unflatten(-3, (rows, height))
    x = x.permute(0, 2, 4, 1, 3, 5).flatten(3)
    return product(x, (weight,), None if self.bias is None else (self.bias,)).permute(0, 3, 1, 2)
