"""Matrix products of tiles, on register blocks of the prelude (`t_dot_f32`, `t_dot_bf16`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinfer.cpu.affine import source_index
from trinfer.cpu.nest import Nest, unit_stride_axis
from trinfer.cpu.scalar import float_literal, to_memory
from trinfer.cpu.ttir import Op, Value

if TYPE_CHECKING:
    from trinfer.cpu.emit import Emitter


def _dot(emitter: Emitter, op: Op) -> None:
    a, b, c = op.operands[:3]
    shape = op.results[0].type.shape or ()
    rows, columns = shape[-2:]
    depth = (a.type.shape or ())[-1]
    elem = c.type.elem
    pairs = elem == "f32" and a.type.elem == b.type.elem == "bf16" and depth % 2 == 0
    starts_at_zero = (
        c.op is not None and c.op.name == "arith.constant" and elem == "f32" and float_literal(c.op) == 0
    )
    if pairs:
        left, right = _bf16_tile(emitter, a), _paired_rows(emitter, b)
        function = "t_dot_bf16"
        emitter.uses_tiles = True
    else:
        left, right = emitter.materialize(a), _row_major(emitter, b, op)
        function = f"t_dot_{elem}" if elem in ("f32", "f64", "i32") else "t_dot_f32"
    out = _accumulator(emitter, op, c)
    zero = int(starts_at_zero)
    if len(shape) == 2:
        emitter.line(f"{function}({left}, {right}, {out}, {rows}, {columns}, {depth}, {zero});")
        return
    emitter.open(f"for (int batch = 0; batch < {shape[0]}; batch++)")
    args = [
        f"{left} + batch*{rows * depth}",
        f"{right} + batch*{depth * columns}",
        f"{out} + batch*{rows * columns}",
    ]
    emitter.line(f"{function}({', '.join(args)}, {rows}, {columns}, {depth}, {zero});")
    emitter.indent -= 1


def _accumulator(emitter: Emitter, op: Op, c: Value) -> str:
    """The array that holds c and becomes the result: c's own if nobody else reads it."""
    result = op.results[0]
    array = emitter.arrays.get(c)
    if array is not None and array.home is op.block and emitter.plan.is_dead_after(c, op):
        emitter.own(result, array.name, op)
        return array.name
    name = emitter.new_array(result.type.elem, result.type.numel, result.name)
    if not (
        c.op is not None
        and c.op.name == "arith.constant"
        and c.type.elem == "f32"
        and float_literal(c.op) == 0
    ):
        emitter.copy(c, name)
    emitter.own(result, name, op)
    return name


def _row_major(emitter: Emitter, value: Value, op: Op) -> str:
    """A [K, N] tile as an array; one that lies transposed in memory is read along its rows, then transposed."""
    shape = value.type.shape or ()
    if value in emitter.arrays or len(shape) != 2 or value.type.elem not in ("f32", "f16", "bf16"):
        return emitter.materialize(value)
    if unit_stride_axis(emitter, value, shape) != 0 or min(shape) < 16:
        return emitter.materialize(value)
    rows = emitter.new_array(value.type.elem, value.type.numel, f"{value.name}_rows")
    Nest(emitter, shape, 0).run(
        lambda nest: nest.statement(
            f"{rows}[{nest.linear(shape[::-1], nest.index[::-1])}] = {nest.value(value)};"
        )
    )
    tile = emitter.new_array(value.type.elem, value.type.numel, value.name)
    emitter.line(f"t_transpose((uint32_t*){tile}, (const uint32_t*){rows}, {shape[1]}, {shape[0]});")
    return tile


def _is_loaded(emitter: Emitter, value: Value) -> bool:
    """True if a lazy value is a load, perhaps moved by transpositions, so that its bits can be copied as they are."""
    if value in emitter.arrays or value.op is None or value not in emitter.plan.lazy:
        return False
    if value.op.name == "tt.load":
        return True
    moves = source_index(value.op, tuple("0" for _ in value.type.shape or ())) is not None
    return moves and _is_loaded(emitter, value.op.operands[0])


def _bits(emitter: Emitter, value: Value, nest: Nest, index: tuple[str, ...]) -> str:
    """One bf16 element as the 16 bits that memory holds."""
    if _is_loaded(emitter, value):
        return nest.raw(value, index)
    return to_memory("bf16", nest.value(value, index))


def _bf16_tile(emitter: Emitter, value: Value) -> str:
    """A bf16 tile, row major, in 16 bits."""
    shape = value.type.shape or ()
    tile = emitter.new_array("bf16", value.type.numel, value.name, "t_bf16")
    Nest(emitter, shape, unit_stride_axis(emitter, value, shape)).run(
        lambda nest: nest.statement(
            f"{tile}[{nest.linear(shape, nest.index)}] = {_bits(emitter, value, nest, nest.index)};"
        )
    )
    return tile


def _paired_rows(emitter: Emitter, value: Value) -> str:
    """A [K, N] bf16 tile as [K/2, N] words of two rows each, the operand form of the bf16 dot instruction."""
    *batch, depth, columns = value.type.shape or ()
    words = emitter.new_array("i32", value.type.numel // 2, value.name)
    transposed = not batch and unit_stride_axis(emitter, value, (depth, columns)) == 0
    if transposed and columns >= 16:
        # in memory the two elements of a word are neighbours: copy rows, then transpose words
        rows = emitter.new_array("bf16", value.type.numel, f"{value.name}_rows", "t_bf16")
        Nest(emitter, (depth, columns), 0).run(
            lambda nest: nest.statement(
                f"{rows}[{nest.linear((columns, depth), nest.index[::-1])}] = {_bits(emitter, value, nest, nest.index)};"
            )
        )
        emitter.line(f"t_transpose((uint32_t*){words}, (const uint32_t*){rows}, {columns}, {depth // 2});")
        return words
    tile = _bf16_tile(emitter, value)
    count = columns * depth * (batch[0] if batch else 1)
    emitter.line(f"t_pair_rows((uint32_t*){words}, {tile}, {count // columns}, {columns});")
    return words


def _no_scaled(emitter: Emitter, op: Op) -> None:
    raise emitter.unsupported(op)


RULES = {"tt.dot": _dot, "tt.dot_scaled": _no_scaled}
