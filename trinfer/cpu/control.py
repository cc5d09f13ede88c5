"""Loops, branches and early returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trinfer.cpu.plan import advance_of
from trinfer.cpu.scalar import c_type, constant_of, literal
from trinfer.cpu.tile import Advanced
from trinfer.cpu.ttir import Block, Op, Value

if TYPE_CHECKING:
    from trinfer.cpu.emit import Emitter


def branches(emitter: Emitter, blocks: list[Block]) -> None:
    """The blocks of a function; more than one only if the kernel has early returns."""
    if len(blocks) == 1:
        emitter.block(blocks[0])
        return
    for block in blocks[1:]:
        for arg in block.args:
            _declare(emitter, arg, None)
    args = {block.label: block.args for block in blocks}
    for block in blocks:
        if block is not blocks[0]:
            emitter.line(f"{block.label}:;")
        for op in block.ops[:-1]:
            emitter.op(op)
        _jump(emitter, block.terminator, args)


def _jump(emitter: Emitter, op: Op, args: dict[str, list[Value]]) -> None:
    if op.name == "tt.return":
        emitter.line("return;")
        return
    targets = [(label, values, args[label]) for label, values in op.successors]
    if op.name == "cf.cond_br":
        emitter.open(f"if ({emitter.scalar(op.operands[0])}) {{")
        _assign(emitter, targets[0][1], targets[0][2])
        emitter.line(f"goto {targets[0][0]};")
        emitter.close()
        targets = targets[1:]
    elif op.name != "cf.br":
        raise emitter.unsupported(op)
    _assign(emitter, targets[0][1], targets[0][2])
    emitter.line(f"goto {targets[0][0]};")


def _declare(emitter: Emitter, value: Value, block: Block | None) -> None:
    """A C variable or array that is assigned more than once."""
    if value.type.shape is not None:
        emitter.declare(value, block)
        return
    emitter.scalars[value] = name = emitter.fresh(value.name)
    emitter.line(f"{c_type(value.type.elem)} {name};")


def _assign(emitter: Emitter, values: list[Value], targets: list[Value]) -> None:
    """targets = values, all at once: a tile that another assignment still reads is written last or
    copied first."""
    _assign_tiles(emitter, [(v, t) for v, t in zip(values, targets, strict=True) if t in emitter.arrays])
    scalars = [(v, emitter.scalars[t]) for v, t in zip(values, targets, strict=True) if t in emitter.scalars]
    if len(scalars) == 1:
        emitter.line(f"{scalars[0][1]} = {emitter.scalar(scalars[0][0])};")
        return
    named = [(emitter.fresh("next"), v, name) for v, name in scalars]
    for temporary, value, _ in named:
        emitter.line(f"const {c_type(value.type.elem)} {temporary} = {emitter.scalar(value)};")
    for temporary, _, name in named:
        emitter.line(f"{name} = {temporary};")


@dataclass(eq=False)
class _Assignment:
    """dest = value, from the array `source` or (None) by evaluating a lazy value that reads arrays."""

    value: Value
    dest: str
    source: str | None
    reads: set[str]
    reads_dest_elsewhere: bool = False

    def write(self, emitter: Emitter, dest: str) -> None:
        """Write the value to an array."""
        if self.source is None:
            emitter.fill(self.value, dest)
        else:
            emitter.line(f"memcpy({dest}, {self.source}, sizeof {dest});")


def _assignment(emitter: Emitter, value: Value, dest: str) -> _Assignment:
    if value in emitter.arrays:
        source = emitter.arrays[value].name
        return _Assignment(value, dest, source, {source})
    reads, index = emitter.reads(value)
    elsewhere = any(r.array == dest and r.index != index for r in reads)
    return _Assignment(value, dest, None, {r.array for r in reads}, elsewhere)


def _assign_tiles(emitter: Emitter, pairs: list[tuple[Value, Value]]) -> None:
    """targets = values, all at once; lazy values are evaluated while what they read holds the old tiles."""
    pending = [_assignment(emitter, value, emitter.arrays[target].name) for value, target in pairs]
    pending = [p for p in pending if p.source != p.dest]
    while pending:
        safe = [p for p in pending if not p.reads_dest_elsewhere and not _is_read(p, pending)]
        if safe:
            pending.remove(safe[0])
            safe[0].write(emitter, safe[0].dest)
            continue
        first = pending.pop(0)
        copy = emitter.new_array(first.value.type.elem, first.value.type.numel, "copy")
        first.write(emitter, copy)
        pending.append(_Assignment(first.value, first.dest, copy, {copy}))


def _is_read(assignment: _Assignment, pending: list[_Assignment]) -> bool:
    return any(assignment.dest in other.reads for other in pending if other is not assignment)


def _carry(emitter: Emitter, args: list[Value], inits: list[Value], block: Block) -> None:
    """Declare and initialise what a loop carries."""
    for arg, init in zip(args, inits, strict=True):
        if arg.type.shape is None:
            emitter.scalars[arg] = name = emitter.fresh(arg.name)
            emitter.line(f"{c_type(arg.type.elem)} {name} = {emitter.scalar(init)};")
        else:
            emitter.copy(init, emitter.declare(arg, block))


def _for(emitter: Emitter, op: Op) -> None:
    body = op.regions[0]
    moved = {
        k: by
        for k in range(len(op.results))
        if op.results[k] in emitter.plan.cheap and (by := advance_of(op, k))
    }
    for k in moved:
        offset = emitter.fresh(f"{body.args[k + 1].name}_offset")
        emitter.line(f"int64_t {offset} = 0;")
        start, step = op.operands[3 + k], _step(emitter, moved[k])
        emitter.advanced[body.args[k + 1]] = Advanced(start, offset, step)
        emitter.advanced[op.results[k]] = Advanced(start, offset)
    kept = [k for k in range(len(op.results)) if k not in moved]
    args = [body.args[k + 1] for k in kept]
    _carry(emitter, args, [op.operands[3 + k] for k in kept], body)
    emitter.scalars[body.args[0]] = i = emitter.fresh(body.args[0].name)
    low, high, step = (emitter.scalar(x) for x in op.operands[:3])
    kind = c_type(body.args[0].type.elem)
    emitter.open(f"for ({kind} {i} = {low}; {i} < {high}; {i} += {step}) {{")
    emitter.block(body)
    _assign(emitter, [body.terminator.operands[k] for k in kept], args)
    for k, by in moved.items():
        emitter.line(f"{emitter.advanced[body.args[k + 1]].offset} += {_step(emitter, by)};")
    emitter.close()
    _results(emitter, [op.results[k] for k in kept], args, op)


def _step(emitter: Emitter, by: Value) -> str | None:
    """C text of the scalar by which a tile moves; None while it is not computed."""
    assert by.op is not None
    scalar = by.op.operands[0] if by.op.operands else by
    constant = constant_of(scalar)
    return literal(constant) if constant else emitter.scalars.get(scalar)


def _results(emitter: Emitter, results: list[Value], sources: list[Value], op: Op) -> None:
    """After a loop its results are the variables that it carried."""
    for result, source in zip(results, sources, strict=True):
        if source.type.shape is None:
            emitter.scalars[result] = emitter.scalars[source]
        else:
            emitter.own(result, emitter.arrays[source].name, op)


def _if(emitter: Emitter, op: Op) -> None:
    for result in op.results:
        _declare(emitter, result, op.block)
    emitter.open(f"if ({emitter.scalar(op.operands[0])}) {{")
    for k, region in enumerate(op.regions):
        if k:
            emitter.close("} else {")
            emitter.indent += 1
        emitter.block(region)
        if op.results:
            _assign(emitter, region.terminator.operands, op.results)
    emitter.close()


def _while(emitter: Emitter, op: Op) -> None:
    before, after = op.regions
    _carry(emitter, before.args, op.operands, before)
    for arg in after.args:
        _declare(emitter, arg, after)
    emitter.open("for (;;) {")
    emitter.block(before)
    condition = before.terminator
    _assign(emitter, condition.operands[1:], after.args)
    emitter.line(f"if (!{emitter.scalar(condition.operands[0])}) break;")
    emitter.block(after)
    _assign(emitter, after.terminator.operands, before.args)
    emitter.close()
    _results(emitter, op.results, after.args, op)


RULES = {"scf.for": _for, "scf.if": _if, "scf.while": _while}
