"""What the files of this room hand to each other."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Config = Mapping[str, Any]


class Tunable(Hashable, Protocol):
    """What has to be known of an `Op`."""

    @property
    def name(self) -> str:
        """The op's name, which is that of its file of rows."""

    @property
    def launcher(self) -> Callable[..., Any]:
        """What is called to launch it."""

    @property
    def space(self) -> tuple[Config, ...]:
        """What may override parts of the default."""

    @property
    def default(self) -> Callable[[Any], Config]:
        """The analytic configuration of a key."""

    @property
    def cost(self) -> Callable[..., tuple[int, int]]:
        """Bytes and operations of a launch."""

    @property
    def revision(self) -> int:
        """Rises when the meaning of a configuration changes: rows of another revision are void."""


@dataclass(frozen=True)
class Call:
    """A launch that a dry run made: the key its launcher asked for, and its arguments."""

    op: Tunable
    key: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.op.name} {self.key}"
