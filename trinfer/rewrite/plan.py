"""The plan of an engine: what becomes of each part of a model and why, as data that prints."""

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from trinfer.layers.records import Decoder, Record

Mode = Literal["pass-through", "kernel injection", "user policy"]
Row = tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One change: the module at `path` becomes something else; `record` is what its new forward remembers.

    A step without a record swaps nothing: it changes the whole model (its dtype, its device, its mode, its
    mask), or how a weight lies in memory.
    """

    path: str
    was: str
    becomes: str
    why: str
    forward: str = ""
    record: Record | None = None


@dataclass(frozen=True)
class Kept:
    """A part that stays the model's own code, and why."""

    path: str
    was: str
    why: str


@dataclass(frozen=True)
class Masking:
    """What `triangular_masking` makes of a model whose own rule is the other one.

    `modules` are the attention modules whose own `is_causal` is turned round; `configured` is what the
    model's configuration says of it, None for nothing; `why` is what asks for it.
    """

    is_causal: bool
    modules: tuple[str, ...]
    configured: bool | None
    why: str


@dataclass(frozen=True, repr=False)
class Plan:
    """Everything that `init_inference` will do to a model; made without touching it, printed as a table.

    `step` says what runs one decode step: the launches that `decoder` describes, or `model.forward` and why.
    `attention` is the attention implementation that undoing comes back to, None if the plan does not change
    it; `training` are the modules found in training mode; `transposed` are the linears whose weights are laid
    out as [in, out].
    """

    mode: Mode
    model: str
    architecture: str
    steps: tuple[Step, ...]
    kept: tuple[Kept, ...]
    step: str
    attention: str | None = None
    training: tuple[str, ...] = ()
    decoder: Decoder | None = None
    masking: Masking | None = None
    transposed: tuple[str, ...] = ()

    @property
    def swapped(self) -> tuple[Step, ...]:
        """The steps that give a module a new forward."""
        return tuple(step for step in self.steps if step.record is not None)

    def summary(self) -> str:
        """Mode, model and counts in one line."""
        name = f"{self.model} ({self.architecture})" if self.architecture else self.model
        return f"{self.mode} · {name} · {len(self.swapped)} modules swapped, {len(self.kept)} kept"

    def rows(self) -> tuple[list[Row], list[Row]]:
        """Table rows (path, was, becomes, why) of the changes and (path, was, why) of what is kept.

        Entries that differ only in the layer number are one row, `model.layers.{0..29}.mlp`.
        """
        changes = collapse((s.path, (s.was, s.becomes, s.why)) for s in self.steps)
        return changes, collapse((k.path, (k.was, k.why)) for k in self.kept)

    def __str__(self) -> str:
        changes, kept = self.rows()
        parts = [self.summary(), f"step: {self.step}"]
        if changes:
            parts.append(aligned(("path", "was", "becomes", "why"), changes))
        if kept:
            parts.append(aligned(("kept", "is", "why"), kept))
        return "\n\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        changes, kept = self.rows()
        return (
            f"<p><b>{html.escape(self.summary())}</b><br>step: {html.escape(self.step)}</p>"
            + html_table(("path", "was", "becomes", "why"), changes)
            + html_table(("kept", "is", "why"), kept)
        )


def collapse(entries: Iterable[tuple[str, Row]]) -> list[Row]:
    """One row for all entries that agree but for the first number in their path; order of appearance."""
    groups: dict[tuple[str, str | None, Row], list[int]] = {}
    for path, cells in entries:
        match = re.match(r"(.*?(?:^|\.))(\d+)((?:\..*)?)$", path)
        head, tail = (match[1], match[3]) if match else (path, None)
        groups.setdefault((head, tail, cells), []).extend([int(match[2])] if match else [])
    return [
        (f"{head}{numbers(found)}{tail or ''}" or "(model)", *cells)
        for (head, tail, cells), found in groups.items()
    ]


def numbers(found: Sequence[int]) -> str:
    """`5`, `{0..29}` or `{0..3,7}`; nothing for no number."""
    if len(found) < 2:
        return "".join(map(str, found))
    runs: list[list[int]] = []
    for number in sorted(found):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"


def aligned(header: Row, rows: list[Row]) -> str:
    """A table in plain text, columns as wide as their longest cell."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def html_table(header: Row, rows: list[Row]) -> str:
    """A table in HTML; nothing for no rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{html.escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
