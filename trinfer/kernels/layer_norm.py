"""Layer normalisation, with an optional residual addition before it."""

import torch
from torch import Tensor

from trinfer.kernels.op import wide


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias, over the last dimension."""
    return layer_norm_ref(x, weight, bias, eps, residual=residual)


def layer_norm_ref(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """The truth of `layer_norm`."""
    h = x if residual is None else x + residual
    n = h.to(wide(x))
    n = n - n.mean(-1, keepdim=True)
    y = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    y = y.to(x.dtype)
    return y if residual is None else (y, h)
