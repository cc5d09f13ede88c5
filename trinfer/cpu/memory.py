"""Stores, atomics and the ops that move elements through memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trinfer.cpu.affine import coefficient
from trinfer.cpu.nest import Nest
from trinfer.cpu.scalar import UNSIGNED, c_type, to_memory
from trinfer.cpu.ttir import Op, Value

if TYPE_CHECKING:
    from trinfer.cpu.emit import Emitter


def _contiguous_axis(emitter: Emitter, op: Op) -> int | None:
    """The axis along which the pointers of a store are contiguous."""
    shape = op.operands[0].type.shape or ()
    poly = emitter.affine.poly(op.operands[0], tuple(f"i{d}" for d in range(len(shape))))
    if poly is None:
        return None
    return next(
        (d for d in reversed(range(len(shape))) if shape[d] > 1 and coefficient(poly, f"i{d}") == 1), None
    )


def _store(emitter: Emitter, op: Op) -> None:
    pointer, value = op.operands[:2]
    mask = op.operands[2] if len(op.operands) > 2 else None
    elem = pointer.type.pointee
    if pointer.type.shape is None:
        guard = f"if ({emitter.scalar(mask)}) " if mask is not None else ""
        text = to_memory(elem, emitter.scalar(value))
        emitter.line(guard + emitter.write(op, emitter.scalar(pointer), text))
        return

    def body(nest: Nest) -> None:
        guard = nest.guard(mask)
        write = emitter.write(op, nest.value(pointer), nest.stored(value))
        nest.statement(f"if ({guard}) {write}" if guard else write)

    Nest(emitter, pointer.type.shape, _contiguous_axis(emitter, op)).run(body)


def _atomic_rmw(emitter: Emitter, op: Op) -> None:
    pointer, value = op.operands[:2]
    mask = op.operands[2] if len(op.operands) > 2 else None
    kind = re.search(r"\b(fadd|add|max|min|umax|umin|and|or|xor|exch)\b", op.attrs)
    assert kind, op.attrs
    elem = pointer.type.pointee
    _atomic(emitter, op, f"t_atomic_{kind[1]}_{elem}", [value], mask)


def _atomic_cas(emitter: Emitter, op: Op) -> None:
    _atomic(emitter, op, f"t_atomic_cas_{op.operands[0].type.pointee}", op.operands[1:], None)


def _atomic(emitter: Emitter, op: Op, function: str, values: list[Value], mask: Value | None) -> None:
    """One call per element, in order; the old values are kept if anything reads them."""
    pointer, result = op.operands[0], op.results[0]
    shape = pointer.type.shape
    if shape is None:
        args = ", ".join([emitter.atom(op, emitter.scalar(pointer)), *(emitter.scalar(x) for x in values)])
        name = emitter.scalars[result] = emitter.fresh(result.name)
        guard = f"{emitter.scalar(mask)} ? " if mask is not None else ""
        emitter.line(
            f"{c_type(result.type.elem)} {name} = {guard}{function}({args}){' : 0' if guard else ''};"
        )
        return
    array = emitter.new_array(result.type.elem, result.type.numel, result.name) if result.uses else None

    def body(nest: Nest) -> None:
        nest.simd = False
        guard = nest.guard(mask)
        args = [emitter.atom(op, nest.value(pointer)), *(nest.value(x) for x in values)]
        call = f"{function}({', '.join(args)})"
        keep = f"{array}[{nest.linear(shape, nest.index)}] = " if array else ""
        old = to_memory(result.type.elem, call) if array else call
        nest.statement(f"{f'if ({guard}) ' if guard else ''}{keep}{old};")

    Nest(emitter, shape).run(body)
    if array:
        emitter.own(result, array, op)


def _gather(emitter: Emitter, op: Op) -> None:
    source, places = op.operands
    axis, shape = int(op.attr("axis") or 0), source.type.shape or ()
    array = emitter.materialize(source)
    dest = emitter.new_array(op.results[0].type.elem, op.results[0].type.numel, op.results[0].name)

    def body(nest: Nest) -> None:
        at = nest.value(places)
        index = tuple(f"t_opaque({at})" if d == axis else i for d, i in enumerate(nest.index))
        target = f"{dest}[{nest.linear(places.type.shape or (), nest.index)}]"
        nest.statement(f"{target} = {array}[{nest.linear(shape, index)}];")

    Nest(emitter, places.type.shape or ()).run(body)
    emitter.own(op.results[0], dest, op)


def _cat(emitter: Emitter, op: Op) -> None:
    result = op.results[0]
    dest = emitter.new_array(result.type.elem, result.type.numel, result.name)
    emitter.fill(op.operands[0], dest)
    emitter.fill(op.operands[1], f"({dest} + {op.operands[0].type.numel})")
    emitter.own(result, dest, op)


def _histogram(emitter: Emitter, op: Op) -> None:
    source, result = op.operands[0], op.results[0]
    mask = op.operands[1] if len(op.operands) > 1 else None
    dest = emitter.new_array(result.type.elem, result.type.numel, result.name)
    emitter.line(f"memset({dest}, 0, sizeof {dest});")

    def body(nest: Nest) -> None:
        nest.simd = False
        value = nest.value(source)
        inside = f"({UNSIGNED[source.type.elem]}){value} < {result.type.numel}"
        guard = f"{nest.value(mask)} && {inside}" if mask is not None else inside
        nest.statement(f"if ({guard}) {dest}[{value}]++;")

    Nest(emitter, source.type.shape or ()).run(body)
    emitter.own(result, dest, op)


def _message(op: Op) -> str:
    """The text of a print or an assertion, without MLIR's escapes, for between the quotes of a C string."""
    found = re.search(r'"(.*?)"', op.attrs)
    text = re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), found[1] if found else "")
    return "".join(c if c.isalnum() or c in " ,.:;()[]{}<>=+-*/!_'" else f"\\{ord(c):03o}" for c in text)


