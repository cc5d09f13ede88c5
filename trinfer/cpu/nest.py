"""Loop nests: one tile-wide statement as C loops.

Each sub-expression is written at the outermost loop level where it is constant. A mask whose conditions
are affine
cuts the loops instead of being tested per element: the loop over its innermost axis runs over the part
where the
condition holds, and a second loop over the rest, in which masked loads are their `other` value, follows
only if
something has to be written there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trinfer.cpu.affine import Conjunct, Index, add, c_text, coefficient, source_index
from trinfer.cpu.loop import SIMD, Loop
from trinfer.cpu.scalar import (
    MEMORY,
    NARROW_FLOATS,
    c_float,
    c_type,
    expression,
    float_literal,
    from_memory,
    literal,
    tile_type,
    to_memory,
)
from trinfer.cpu.ttir import Op, Value

if TYPE_CHECKING:
    from trinfer.cpu.emit import Emitter


@dataclass(frozen=True)
class Read:
    """An array that a nest reads: its name, the tile value it holds, where, and the C type of its
    elements."""

    array: str
    owner: Value
    index: Index
    c_type: str


Body = Callable[["Nest"], None]


class Nest:
    """Builds the loops over one `shape`; `body(nest)` is called for each innermost loop and writes its
    statement."""

    def __init__(self, emitter: "Emitter", shape: tuple[int, ...], inner: int | None = None) -> None:
        self.emitter = emitter
        self.shape = shape
        axes = [d for d, n in enumerate(shape) if n > 1]
        if inner is not None and inner in axes:
            axes.remove(inner)
            axes.append(inner)
        self.axes = axes
        self.index: Index = tuple(f"i{d}" if n > 1 else "0" for d, n in enumerate(shape))
        self.levels = {f"i{d}": k + 1 for k, d in enumerate(axes)}
        self.reads: list[Read] = []
        self.loads: list[tuple[Op, Index]] = []
        self.simd = True
        self.probing = False
        self.masks: list[list[Conjunct]] = []
        self.store_mask: list[Conjunct] | None = None
        self.pragma = SIMD
        self.root = Loop()
        self._enter([self.root], {})

    def _enter(self, path: list[Loop], assume: dict[Conjunct, bool | None]) -> None:
        self.path, self.assume = path, assume
        self.memo: dict[tuple[Value, Index], str] = {}

    # ---- building

    def run(self, body: Body) -> None:
        """Write the nest to the emitter."""
        self.probe(body)
        self._build(0, [self.root], {}, body)
        for line in self.root.text(self.pragma if self.simd else ""):
            self.emitter.line(line)

    def probe(self, body: Body) -> None:
        """Evaluate the body once, for the masks and arrays in it; what it writes is thrown away."""
        counters = dict(self.emitter.counters)
        self.probing = True
        self._enter([Loop() for _ in range(len(self.axes) + 1)], {})
        body(self)
        self.probing = False
        self.emitter.counters = counters

    def _cuts(self, axis: int, assume: dict[Conjunct, bool | None]) -> list[tuple[Conjunct, int]]:
        """The conditions that bound `axis`, innermost of theirs, with coefficient 1 (above) or -1 (below)."""
        name, cuts = f"i{axis}", []
        live = [m for m in self._all_masks() if not any(assume.get(c) is False for c in m)]
        for condition in dict.fromkeys(c for mask in live for c in mask):
            if condition.terms is None or condition in assume:
                continue
            names = {n for m in condition.poly for n in m}
            innermost = max((self.levels[n] for n in names if n in self.levels), default=0)
            k = coefficient(condition.poly, name)
            if innermost == self.levels[name] and k in (1, -1):
                cuts.append((condition, k))
        return cuts

    def _all_masks(self) -> list[list[Conjunct]]:
        return self.masks + ([self.store_mask] if self.store_mask else [])

    def _build(self, level: int, path: list[Loop], assume: dict[Conjunct, bool | None], body: Body) -> None:
        self._enter(path, assume)
        if level == len(self.axes):
            body(self)
            return
        axis = self.axes[level]
        cuts = self._cuts(axis, assume)
        size = str(self.shape[axis])
        if not cuts:
            self._inside(level, path, assume, body, "0", size)
            return
        low, high = self._bounds(axis, cuts)
        self._inside(level, path, {**assume, **{c: True for c, _ in cuts}}, body, low, high)
        if self.store_mask is not None and all(c in self.store_mask for c, _ in cuts):
            return
        none = {**assume, **{c: False for c, _ in cuts}}
        some = none if len(cuts) == 1 else {**assume, **{c: None for c, _ in cuts}}
        if low != "0":
            self._inside(level, path, some, body, "0", low)
        if high != size and low == "0" and len(cuts) > 1:
            # past the last of several ends nothing is left
            end = self._end(axis, cuts)
            self._inside(level, path, some, body, high, end)
            high, some = end, none
        if high != size:
            self._inside(level, path, some, body, high, size)

    def _inside(
        self,
        level: int,
        path: list[Loop],
        assume: dict[Conjunct, bool | None],
        body: Body,
        low: str,
        high: str,
    ) -> None:
        loop = Loop(f"i{self.axes[level]}", low, high)
        path[-1].loops.append(loop)
        self._build(level + 1, [*path, loop], assume, body)

    def _bounds(self, axis: int, cuts: list[tuple[Conjunct, int]]) -> tuple[str, str]:
        """C names of the first and one past the last index of an axis at which all of its conditions hold."""
        name, size = f"i{axis}", self.shape[axis]
        low, high = "0", str(size)
        for condition, k in cuts:
            rest = {m: c for m, c in condition.poly.items() if m != (name,)}
            names = [n for m in rest for n in m]
            if k == 1:
                bound = c_text({m: -c for m, c in rest.items()})
                level = self.level_of((), [*names, high])
                high = self.put("int", f"t_clip({bound}, 0, {high})", level, f"end{axis}")
            else:
                bound = c_text(add(rest, {(): 1}))
                level = self.level_of((), [*names, low])
                low = self.put("int", f"t_clip({bound}, {low}, {size})", level, f"begin{axis}")
        if low != "0" and high != str(size):
            level = self.level_of((), [low, high])
            high = self.put("int", f"{high} > {low} ? {high} : {low}", level, f"end{axis}")
        return low, high

    def _end(self, axis: int, cuts: list[tuple[Conjunct, int]]) -> str:
        """C name of one past the last index at which one of several conditions that end an axis holds."""
        name, end = f"i{axis}", "0"
        for condition, _ in cuts:
            rest = {m: -c for m, c in condition.poly.items() if m != (name,)}
            level = self.level_of((), [end, *(n for m in rest for n in m)])
            end = self.put("int", f"t_clip({c_text(rest)}, {end}, {self.shape[axis]})", level, f"end{axis}")
        return end

    # ---- writing

    def statement(self, text: str) -> None:
        """A statement in the innermost loop."""
        self.path[-1].lines.append(text)

    def put(self, kind: str, text: str, level: int, base: str) -> str:
        """Name an expression at a loop level; the same expression there gets the same name."""
        loop = self.path[min(level, len(self.path) - 1)]
        if (kind, text) not in loop.names:
            name = loop.names[(kind, text)] = self.emitter.fresh(base)
            self.levels[name] = level
            loop.lines.append(
                f"const {kind} {name} = {text};" if "*" not in kind else f"{kind} {name} = {text};"
            )
        return loop.names[(kind, text)]

    def once(self, text: str, level: int) -> None:
        """A statement at a loop level, before the loops in it; the same one there is written once."""
        loop = self.path[level]
        if ("", text) not in loop.names:
            loop.names[("", text)] = ""
            loop.lines.append(text)

    def level_of(self, index: Index, parts: list[str]) -> int:
        """The outermost level where an expression over these positions and names is constant."""
        return max([self.levels.get(x, 0) for x in (*index, *parts)], default=0)

    def linear(self, shape: tuple[int, ...], index: Index) -> str:
        """Row-major position of an element of an array."""
        terms, stride = [], 1
        for n, i in zip(reversed(shape), reversed(index), strict=True):
            if i != "0":
                terms.append(i if stride == 1 else f"{i}*{stride}")
            stride *= n
        return " + ".join(reversed(terms)) or "0"

    # ---- values

    def value(self, value: Value, index: Index | None = None) -> str:
        """C text of one element of a tile (or of a scalar)."""
        if value.type.shape is None:
            return self.emitter.scalar(value)
        index = self.index if index is None else index
        index = tuple("0" if n == 1 else i for n, i in zip(value.type.shape, index, strict=True))
        if (value, index) not in self.memo:
            self.memo[(value, index)] = self._element(value, index)
        return self.memo[(value, index)]

    def stored(self, value: Value, index: Index | None = None) -> str:
        """C text of one element of a tile as memory holds it; narrow floats are neither widened nor
        rounded twice."""
        elem, op = value.type.elem, value.op
        if elem not in NARROW_FLOATS:
            return self.value(value, index)
        index = self.index if index is None else index
        if op is not None and value not in self.emitter.arrays and value.type.shape is not None:
            if (source := source_index(op, index)) is not None:
                return self.stored(op.operands[0], source)
            if op.name == "tt.load" and (len(op.operands) < 3 or is_zero(op.operands[2])):
                return self._load(op, index, raw=True)
            if op.name == "arith.truncf" and op.operands[0].type.elem == "f32":
                return to_memory(elem, self.value(op.operands[0], index))
        return to_memory(elem, self.value(value, index))

    def _element(self, value: Value, index: Index) -> str:
        emitter, kind = self.emitter, value.type
        if (array := emitter.arrays.get(value)) is not None:
            self.reads.append(Read(array.name, value, index, tile_type(kind.elem)))
            place = f"{array.name}[{self.linear(kind.shape or (), index)}]"
            text = from_memory(kind.elem, place)
            return self.put(c_type(kind.elem), text, self.level_of(index, []), value.name)
        if (moved := emitter.advanced.get(value)) is not None:
            start = self.value(moved.start, index)
            return self.put(
                c_type(kind.elem), f"{start} + {moved.offset}", self.level_of((), [start]), value.name
            )
        op = value.op
        assert op is not None, f"{value.name} is neither computed nor computable here"
        if op.name == "tt.splat":
            return emitter.scalar(op.operands[0])
        if op.name == "arith.constant":
            return literal(op)
        if op.name == "tt.make_range":
            if (first := op.attr("start")) == "0":
                return index[0]
            return self.put("int32_t", f"{index[0]} + {first}", self.level_of(index, []), value.name)
        if (source := source_index(op, index)) is not None:
            return self.value(op.operands[0], source)
        if op.name == "tt.load":
            return self._load(op, index)
        if op.name == "arith.select" and (known := self.known(op.operands[0], index)) is not None:
            return self.value(op.operands[1 if known else 2], index)
        return self._compute(op, value, index)

    def _compute(self, op: Op, value: Value, index: Index) -> str:
        if op.name == "tt.split":
            return self.value(op.operands[0], (*index, str(op.results.index(value))))
        if op.name == "tt.join":
            args = [self.value(x, index[:-1]) for x in op.operands]
            if index[-1] in ("0", "1"):
                return args[int(index[-1])]
            text: str | None = f"{index[-1]} ? {args[1]} : {args[0]}"
            level = self.level_of(index, args)
        else:
            args = [self.value(x, index) for x in op.operands]
            level = self.level_of((), args)
            if op.name == "tt.addptr" and self.emitter.affine.poly(op.operands[1], index) is None:
                args[1] = f"t_opaque({args[1]})"
            text = expression(op, args, wraps=value not in self.emitter.plan.addressing)
        if text is None:
            raise self.emitter.unsupported(op)
        return self.put(c_type(value.type.elem), text, level, value.name)

    def _load(self, op: Op, index: Index, raw: bool = False) -> str:
        kind = op.results[0].type
        mask = op.operands[1] if len(op.operands) > 1 else None
        conditions = self.emitter.affine.conjuncts(mask, index) if mask is not None else []
        if self.probing and conditions:
            self.masks.append(conditions)
        other = self._other(op, index)
        if any(self.holds(c) is False for c in conditions):
            return "0" if raw else other
        pointer = self.value(op.operands[0], index)
        self.loads.append((op, index))
        level = self.level_of((), [pointer])
        for condition in conditions:
            names = [n for m in condition.poly for n in m] if condition.terms is not None else []
            level = max(level, self.level_of((), names))
        place = self.emitter.read(op, pointer)
        text = place if raw else from_memory(kind.elem, place)
        if not all(self.holds(c) for c in conditions):
            assert mask is not None
            test = self.value(mask, index)
            text = f"{test} ? {text} : {'0' if raw else other}"
            level = max(level, self.level_of((), [test, other]))
        return self.put(MEMORY[kind.elem] if raw else c_type(kind.elem), text, level, op.results[0].name)

    def _other(self, op: Op, index: Index) -> str:
        if len(op.operands) > 2:
            return self.value(op.operands[2], index)
        return c_float(0.0, op.results[0].type.elem) if op.results[0].type.is_float else "0"

    # ---- masks

    def holds(self, condition: Conjunct) -> bool | None:
        if condition.terms is not None and all(not m for m, _ in condition.terms):
            return sum(k for _, k in condition.terms) < 0
        return self.assume.get(condition)

    def known(self, mask: Value, index: Index) -> bool | None:
        """Whether a mask is true or false everywhere in the present loop; None if it has to be tested."""
        states = [self.holds(c) for c in self.emitter.affine.conjuncts(mask, index)]
        return False if False in states else True if all(states) else None

    def guard(self, mask: Value | None) -> str | None:
        """The test that a store needs in the present loop; None if it may always store."""
        if mask is None:
            return None
        if mask.type.shape is None:
            return self.emitter.scalar(mask)
        if self.probing:
            self.store_mask = self.emitter.affine.conjuncts(mask, self.index)
        return None if self.known(mask, self.index) else self.value(mask)


def is_zero(value: Value) -> bool:
    """True for the constant 0.0, scalar or splat."""
    return value.op is not None and value.op.name == "arith.constant" and float_literal(value.op) == 0


def unit_stride_axis(emitter: "Emitter", value: Value, shape: tuple[int, ...]) -> int | None:
    """The axis along which most memory accesses behind a lazy value are contiguous."""
    votes: dict[int, int] = {}
    seen: set[tuple[Value, tuple[int | None, ...]]] = set()

    def visit(v: Value, axes: tuple[int | None, ...]) -> None:
        op = v.op
        if v.type.shape is None or op is None or v in emitter.arrays or v not in emitter.plan.lazy:
            return
        if (v, axes) in seen:
            return
        seen.add((v, axes))
        if op.name == "tt.load":
            index = tuple(f"i{d}" for d in range(len(axes)))
            poly = emitter.affine.poly(op.operands[0], index)
            for d, axis in enumerate(axes):
                if (
                    axis is not None
                    and poly is not None
                    and v.type.shape[d] > 1
                    and coefficient(poly, f"i{d}") == 1
                ):
                    votes[axis] = votes.get(axis, 0) + v.type.numel
            return
        if op.name == "tt.expand_dims":
            at = int(op.attr("axis") or 0)
            axes = axes[:at] + axes[at + 1 :]
        elif op.name == "tt.trans":
            moved: list[int | None] = [None] * len(axes)
            for position, axis in enumerate(op.ints("order")):
                moved[axis] = axes[position]
            axes = tuple(moved)
        elif op.name in ("tt.join", "tt.split", "tt.make_range", "tt.splat"):
            return
        for x in op.operands:
            visit(x, axes)

    visit(value, tuple(range(len(shape))))
    return max(votes, key=lambda d: votes[d]) if votes else None
