"""C loops as a tree that is filled from inside and printed at the end."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

SIMD = "#pragma omp simd"


LANES = 16
"""Floats in a vector of the widest instructions."""


@dataclass(frozen=True)
class Blocks:
    """A sum over an innermost loop in vectors that do not wait for each other.

    `term` of LANES * len(sums) steps is added to the vectors `sums`; `before` stands before those steps. What
    is left is done in half as many steps, then one by one: the C compiler makes vectors of a loop only if it
    knows the number of steps.
    """

    before: tuple[str, ...]
    term: str
    sums: tuple[str, ...]


@dataclass(eq=False)
class Loop:
    """A C loop `for (axis = low; axis < high; axis++)`, the root without axis: lines, loops, last lines.

    `streams`: the rows of a blocked inner loop may be walked that many at a time, a share of the rows apart:
    one row at a time keeps too few pages of memory in flight (fp32 rows of 576, one Xeon core: 7.8 GB/s, four
    at a time 11).
    """

    axis: str | None = None
    low: str = "0"
    high: str = "1"
    lines: list[str] = field(default_factory=list)
    loops: list["Loop"] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    blocks: Blocks | None = None
    streams: int = 1

    def text(self, pragma: str, indent: str = "") -> list[str]:
        """The lines of the loop; `pragma` goes before the innermost loops."""
        if self.axis is not None and not (self.lines or self.loops or self.after):
            return []
        inner = indent + "  "
        if self.blocks is not None:
            return self._blocked_text(self.blocks, pragma, indent)
        if self.streams > 1 and (rows := self._row_loop()) is not None:
            return self._streams_text(rows, pragma, indent)
        out = [f"{indent}{{"]
        if self.axis is not None:
            out = [f"{indent}{pragma}"] if pragma and not self.loops else []
            out.append(
                f"{indent}for (int {self.axis} = {self.low}; {self.axis} < {self.high}; {self.axis}++) {{"
            )
        out += [inner + line for line in self.lines]
        for loop in self.loops:
            out += loop.text(pragma, inner)
        return [*out, *(inner + line for line in self.after), f"{indent}}}"]

    def _blocked_text(self, blocks: Blocks, pragma: str, indent: str) -> list[str]:
        # in a scope of its own: a second loop over the same axis may follow
        inner = indent + "  "
        return [
            f"{indent}{{",
            f"{inner}int block_{self.axis} = {self.low};",
            *self._steps(blocks, [lambda line: line], inner),
            f"{inner}if (block_{self.axis} < {self.high})",
            *Loop(self.axis, f"block_{self.axis}", self.high, self.lines).text(pragma, inner + "  "),
            f"{indent}}}",
        ]

    def _steps(self, blocks: Blocks, copies: list[Callable[[str], str]], indent: str) -> list[str]:
        """The loops over full and half blocks, with a copy of their body for each row in step."""
        block, out = f"block_{self.axis}", list[str]()
        for sums in (blocks.sums, blocks.sums[: len(blocks.sums) // 2]):
            size = LANES * len(sums)
            body = self._block_text(blocks, sums, indent + "    ")
            out.append(f"{indent}for (; {block} + {size} <= {self.high}; {block} += {size}) {{")
            for copy in copies:
                out += [f"{indent}  {{", *map(copy, body), f"{indent}  }}"]
            out.append(f"{indent}}}")
        return out

    def _block_text(self, blocks: Blocks, sums: tuple[str, ...], indent: str) -> list[str]:
        i, block, size = self.axis, f"block_{self.axis}", LANES * len(sums)
        return [
            *(indent + line for line in blocks.before if sums is blocks.sums),
            f"{indent}float part[{size}] T_ALIGNED;",
            f"{indent}{SIMD}",
            f"{indent}for (int {i} = {block}; {i} < {block} + {size}; {i}++) {{",
            *(f"{indent}  {line}" for line in self.lines[:-1]),
            f"{indent}  part[{i} - {block}] = {blocks.term};",
            f"{indent}}}",
            *(f"{indent}{s} += *(const t_vector*)(part + {LANES * k});" for k, s in enumerate(sums)),
        ]

    def _row_loop(self) -> "Loop | None":
        """The blocked loop over a row, if that is all there is and every row has the same bounds."""
        loops = [loop for loop in self.loops if loop.text("")]
        if len(loops) != 1 or loops[0].blocks is None or {loops[0].low, loops[0].high} & self._declared():
            return None
        return loops[0]

    def _declared(self) -> set[str]:
        """The names that the lines of the loop declare."""
        return {name for line in self.lines for name in re.findall(r"(\w+) = ", line)}

    def _streams_text(self, row: "Loop", pragma: str, indent: str) -> list[str]:
        """`streams` rows in step, each with its own copy of the names of this loop, then the rows left."""
        outside, indent = indent, indent + "  "
        i, share, inner = self.axis, f"t_share_{self.axis}", indent + "  "
        assert row.blocks is not None
        copies = [self._renamer(k, share) for k in range(self.streams)]
        rest = Loop(row.axis, f"block_{row.axis}", row.high, row.lines).text(pragma, inner + "  ")
        left = Loop(i, f"{self.low} + {self.streams}*{share}", self.high, self.lines, [row], self.after)
        return [
            f"{outside}{{",
            f"{indent}const int {share} = ({self.high} - {self.low}) / {self.streams};",
            f"{indent}for (int {i} = {self.low}; {i} < {self.low} + {share}; {i}++) {{",
            *(inner + copy(line) for copy in copies for line in self.lines),
            f"{inner}int block_{row.axis} = {row.low};",
            *row._steps(row.blocks, copies, inner),
            f"{inner}if (block_{row.axis} < {row.high}) {{",
            *(line for copy in copies for line in map(copy, rest)),
            f"{inner}}}",
            *(inner + copy(line) for copy in copies for line in self.after),
            f"{indent}}}",
            *left.text(pragma, indent),
            f"{outside}}}",
        ]

    def _renamer(self, k: int, share: str) -> Callable[[str], str]:
        """Rewrites a line for the k-th of several rows in step; no name of a kernel starts with t_."""
        names = "|".join(map(re.escape, sorted(self._declared())))
        row = f"({self.axis} + {k}*{share})" if k else str(self.axis)

        def rename(line: str) -> str:
            line = re.sub(rf"\b({names})\b", rf"t_row{k}_\1", line) if names else line
            return re.sub(rf"\b{self.axis}\b", row, line)

        return rename