def _number_format(value: Value, is_signed: bool, is_hex: bool) -> tuple[str, str]:
    """The printf format of a value, and the cast that it needs."""
    elem = value.type.elem
    if value.type.is_ptr:
        return "%p", "(void*)"
    if value.type.is_float:
        return "%g", "(double)"
    if is_hex:
        return f"0x%0{max(2, int(elem[1:]) // 4)}llx", f"(unsigned long long)({UNSIGNED[elem]})"
    return ("%lld", "(long long)") if is_signed else ("%llu", f"(unsigned long long)({UNSIGNED[elem]})")


def _print(emitter: Emitter, op: Op) -> None:
    """`tl.device_print`: a line per program and value, as on a GPU without the element positions."""
    head = f'"pid (%d, %d, %d)%s{{}}\\n", pid0, pid1, pid2, "{_message(op)}"'
    if not op.operands:
        emitter.line(f"printf({head.format('')});")
    for value, is_signed in zip(op.operands, op.ints("isSigned"), strict=True):
        form, cast = _number_format(value, bool(is_signed), op.attr("hex") == "true")
        text = f"printf({head.format(form)}, {cast}"
        if value.type.shape is None:
            emitter.line(f"{text}{emitter.scalar(value)});")
            continue

        def body(nest: Nest, text: str = text, value: Value = value) -> None:
            nest.simd = False
            nest.statement(f"{text}{nest.value(value)});")

        Nest(emitter, value.type.shape).run(body)
    # what Python prints next comes behind it
    emitter.line("fflush(stdout);")


def _assert(emitter: Emitter, op: Op) -> None:
    """`tl.device_assert` (there in kernels launched with debug=True): stop the process, as a GPU would."""
    stop = f't_assert_failed("{emitter.function.name}", "{op.line}", "{_message(op)}");'
    condition = op.operands[0]
    if condition.type.shape is None:
        emitter.line(f"if (!{emitter.scalar(condition)}) {stop}")
        return

    def body(nest: Nest) -> None:
        nest.simd = False
        nest.statement(f"if (!{nest.value(condition)}) {stop}")

    Nest(emitter, condition.type.shape).run(body)


RULES = {
    "tt.store": _store,
    "tt.atomic_rmw": _atomic_rmw,
    "tt.atomic_cas": _atomic_cas,
    "tt.gather": _gather,
    "tt.cat": _cat,
    "tt.histogram": _histogram,
    "tt.print": _print,
    "tt.assert": _assert,
}
