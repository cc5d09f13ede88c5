"""Launch configurations: which block sizes, warps and stages a kernel runs with on this device."""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Protocol

Config = Mapping[str, Any]


class Tunable(Hashable, Protocol):
    """What `choose` needs to know of an `Op`."""

    @property
    def default(self) -> Callable[[Any], Config]:
        """The analytic configuration of a key."""


_pinned: dict[Tunable, Config] = {}


def choose(op: Tunable, key: Hashable) -> Config:
    """The launch configuration of `op` for `key`, remembered: a launch pays two dictionary look-ups.

    `key` holds what a configuration may depend on (dtypes, features, sizes that stay fixed while decoding)
    and nothing that changes from token to token.
    """
    config = _analytic(op, key)
    return {**config, **_pinned[op]} if op in _pinned else config


@functools.cache
def _analytic(op: Tunable, key: Hashable) -> Config:
    return op.default(key)


@contextlib.contextmanager
def pin(op: Tunable, config: Config) -> Iterator[None]:
    """Run every launch of `op` inside the `with` block with `config` over its default, to time or test it."""
    _pinned[op] = config
    try:
        yield
    finally:
        del _pinned[op]
