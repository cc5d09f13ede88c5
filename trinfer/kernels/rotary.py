"""Rotary position embedding of queries and keys."""

import torch
from torch import Tensor

from trinfer.kernels.op import wide


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """x · cos + rotate(x) · sin for the first R entries of each head of q and k."""
    return rotary_ref(q, k, cos, sin, interleaved=interleaved)


def rotary_ref(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """The truth of `rotary`."""
    return rotate_ref(q, cos, sin, interleaved), rotate_ref(k, cos, sin, interleaved)


def rotate_ref(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R entries of each head of x; the rest passes through."""
    R = cos.shape[-1]
    head, tail = x[..., :R].to(wide(x)), x[..., R:]
    if interleaved:
        turned = torch.stack((-head[..., 1::2], head[..., 0::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-head[..., R // 2 :], head[..., : R // 2]), -1)
    y = head * cos.unsqueeze(1).to(wide(x)) + turned * sin.unsqueeze(1).to(wide(x))
    return torch.cat((y.to(x.dtype), tail), -1)
