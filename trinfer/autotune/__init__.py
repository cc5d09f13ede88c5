"""Launch configurations: which block sizes, warps and stages a kernel runs with on this device."""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

Config = Mapping[str, Any]


class Tunable(Protocol):
    """What `choose` needs to know of an `Op`."""

    @property
    def default(self) -> Callable[[Any], Config]:
        """The analytic configuration of a key."""


@functools.cache
def choose(op: Tunable, key: Hashable) -> Config:
    """The launch configuration of `op` for `key`, remembered, so that a launch pays one dictionary look-up.

    `key` holds what a configuration may depend on (dtypes, sizes that stay fixed while decoding, features) and
    nothing that changes from token to token.
    """
    return op.default(key)
