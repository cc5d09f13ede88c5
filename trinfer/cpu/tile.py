"""What the emitter knows of a tile value that is not recomputed where it is used."""

from dataclasses import dataclass

from trinfer.cpu.ttir import Block, Value


@dataclass(eq=False)
class Array:
    """A tile in memory; `home` is the block that may overwrite it once it is dead, None if none may."""

    name: str
    home: Block | None


@dataclass(frozen=True)
class Advanced:
    """A tile of pointers or indices that is `start` plus a scalar that a loop moves.

    `step` is the C text of what the loop adds each time, for its body; None where it is computed there.
    """

    start: Value
    offset: str
    step: str | None = None
