"""The choice of a launch configuration: asked once a key, overridden while pinned."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from trinfer.autotune import choose, pin


@dataclass(frozen=True, eq=False)
class Asked:
    """A stand-in for an op that remembers the keys it is asked for."""

    keys: list[Any] = field(default_factory=list)

    def default(self, key):
        self.keys.append(key)
        return {"BLOCK_N": 8 * key[0], "num_warps": 4}


def test_choose_asks_once_a_key():
    op, other = Asked(), Asked()
    assert [choose(op, (n,))["BLOCK_N"] for n in (1, 2, 1, 2)] == [8, 16, 8, 16]
    assert op.keys == [(1,), (2,)]
    assert choose(other, (1,)) == choose(op, (1,))
    assert other.keys == [(1,)]


def test_pin_overrides_parts_of_the_default_and_ends():
    op, other = Asked(), Asked()
    with pytest.raises(RuntimeError, match="stop"), pin(op, {"BLOCK_N": 3}):
        assert choose(op, (1,)) == {"BLOCK_N": 3, "num_warps": 4}
        assert choose(other, (1,)) == {"BLOCK_N": 8, "num_warps": 4}
        raise RuntimeError("stop")
    assert choose(op, (1,)) == {"BLOCK_N": 8, "num_warps": 4}
