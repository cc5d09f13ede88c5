"""Index arithmetic as polynomials: how a pointer or a mask moves along each axis of a loop nest.

A polynomial maps a monomial (a sorted tuple of C names) to its integer coefficient, so `row * stride + i1` is
`{("row", "stride"): 1, ("i1",): 1}`. It answers the three questions of the code generator: is an access
contiguous along an axis, does a mask cut an axis at a bound that can be computed before the loop, and are two
masks the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

from trinfer.cpu.scalar import int_literal, literal
from trinfer.cpu.ttir import Op, Type, Value

Poly = dict[tuple[str, ...], int]
Index = tuple[str, ...]


def add(a: Poly, b: Poly, sign: int = 1) -> Poly:
    """a + sign * b"""
    total = dict(a)
    for monomial, k in b.items():
        total[monomial] = total.get(monomial, 0) + sign * k
    return {m: k for m, k in total.items() if k}


def multiply(a: Poly, b: Poly) -> Poly:
    """a * b"""
    product: Poly = {}
    for m, j in a.items():
        for n, k in b.items():
            product = add(product, {tuple(sorted(m + n)): j * k})
    return product


def coefficient(poly: Poly, name: str) -> int | None:
    """k if the polynomial is `k * name + (rest without name)`, None if `name` is scaled by something
    symbolic."""
    k = poly.get((name,), 0)
    return None if any(name in m and m != (name,) for m in poly) else k


def c_text(poly: Poly) -> str:
    """The polynomial in C, in 64-bit arithmetic."""
    terms = []
    for monomial, k in sorted(poly.items()):
        factors = [f"(int64_t){name}" for name in monomial]
        terms.append("*".join(factors if k == 1 and factors else [f"(int64_t){k}", *factors]))
    return " + ".join(terms) or "0"


@dataclass(frozen=True)
class Conjunct:
    """One condition `poly < 0` of a mask, or (poly None) a condition that is not affine, named by its
    value."""

    terms: frozenset[tuple[tuple[str, ...], int]] | None
    opaque: tuple[int, Index] | None = None

    @property
    def poly(self) -> Poly:
        assert self.terms is not None
        return dict(self.terms)


class Affine:
    """Reads polynomials off SSA values; `name_of` gives the C text of scalars and, for tiles, what is
    known of them."""

    def __init__(
        self, name_of: Callable[[Value], object], advanced: Callable[[Value], tuple[Value, str] | None]
    ) -> None:
        self.name_of = name_of
        self.advanced = advanced

    def poly(self, value: Value, index: Index) -> Poly | None:
        """The polynomial of an integer or pointer at a position of its tile; None if it is not one."""
        if value.type.shape is not None and (moved := self.advanced(value)):
            start, offset = moved
            first = self.poly(start, index)
            return None if first is None else add(first, {(offset,): 1})
        op = value.op
        if op is not None and op.name == "arith.constant" and not value.type.is_float:
            return {(): k} if (k := int_literal(op)) else {}
        if op is not None:
            known, result = self._through(op, value.type, index)
            if known:
                return result
        if value.type.shape is None:
            name = self.name_of(value)
            return {(name,): 1} if isinstance(name, str) else None
        return None

    def _through(self, op: Op, kind: Type, index: Index) -> tuple[bool, Poly | None]:
        if op.name in ("arith.addi", "tt.addptr", "arith.subi", "arith.muli"):
            a, b = (self.poly(x, index) for x in op.operands)
            if a is None or b is None:
                return kind.shape is not None, None
            if op.name == "arith.muli":
                return True, multiply(a, b)
            return True, add(a, b, -1 if op.name == "arith.subi" else 1)
        if op.name == "arith.extsi":
            return True, self.poly(op.operands[0], index)
        if kind.shape is None:
            return False, None
        if op.name == "tt.splat":
            return True, self.poly(op.operands[0], ())
        if op.name == "tt.make_range":
            start = int(op.attr("start") or 0)
            return True, add({(index[0],): 1} if index[0] != "0" else {}, {(): start} if start else {})
        if (source := source_index(op, index)) is not None:
            return True, self.poly(op.operands[0], source)
        return True, None

    def conjuncts(self, mask: Value, index: Index) -> list[Conjunct]:
        """The conditions whose AND is the mask."""
        op = mask.op
        if op is not None and op.name == "arith.andi":
            return self.conjuncts(op.operands[0], index) + self.conjuncts(op.operands[1], index)
        if op is not None and mask.type.shape is not None:
            if (source := source_index(op, index)) is not None:
                return self.conjuncts(op.operands[0], source)
            if op.name == "tt.splat":
                return self.conjuncts(op.operands[0], ())
        if op is not None and op.name == "arith.constant":
            return [] if literal(op) == "1" else [Conjunct(None, (id(mask), index))]
        if (
            op is not None
            and op.name == "arith.cmpi"
            and (poly := self._less_than_zero(op, index)) is not None
        ):
            return [Conjunct(frozenset(poly.items()))]
        return [Conjunct(None, (id(mask), index))]

    def _less_than_zero(self, op: Op, index: Index) -> Poly | None:
        a, b = (self.poly(x, index) for x in op.operands)
        predicate = next((p for p in ("slt", "sle", "sgt", "sge") if f" {p}" in f" {op.attrs}"), None)
        if a is None or b is None or predicate is None:
            return None
        less = add(a, b, -1) if predicate[1] == "l" else add(b, a, -1)
        return less if predicate[2] == "t" else add(less, {(): -1})


def source_index(op: Op, index: Index) -> Index | None:
    """Where an op that only moves elements reads its operand for `index` of its result; None for other
    ops."""
    if op.name == "tt.expand_dims":
        axis = int(op.attr("axis") or 0)
        return index[:axis] + index[axis + 1 :]
    if op.name == "tt.broadcast":
        shape = op.operands[0].type.shape or ()
        return tuple("0" if n == 1 else i for n, i in zip(shape, index, strict=True))
    if op.name == "tt.trans":
        order = op.ints("order")
        source = ["0"] * len(order)
        for position, axis in enumerate(order):
            source[axis] = index[position]
        return tuple(source)
    return None
