"""C loops as a tree that is filled from inside and printed at the end."""

from dataclasses import dataclass, field

SIMD = "#pragma omp simd"


@dataclass(frozen=True)
class Blocks:
    """An innermost loop taken `size` steps at a time: lines around each block, and its statement inside
    one."""

    size: int
    before: tuple[str, ...]
    statement: str
    after: tuple[str, ...]


@dataclass(eq=False)
class Loop:
    """A C loop `for (axis = low; axis < high; axis++)` (the root has no axis): lines, inner loops,
    closing lines."""

    axis: str | None = None
    low: str = "0"
    high: str = "1"
    lines: list[str] = field(default_factory=list)
    loops: list["Loop"] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    blocks: Blocks | None = None

    def text(self, pragma: str, indent: str = "") -> list[str]:
        """The lines of the loop; `pragma` goes before the innermost loops."""
        if self.axis is not None and not (self.lines or self.loops or self.after):
            return []
        inner = indent + "  "
        if self.blocks is not None:
            return self._blocked_text(self.blocks, pragma, indent)
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
            *(inner + line for line in blocks.before),
            f"{inner}{SIMD}",
            f"{inner}for (int {i} = {block}; {i} < {block} + {blocks.size}; {i}++) {{",
            *(f"{inner}  {line}" for line in [*self.lines[:-1], blocks.statement]),
            f"{inner}}}",
            *(inner + line for line in blocks.after),
            f"{indent}}}",
            f"{indent}if ({block} < {self.high})",
            *rest.text(pragma, inner),
        ]
