"""Linear product of few rows over up to three weight segments, with its epilogue."""

from typing import Any

from torch import Tensor

from trinfer.kernels.elements import linear_ref


def gemv(
    x: Tensor,
    weight: Any,
    bias: Any = None,
    *,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """y = act(x · weightᵀ + bias) + residual."""
    return gemv_ref(x, weight, bias, act=act, gated=gated, residual=residual)


def gemv_ref(
    x: Tensor,
    weight: Any,
    bias: Any = None,
    *,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """The truth of `gemv`."""
    return linear_ref(x, weight, bias, act, gated, residual)
