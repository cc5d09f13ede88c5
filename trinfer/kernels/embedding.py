"""Look-up of token vectors."""

from torch import Tensor

from trinfer.kernels.op import wide


def embedding(ids: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    """y = weight[ids] · scale."""
    return embedding_ref(ids, weight, scale=scale)


def embedding_ref(ids: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    """The truth of `embedding`."""
    y = weight[ids]
    return y if scale == 1.0 else (y.to(wide(y)) * scale).to(y.dtype)
