"""A stand-in for an op, and rows of a table to put and look up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trinfer.autotune import Config


class Key(NamedTuple):
    """A key like those of the kernels: an exact size, a bucketed one, a dtype and an option."""

    dtype: torch.dtype = torch.float32
    rows: int = 1
    N: int = 64
    gated: bool = False


def default(key: Any) -> Config:
    return {"BLOCK_N": min(64, key.N), "num_warps": 4}


def launcher(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True, eq=False)
class Stub:
    """What a table has to know of an op."""

    name: str = "stub"
    revision: int = 1
    space: tuple[Config, ...] = ({"BLOCK_N": 16}, {"BLOCK_N": 32}, {"BLOCK_N": 64})
    default: Callable[[Any], Config] = default
    launcher: Callable[..., Any] = launcher
    cost: Callable[..., tuple[int, int]] = lambda **arguments: (1, 1)


def row(block: int = 32, us: float = 1.0, date: str = "2026-01-01T00:00:00+00:00", **changes: Any) -> Any:
    versions = {"triton": "3.7.1", "torch": "2.13.0", "driver": "d", "src": "s"}
    config = {"BLOCK_N": block, "num_warps": 4}
    times = {"us": us, "default_us": 2.0, "floor_us": 0.5, "tried": 3}
    return {"config": config, **times, **versions, "date": date, **changes}
