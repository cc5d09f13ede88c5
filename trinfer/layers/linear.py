"""Linear products: the one place that picks the kernel of a product by its number of rows."""

from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from trinfer.kernels.gemv import gemv
from trinfer.kernels.matmul import matmul
from trinfer.kernels.norm_elements import Norm
from trinfer.layers.norm import normalise

# up to here reading the weights is what a product costs, and the gemv kernel reads them once for all rows
GEMV_ROWS = 16
# up to here a product that normalises its rows itself is as fast as two launches
NORM_ROWS = 64

Segments = tuple[Tensor, ...]
Biases = tuple[Tensor | None, ...] | None


def product(
    x: Tensor,
    weights: Segments,
    biases: Biases = None,
    *,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """scale · act(norm(x) · weightsᵀ + biases) + residual over up to three weight segments; x is [..., K]."""
    rows = x.shape[:-1].numel()
    launch = gemv if rows <= GEMV_ROWS else matmul
    if norm is not None and rows > NORM_ROWS:
        x, norm = normalise(x, norm), None
    return launch(
        x, weights, biases, act=act, gated=gated, residual=residual, norm=norm, scale=scale, out=out
    )


def sum_of_products(
    x: Tensor,
    linear: tuple[Segments, Biases],
    second: Tensor,
    also: tuple[Segments, Biases],
    residual: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """x · weightᵀ + second · alsoᵀ + both biases + residual; of few rows in one launch."""
    ((weight,), bias), ((other,), offset) = linear, also
    if x.shape[:-1].numel() <= GEMV_ROWS:
        extra = (second, other, offset if offset is None else offset[0])
        return gemv(x, weight, bias if bias is None else bias[0], also=extra, residual=residual, out=out)
    return product(second, *also, residual=product(x, *linear, residual=residual, out=out), out=out)


def segments(owner: nn.Module, names: tuple[str, ...], transposed: bool = False) -> tuple[Segments, Biases]:
    """Weights [N, K] and biases of the linears called `names` in `owner`; views, never copies."""
    linears = [attrgetter(name)(owner) for name in names]
    weights = tuple(linear.weight.t() if transposed else linear.weight for linear in linears)
    biases = tuple(linear.bias for linear in linears)
    return weights, biases if any(bias is not None for bias in biases) else None


def halves(linear: Any) -> tuple[Segments, Biases]:
    """The first and the second half of the outputs of a linear, as two segments; views, never copies."""
    biases = None if linear.bias is None else tuple(linear.bias.chunk(2))
    return tuple(linear.weight.chunk(2)), biases


def linear_forward(self: Any, input: Tensor) -> Tensor:
    """Forward of `nn.Linear`, and of `Conv1D` whose weight lies as [in, out]."""
    weight = self.weight.t() if self._trinfer.transposed else self.weight
    return product(input, (weight,), None if self.bias is None else (self.bias,))
