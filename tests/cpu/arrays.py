"""Inputs and outputs for kernels under test."""

import torch
from torch import Tensor


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output that shows what no kernel wrote: nan, or 0x55 in every byte of an integer."""
    x = torch.empty(shape, dtype=dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return x.fill_(float("nan"))
    x.view(torch.uint8).fill_(0x55)
    return x


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(low: int, high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
    """Random integers from low to high - 1."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
