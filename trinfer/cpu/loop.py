"""C loops as a tree that is filled from inside and printed at the end."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

SIMD = "#pragma omp simd"


@dataclass(frozen=True)
class Blocks:
    """An innermost loop taken `size` steps at a time: lines around each block, its statement inside one."""

    size: int
    before: tuple[str, ...]
    statement: str
    after: tuple[str, ...]


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
        """Full blocks, whose number of steps the C compiler knows, then the rest."""
        i, inner = self.axis, indent + "  "
        block = f"block_{i}"
        rest = Loop(i, block, self.high, self.lines)
        return [
            f"{indent}int {block} = {self.low};",
            f"{indent}for (; {block} + {blocks.size} <= {self.high}; {block} += {blocks.size}) {{",
            *self._block_text(blocks, inner),
            f"{indent}}}",
            f"{indent}if ({block} < {self.high})",
            *rest.text(pragma, inner),
        ]

    def _block_text(self, blocks: Blocks, indent: str) -> list[str]:
        i = self.axis
        return [
            *(indent + line for line in blocks.before),
            f"{indent}{SIMD}",
            f"{indent}for (int {i} = block_{i}; {i} < block_{i} + {blocks.size}; {i}++) {{",
            *(f"{indent}  {line}" for line in [*self.lines[:-1], blocks.statement]),
            f"{indent}}}",
            *(indent + line for line in blocks.after),
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
        i, share, inner = self.axis, f"share_{self.axis}", indent + "  "
        assert row.blocks is not None
        blocks, block = row.blocks, f"block_{row.axis}"
        copies = [self._renamer(k, share) for k in range(self.streams)]
        rest = Loop(row.axis, block, row.high, row.lines)
        out = [
            f"{outside}{{",
            f"{indent}const int {share} = ({self.high} - {self.low}) / {self.streams};",
            f"{indent}for (int {i} = {self.low}; {i} < {self.low} + {share}; {i}++) {{",
            *(inner + copy(line) for copy in copies for line in self.lines),
            f"{inner}int {block} = {row.low};",
            f"{inner}for (; {block} + {blocks.size} <= {row.high}; {block} += {blocks.size}) {{",
        ]
        for copy in copies:
            out += [f"{inner}  {{", *map(copy, row._block_text(blocks, inner + "    ")), f"{inner}  }}"]
        out += [f"{inner}}}", f"{inner}if ({block} < {row.high}) {{"]
        out += [line for copy in copies for line in map(copy, rest.text(pragma, inner + "  "))]
        out += [f"{inner}}}", *(inner + copy(line) for copy in copies for line in self.after), f"{indent}}}"]
        left = Loop(i, f"{self.low} + {self.streams}*{share}", self.high, self.lines, [row], self.after)
        return [*out, *left.text(pragma, indent), f"{outside}}}"]

    def _renamer(self, k: int, share: str) -> Callable[[str], str]:
        """Rewrites a line for the k-th of several rows in step."""
        names = "|".join(map(re.escape, sorted(self._declared())))
        row = f"({self.axis} + {k}*{share})" if k else str(self.axis)

        def rename(line: str) -> str:
            line = re.sub(rf"\b({names})\b", rf"\1_row{k}", line) if names else line
            return re.sub(rf"\b{self.axis}\b", row, line)

        return rename
