"""Reductions and scans along one axis of a tile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from trinfer.cpu.fold import constant
from trinfer.cpu.loop import LANES, Blocks, Loop
from trinfer.cpu.nest import Nest, unit_stride_axis
from trinfer.cpu.scalar import NARROW_FLOATS, UNSIGNED, c_type, expression, from_memory, literal, to_memory
from trinfer.cpu.ttir import Block, Op, Value

if TYPE_CHECKING:
    from trinfer.cpu.emit import Emitter

_SIMPLE = {
    "arith.addf": "+",
    "arith.addi": "+",
    "arith.mulf": "*",
    "arith.maxnumf": "max",
    "arith.minnumf": "min",
    "arith.maxsi": "max",
    "arith.minsi": "min",
    "arith.ori": "|",
    "arith.andi": "&",
    "arith.xori": "^",
}
"""Combine functions that OpenMP knows as reductions of a simd loop."""

_LANES = 64
"""Independent partial sums of a long row: four vectors of 16 floats."""

_BYTES = {"i8": 1, "f8E4M3FN": 1, "f8E5M2": 1, "i16": 2, "f16": 2, "bf16": 2}

_IDENTITY = {"+": 0.0, "*": 1.0, "|": 0, "&": -1, "^": 0}


def _identity(operator: str, elem: str) -> float:
    if operator in _IDENTITY:
        return _IDENTITY[operator]
    low = -math.inf if elem[0] in "bf" else -(1 << (int(elem[1:]) - 1)) if elem != "i1" else 0
    high = math.inf if elem[0] in "bf" else (1 << (int(elem[1:]) - 1)) - 1 if elem != "i1" else 1
    return low if operator == "max" else high


def _identity_text(operator: str, elem: str) -> str:
    value = _identity(operator, elem)
    if elem[0] in "bf":
        return {math.inf: "INFINITY", -math.inf: "(-INFINITY)"}.get(
            value, f"{value}{'' if elem == 'f64' else 'f'}"
        )
    return {-(1 << 63): "INT64_MIN", -(1 << 31): "INT32_MIN"}.get(int(value), str(int(value)))


def _combined(operator: str, old: str, new: str) -> str:
    if operator in ("max", "min"):
        return f"{old} {'<' if operator == 'max' else '>'} {new} ? {new} : {old}"
    return f"{old} {operator} {new}"


def _reduce(emitter: Emitter, op: Op) -> None:
    axis = int(op.attr("axis") or 0)
    body = op.regions[0]
    operator = _SIMPLE.get(body.ops[0].name) if len(body.ops) == 2 and len(op.operands) == 1 else None
    is_narrow = op.operands[0].type.elem in NARROW_FLOATS
    if operator is None or is_narrow or (op.operands[0].type.shape or ())[axis] == 1:
        _general_reduce(emitter, op, axis)
        return
    shape = op.operands[0].type.shape or ()
    preferred = unit_stride_axis(emitter, op.operands[0], shape)
    if preferred == axis or (axis == len(shape) - 1 and preferred is None) or len(shape) == 1:
        _reduce_rows(emitter, op, axis, operator)
    else:
        _reduce_columns(emitter, op, axis, operator, preferred)


def _result(emitter: Emitter, op: Op, k: int = 0) -> Callable[[Nest | None, tuple[str, ...]], str]:
    """Declare result k; gives the C place of its element at an index."""
    result = op.results[k]
    kind = c_type(result.type.elem)
    if result.type.shape is None:
        emitter.scalars[result] = name = emitter.fresh(result.name)
        emitter.line(f"{kind} {name};")
        return lambda nest, index: name
    array = emitter.new_array(result.type.elem, result.type.numel, result.name)
    emitter.own(result, array, op)
    shape = result.type.shape
    return lambda nest, index: f"{array}[{nest.linear(shape, index) if nest else index[0]}]"


def _reduce_rows(emitter: Emitter, op: Op, axis: int, operator: str) -> None:
    """The reduced axis is innermost: one accumulator per row, in vector registers."""
    value = op.operands[0]
    elem = value.type.elem
    place = _result(emitter, op)
    acc = emitter.fresh("acc")
    nest = Nest(emitter, value.type.shape or (), axis)
    own = value.type.is_float and operator in ("max", "min")
    nest.pragma += f" reduction({'t_' if own else ''}{operator}:{acc})"
    # outer loops whose accumulator has been declared
    declared: set[Loop] = set()

    is_long = operator == "+" and elem == "f32" and (value.type.shape or ())[axis] >= 2 * _LANES
    lanes = [emitter.fresh(f"{acc}_lanes") for _ in range(_LANES // LANES if is_long else 0)]

    def body(nest: Nest) -> None:
        outer = nest.path[-2]
        if outer not in declared:
            declared.add(outer)
            outer.lines.append(f"{c_type(elem)} {acc} = {_identity_text(operator, elem)};")
            rest = nest.index[:axis] + nest.index[axis + 1 :]
            outer.after.append(f"{place(nest, rest)} = {acc};")
        if constant(nest, value, nest.index) == _identity(operator, elem):
            return
        nest.loads.clear()
        text = nest.value(value)
        if lanes:
            _take_lanes(nest, axis, acc, lanes, text)
        nest.statement(f"{acc} = {_combined(operator, acc, text)};")

    nest.run(body)


def _take_lanes(nest: Nest, axis: int, acc: str, sums: list[str], text: str) -> None:
    """Sum a long row in independent lanes: the additions of neighbours need not wait for each other.

    Rows of elements of 16 bits and fewer are fetched ahead of their use: their stream is faster than the
    hardware prefetcher follows (576 columns of bf16 out of the third-level cache, one Xeon core with AVX-512:
    9 GB/s without lanes and prefetch, 27 with).
    """
    outer, loop = nest.path[-2], nest.path[-1]
    declaration = f"t_vector {', '.join(f'{name} = {{0}}' for name in sums)};"
    if declaration not in outer.lines:
        outer.lines.append(declaration)
        outer.after.insert(0, f"{acc} += t_sum({' + '.join(sums)});")
        outer.streams = 4 if nest.loads and outer.axis is not None else 1
    loop.blocks = Blocks(_prefetches(nest, axis, f"block_i{axis}"), text, tuple(sums))


def _prefetches(nest: Nest, axis: int, block: str) -> tuple[str, ...]:
    """A fetch for each cache line of the same block of a row to come, for every stream of narrow elements."""
    lines = []
    for op, index in nest.loads:
        size = _BYTES.get(op.results[0].type.elem, 8)
        rows = [i for i in index if i not in ("0", f"i{axis}")]
        if size > 2 or len(rows) != 1 or index.count(f"i{axis}") != 1 or not rows[0].startswith("i"):
            continue
        if nest.emitter.affine.poly(op.operands[0], index) is None:
            # rows at addresses out of memory: those of later rows may lie behind its end
            continue
        ahead = max(1, 2048 // (size * nest.shape[axis]))
        later = f"({rows[0]} + {ahead})"
        nest.levels[later] = nest.levels[rows[0]]
        at = tuple("0" if i == f"i{axis}" else later for i in index)
        row = nest.value(op.operands[0], at)
        step = 64 // size
        lines += [f"__builtin_prefetch({row} + {block} + {k});" for k in range(0, _LANES, step)]
    return tuple(lines)


def _reduce_columns(emitter: Emitter, op: Op, axis: int, operator: str, preferred: int | None) -> None:
    """Another axis is innermost: the accumulators are the result tile itself."""
    value = op.operands[0]
    shape, elem = value.type.shape or (), value.type.elem
    place = _result(emitter, op)
    rest_shape = op.results[0].type.shape or ()
    Nest(emitter, rest_shape).run(
        lambda nest: nest.statement(f"{place(nest, nest.index)} = {_identity_text(operator, elem)};")
    )
    others = [d for d in range(len(shape)) if d != axis and shape[d] > 1]
    inner = preferred if preferred is not None else others[-1] if others else None

    def body(nest: Nest) -> None:
        nest.simd = bool(others)
        if constant(nest, value, nest.index) == _identity(operator, elem):
            return
        target = place(nest, nest.index[:axis] + nest.index[axis + 1 :])
        nest.statement(f"{target} = {_combined(operator, target, nest.value(value))};")

    Nest(emitter, shape, inner).run(body)


def _combine(emitter: Emitter, body: Block, old: list[str], new: list[str]) -> list[str]:
    """Write the combine function of a reduction or scan; gives the C texts of its results."""
    names: dict[Value, str] = dict(zip(body.args, [*old, *new], strict=True))
    for op in body.ops[:-1]:
        result = op.results[0]
        if op.name == "arith.constant":
            names[result] = literal(op)
            continue
        args = [names[x] if x in names else emitter.scalar(x) for x in op.operands]
        text = expression(op, args, wraps=result.type.elem in UNSIGNED)
        if text is None:
            raise emitter.unsupported(op)
        names[result] = emitter.fresh(result.name)
        emitter.line(f"const {c_type(result.type.elem)} {names[result]} = {text};")
    return [names[x] if x in names else emitter.scalar(x) for x in body.terminator.operands]


def _along_axis(emitter: Emitter, op: Op, axis: int, outs: list[str], reverse: bool, keeps: bool) -> None:
    """Fold a tile along an axis with any combine function; `keeps` writes every prefix (a scan), else
    only the total."""
    shape = op.operands[0].type.shape or ()
    arrays = [emitter.materialize(x) for x in op.operands]
    before, count, behind = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    emitter.open(
        f"for (int before = 0; before < {before}; before++) for (int step = 0; step < {count}; step++) {{"
    )
    emitter.line(f"const int at = {f'{count - 1} - step' if reverse else 'step'};")
    if behind > 1:
        emitter.line("#pragma omp simd")
    emitter.open(f"for (int behind = 0; behind < {behind}; behind++) {{")
    emitter.line(f"const int from = (before*{count} + at)*{behind} + behind;")
    if keeps:
        emitter.line(f"const int to = from, last = from {'+' if reverse else '-'} {behind};")
    else:
        emitter.line(f"const int to = before*{behind} + behind, last = to;")
    emitter.open("if (step == 0) {")
    for out, array in zip(outs, arrays, strict=True):
        emitter.line(f"{out}[to] = {array}[from];")
    emitter.close("} else {")
    emitter.indent += 1
    elems = [x.type.elem for x in op.operands]
    old = [from_memory(elem, f"{out}[last]") for elem, out in zip(elems, outs, strict=True)]
    new = [from_memory(elem, f"{array}[from]") for elem, array in zip(elems, arrays, strict=True)]
    results = _combine(emitter, op.regions[0], old, new)
    held = [emitter.fresh("held") for _ in results]
    for elem, name, text in zip(elems, held, results, strict=True):
        emitter.line(f"const {c_type(elem)} {name} = {text};")
    for elem, out, name in zip(elems, outs, held, strict=True):
        emitter.line(f"{out}[to] = {to_memory(elem, name)};")
    for _ in range(3):
        emitter.close()


def _general_reduce(emitter: Emitter, op: Op, axis: int) -> None:
    outs = []
    for result in op.results:
        array = emitter.new_array(result.type.elem, max(result.type.numel, 1), result.name)
        outs.append(array)
        if result.type.shape is None:
            emitter.scalars[result] = from_memory(result.type.elem, f"{array}[0]")
        else:
            emitter.own(result, array, op)
    _along_axis(emitter, op, axis, outs, reverse=False, keeps=False)


def _scan(emitter: Emitter, op: Op) -> None:
    outs = [emitter.new_array(r.type.elem, r.type.numel, r.name) for r in op.results]
    _along_axis(emitter, op, int(op.attr("axis") or 0), outs, op.attr("reverse") == "true", keeps=True)
    for result, array in zip(op.results, outs, strict=True):
        emitter.own(result, array, op)


RULES = {"tt.reduce": _reduce, "tt.scan": _scan}
