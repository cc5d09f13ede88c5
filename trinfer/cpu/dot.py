"""Matrix products of tiles, on the register blocks of tiles.h (`t_dot_f32`, `t_dot_bf16`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinfer.cpu.nest import Nest, is_zero, unit_stride_axis
from trinfer.cpu.rows import rows_in_memory, rows_product, rows_that_count
from trinfer.cpu.scalar import NARROW_FLOATS, constant_of, int_literal, to_memory
from trinfer.cpu.ttir import Op, Value

if TYPE_CHECKING:
    from trinfer.cpu.emit import Emitter


def _dot(emitter: Emitter, op: Op) -> None:
    a, b, c = op.operands[:3]
    shape = op.results[0].type.shape or ()
    rows, columns = shape[-2:]
    depth = (a.type.shape or ())[-1]
    elem = c.type.elem
    zero = int(_starts_at_zero(c))
    if elem == "f32" and (in_memory := rows_in_memory(emitter, a, b)) is not None:
        left = emitter.materialize(a)
        out = _accumulator(emitter, op, bool(zero), (left,))
        rows_product(emitter, left, rows, b, in_memory, out, zero)
        return
    if elem == "f32" and a.type.elem == b.type.elem == "bf16" and depth % 2 == 0:
        function, left, right = "t_dot_bf16", emitter.materialize(a), _paired_rows(emitter, b)
        emitter.uses_tiles = True
    elif elem in NARROW_FLOATS or elem == "f32":
        function, left, right = "t_dot_f32", _f32_tile(emitter, a), _f32_tile(emitter, b)
    else:
        function, left, right = f"t_dot_{elem}", emitter.materialize(a), emitter.materialize(b)
    out = _accumulator(emitter, op, bool(zero), (left, right))
    if len(shape) == 2:
        present = _rows_to_multiply(emitter, a, out, columns, zero)
        emitter.line(f"{function}({left}, {right}, {out}, {present}, {columns}, {depth}, {zero});")
    else:
        emitter.open(f"for (int batch = 0; batch < {shape[0]}; batch++)")
        sizes = (rows * depth, depth * columns // (2 if function == "t_dot_bf16" else 1), rows * columns)
        args = ", ".join(f"{x} + batch*{n}" for x, n in zip((left, right, out), sizes, strict=True))
        emitter.line(f"{function}({args}, {rows}, {columns}, {depth}, {zero});")
        emitter.indent -= 1
    if elem in NARROW_FLOATS:
        _narrow(emitter, op, out)


def _rows_to_multiply(emitter: Emitter, a: Value, out: str, columns: int, zero: int) -> str:
    """C text of how many rows the product is given; those that a mask left out stay as they are."""
    rows = (a.type.shape or ())[0]
    present = rows_that_count(emitter, a)
    if present == str(rows):
        return present
    name = emitter.fresh("rows")
    emitter.line(f"const int {name} = {present};")
    if zero:
        emitter.line(f"memset({out} + {name}*{columns}, 0, sizeof *{out} * ({rows} - {name})*{columns});")
    return name


def _starts_at_zero(c: Value) -> bool:
    constant = constant_of(c)
    return constant is not None and (is_zero(c) if c.type.is_float else int_literal(constant) == 0)


def _accumulator(emitter: Emitter, op: Op, starts_at_zero: bool, factors: tuple[str, ...]) -> str:
    """The array that holds c and becomes the result: c's own if nobody else reads it."""
    c, result = op.operands[2], op.results[0]
    if result.type.elem in NARROW_FLOATS:
        # a product in 16 bits is summed in float and rounded once, as tensor cores do
        name = emitter.new_array("f32", result.type.numel, result.name)
        if not starts_at_zero:
            _fill_f32(emitter, c, name, None)
        return name
    array = emitter.arrays.get(c)
    if array is not None:
        is_free = array.home is op.block and emitter.plan.is_dead_after(c, op)
        if is_free and array.name not in factors:
            emitter.own(result, array.name, op)
            return array.name
    elif not starts_at_zero:
        name = emitter.materialize(c, at=op, kept=factors)
        emitter.own(result, name, op)
        return name
    name = emitter.new_array(result.type.elem, result.type.numel, result.name)
    if not starts_at_zero:
        emitter.copy(c, name)
    emitter.own(result, name, op)
    return name


