"""The record that describes an op to tests, benchmarks, tuner and compile gate; what launchers share."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trinfer.autotune import Config


@dataclass(frozen=True, eq=False)
class Op:
    """A mathematical function: its launcher, its PyTorch truth, and how to configure, feed and price it.

    `default(key)` is a whole launch configuration; each entry of `space` overrides parts of it.
    `inputs(**sizes)` builds random arguments, `cost(**arguments)` gives the bytes moved and the operations.
    """

    name: str
    launcher: Callable[..., Any]
    ref: Callable[..., Any]
    space: tuple[Config, ...]
    default: Callable[[Any], Config]
    inputs: Callable[..., dict[str, Any]]
    cost: Callable[..., tuple[int, int]]


_counters: list[Counter[str]] = []


@contextlib.contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """Count, by op name, the launches inside the `with` block that run as Triton; references do not count."""
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        # by identity: two counters that hold the same numbers are equal
        _counters[:] = [c for c in _counters if c is not counter]


def launched(name: str) -> None:
    """Tell every open `count_launches` that the kernel of op `name` is about to run."""
    for counter in _counters:
        counter[name] += 1


def unit_stride(x: Tensor) -> Tensor:
    """`x` itself if its last dimension is contiguous in memory, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """`x` as a matrix [M, N] of rows with unit stride: a view where the strides allow it, else a copy."""
    if x.dim() != 2:
        x = x.flatten(0, -2) if x.dim() > 2 else x[None]
    return x if x.stride(-1) == 1 else x.contiguous()


def as_bias(bias: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """The bias of attention with strides for [B, H, M, N] and a contiguous last dimension; bool as uint8."""
    if bias is None:
        return None
    bias = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
    return unit_stride(bias.expand(shape))


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of all given tensors together."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def wide(x: Tensor) -> torch.dtype:
    """The dtype a reference computes in: float64 for float64 inputs (tests), else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
