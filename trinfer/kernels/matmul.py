"""Linear product of many rows over up to three weight segments, with its epilogue."""

from typing import Any

from torch import Tensor

from trinfer.kernels.elements import linear_ref


def matmul(
    x: Tensor,
    weight: Any,
    bias: Any = None,
    *,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """y = act(x · weightᵀ + bias) + residual."""
    return matmul_ref(x, weight, bias, act=act, gated=gated, residual=residual)


def matmul_ref(
    x: Tensor,
    weight: Any,
    bias: Any = None,
    *,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """The truth of `matmul`."""
    return linear_ref(x, weight, bias, act, gated, residual)
