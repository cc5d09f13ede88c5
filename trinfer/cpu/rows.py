"""Products of a few rows with a tile whose columns lie in memory as rows (`t_rows_...` of tiles.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trinfer.cpu.affine import Poly, c_text, coefficient
from trinfer.cpu.nest import Nest, is_zero
from trinfer.cpu.ttir import Value

if TYPE_CHECKING:
    from trinfer.cpu.emit import Emitter

_FEW = 16
_LONG = 256
"""A sum along a row ends in additions of its lanes: shorter rows are better copied."""

_Ends = dict[str, list[Poly]]


@dataclass(frozen=True)
class Rows:
    """A [K, N] operand that stays in memory, in C: from one row there to the next, how many rows there are
    and how long they are, and how many rows the other operand has, as far as masks tell."""

    distance: str
    columns: str
    depth: str
    rows: str


def rows_in_memory(emitter: Emitter, a: Value, b: Value) -> Rows | None:
    """b as rows that a product with few rows of a reads where they lie; None if b has to be copied."""
    a_shape, b_shape, elem = a.type.shape or (), b.type.shape or (), b.type.elem
    if len(b_shape) > 2 or a_shape[0] > _FEW or b_shape[0] < _LONG or a.type.elem != elem:
        return None
    is_lazy = b not in emitter.arrays and b in emitter.plan.lazy
    if not is_lazy or b.op is None or b.op.name != "tt.load" or elem not in ("f32", "f16", "bf16"):
        return None
    place = emitter.affine.poly(b.op.operands[0], ("i0", "i1"))
    b_ends = _ends(emitter, b, ("i0", "i1"))
    a_ends = _ends(emitter, a, ("i2", "i0")) or {"i2": [], "i0": []}
    # what a holds behind the end of b is left out, so it has to be 0
    if place is None or b_ends is None or any(end not in a_ends["i0"] for end in b_ends["i0"]):
        return None
    steps = {m: k for m, k in place.items() if "i1" in m}
    if coefficient(place, "i0") != 1 or any("i0" in m or m.count("i1") > 1 for m in steps):
        return None
    return Rows(
        c_text({tuple(name for name in m if name != "i1"): k for m, k in steps.items()}),
        _first(b_ends["i1"], b_shape[1]),
        _first(b_ends["i0"], b_shape[0]),
        _first(a_ends["i2"], a_shape[0]),
    )


def rows_that_count(emitter: Emitter, tile: Value) -> str:
    """C text of how many rows of a tile, the first ones, its mask leaves: those behind them are 0."""
    shape = tile.type.shape or ()
    ends = _ends(emitter, tile, ("i0", "i1")) if len(shape) == 2 else None
    return _first(ends["i0"] if ends else [], shape[-2])


def _ends(emitter: Emitter, tile: Value, index: tuple[str, str]) -> _Ends | None:
    """For each axis the ends behind which a mask makes the tile 0; None if that is not all its mask does."""
    op = tile.op
    if op is None or op.name not in ("tt.load", "arith.select"):
        return None
    mask = op.operands[1] if op.name == "tt.load" and len(op.operands) > 1 else None
    if op.name == "arith.select":
        mask = op.operands[0]
    if mask is not None and (len(op.operands) < 3 or not is_zero(op.operands[2])):
        return None
    ends: _Ends = {name: [] for name in index}
    for condition in emitter.affine.conjuncts(mask, index) if mask is not None else []:
        poly = condition.poly if condition.terms is not None else {}
        axes = [name for name in index if coefficient(poly, name) != 0]
        if condition.terms is not None and not axes:
            # of an axis of one element the index is 0 and has no name
            axes = [name for name, size in zip(index, tile.type.shape or (), strict=True) if size == 1][:1]
            poly = {**poly, **{(name,): 1 for name in axes}}
        if len(axes) != 1 or coefficient(poly, axes[0]) != 1:
            return None
        ends[axes[0]].append({m: -k for m, k in poly.items() if m != (axes[0],)})
    return ends


def _first(ends: list[Poly], size: int) -> str:
    """C text of the first of several ends, none of them past `size`."""
    text = str(size)
    for end in ends:
        text = f"t_clip({c_text(end)}, 0, {text})"
    return text


def rows_product(emitter: Emitter, a: str, m: int, b: Value, rows: Rows, out: str, zero: int) -> None:
    """Write out = (zero ? 0 : out) + a b for the array `a` of m rows."""
    (depth, n), elem = b.type.shape or (), b.type.elem
    packed = emitter.new_array("f32", m * -(-depth // 16) * 16, f"{a}_packed")

    def body(nest: Nest) -> None:
        assert b.op is not None
        first = nest.value(b.op.operands[0], ("0", "0"))
        ends = f"{rows.rows}, {rows.columns}, {rows.depth}"
        args = f"{a}, {first}, {rows.distance}, {out}, {m}, {n}, {depth}, {ends}, {zero}"
        nest.statement(f"t_rows_{elem}({args}, (t_vector*){packed});")

    Nest(emitter, (1, 1)).run(body)