def _narrow(emitter: Emitter, op: Op, sums: str) -> None:
    """Round the float sums of a product to the type of its result."""
    result = op.results[0]
    array = emitter.new_array(result.type.elem, result.type.numel, result.name)
    text = to_memory(result.type.elem, f"{sums}[i]")
    emitter.line(f"for (int i = 0; i < {result.type.numel}; i++) {array}[i] = {text};")
    emitter.own(result, array, op)


def _fill_f32(emitter: Emitter, value: Value, array: str, inner: int | None) -> None:
    """Write a tile as floats; with `inner` 0 a [K, N] tile is read along its columns and written as [N,
    K]."""
    shape = value.type.shape or ()
    turned = inner == 0 and len(shape) == 2

    def body(nest: Nest) -> None:
        at = nest.linear(shape[::-1], nest.index[::-1]) if turned else nest.linear(shape, nest.index)
        nest.statement(f"{array}[{at}] = {nest.value(value)};")
        if turned:
            _fetch_ahead(nest, value)

    Nest(emitter, shape, inner).run(body)


def _f32_tile(emitter: Emitter, value: Value) -> str:
    """A tile as row-major floats; one that lies transposed in memory is read along its rows, then
    transposed."""
    shape = value.type.shape or ()
    if value in emitter.arrays and value.type.elem == "f32":
        return emitter.arrays[value].name
    inner = unit_stride_axis(emitter, value, shape)
    tile = emitter.new_array("f32", value.type.numel, value.name)
    if len(shape) == 2 and inner == 0 and min(shape) >= 16:
        rows = emitter.new_array("f32", value.type.numel, f"{value.name}_rows")
        _fill_f32(emitter, value, rows, 0)
        emitter.line(f"t_transpose((uint32_t*){tile}, (const uint32_t*){rows}, {shape[1]}, {shape[0]});")
    else:
        _fill_f32(emitter, value, tile, inner if inner != 0 else None)
    return tile


def _paired_rows(emitter: Emitter, value: Value) -> str:
    """A [K, N] bf16 tile as [K/2, N] words of two rows each, the operand form of the bf16 dot instruction."""
    *batch, depth, columns = value.type.shape or ()
    words = emitter.new_array("i32", value.type.numel // 2, value.name)
    is_turned = not batch and unit_stride_axis(emitter, value, (depth, columns)) == 0
    if value in emitter.arrays or not is_turned or columns < 16:
        tile = emitter.materialize(value)
        rows = value.type.numel // columns
        emitter.line(f"t_pair_rows((uint32_t*){words}, {tile}, {rows}, {columns});")
        return words
    # in memory the two elements of a word are neighbours: copy rows, then transpose words
    turned = emitter.new_array("bf16", value.type.numel, f"{value.name}_rows")

    def body(nest: Nest) -> None:
        at = nest.linear((columns, depth), nest.index[::-1])
        nest.statement(f"{turned}[{at}] = {nest.stored(value)};")
        _fetch_ahead(nest, value)

    Nest(emitter, (depth, columns), 0).run(body)
    emitter.line(f"t_transpose((uint32_t*){words}, (const uint32_t*){turned}, {columns}, {depth // 2});")
    return words


def _fetch_ahead(nest: Nest, value: Value) -> None:
    """Ask for what the next step of a loop reads of the row in memory that a [K, N] tile has as a column.

    The rows of a tile are too short for the CPU to see them coming: 128 x 576 x 576 bfloat16 products of cold
    weights take 1.12 times as long without.
    """
    op = value.op
    if op is None or op.name != "tt.load" or op.operands[0] not in nest.emitter.advanced:
        return
    step = nest.emitter.advanced[op.operands[0]].step
    if step is None or len(op.operands) > 1 and nest.known(op.operands[1], nest.index) is False:
        return
    first, level = nest.value(op.operands[0], ("0", nest.index[1])), nest.level_of(nest.index[1:], [])
    nest.once(f"T_FETCH({first} + {step}, {(value.type.shape or ())[0]})", level)


def _no_scaled(emitter: Emitter, op: Op) -> None:
    raise emitter.unsupported(op)


RULES = {"tt.dot": _dot, "tt.dot_scaled": _no_scaled}
