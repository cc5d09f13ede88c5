"""What is known of a tile in the present loop without computing it: masked loads are their `other` value."""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

from trinfer.cpu.affine import Index, source_index
from trinfer.cpu.scalar import float_literal, int_literal
from trinfer.cpu.ttir import Op, Value

if TYPE_CHECKING:
    from trinfer.cpu.nest import Nest

_CASTS = (
    *("arith.extf", "arith.truncf", "arith.sitofp", "arith.uitofp"),
    *("arith.extsi", "arith.extui", "arith.trunci"),
)
_UNSIGNED = ("arith.uitofp", "arith.extui", "arith.shrui")
_FOLDS: dict[str, Callable[[float, float], float]] = {
    "arith.addf": operator.add,
    "arith.subf": operator.sub,
    "arith.mulf": operator.mul,
    "arith.addi": operator.add,
    "arith.subi": operator.sub,
    "arith.andi": lambda a, b: int(a) & int(b),
    "arith.shrui": lambda a, b: int(a) >> int(b),
}


def constant(nest: "Nest", value: Value, index: Index) -> float | None:
    """The number that every element of `value` is in the present loop; None if it has to be computed."""
    op = value.op
    if op is None:
        return None
    if op.name == "arith.constant":
        return float_literal(op) if value.type.is_float else int_literal(op)
    if op.name == "tt.load":
        conditions = nest.emitter.affine.conjuncts(op.operands[1], index) if len(op.operands) > 1 else []
        masked = any(nest.holds(c) is False for c in conditions)
        return (constant(nest, op.operands[2], index) if len(op.operands) > 2 else 0.0) if masked else None
    if op.name == "arith.select":
        known = nest.known(op.operands[0], index)
        return None if known is None else constant(nest, op.operands[1 if known else 2], index)
    if (source := source_index(op, index)) is not None:
        return constant(nest, op.operands[0], source)
    return _folded(nest, op, index) if op.name in _CASTS or op.name in _FOLDS else None


def _folded(nest: "Nest", op: Op, index: Index) -> float | None:
    """An operation on known numbers, unless it leaves the range of its type or reads a sign as a digit."""
    known = [constant(nest, x, index) for x in op.operands]
    numbers = [x for x in known if x is not None]
    if len(numbers) < len(known) or (op.name in _UNSIGNED and min(numbers) < 0):
        return None
    number = numbers[0] if op.name in _CASTS else _FOLDS[op.name](*numbers)
    kind = op.results[0].type
    return number if kind.is_float or abs(number) < 1 << (int(kind.elem[1:]) - 1) else None
