"""Which tile values are computed where they are used, and which become arrays.

An elementwise value stays *lazy* (its expression is evaluated inside the loop nest of the op that
consumes it) when
that costs nothing (index arithmetic) or when exactly one such *sink* in the same block consumes it.
Everything
else is written to an array once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from trinfer.cpu.affine import Affine, add
from trinfer.cpu.scalar import is_elementwise
from trinfer.cpu.ttir import Block, Function, Op, Value

WRITES = {"tt.store", "tt.atomic_rmw", "tt.atomic_cas", "gpu.barrier", "ttg.barrier", "ttg.local_barrier"}
COMBINERS = ("tt.reduce", "tt.scan")
_MOVES = ("tt.expand_dims", "tt.broadcast", "tt.trans")
_LINEAR = (*_MOVES, "tt.splat", "arith.addi", "arith.subi", "arith.muli", "arith.extsi")
_FREE_FLOATS = ("tt.splat", "arith.constant", "tt.broadcast", "tt.expand_dims")


@dataclass
class Plan:
    """The decisions for one kernel."""

    lazy: set[Value] = field(default_factory=set)
    cheap: set[Value] = field(default_factory=set)
    sinks: dict[Value, list[Op]] = field(default_factory=dict)
    addressing: set[Value] = field(default_factory=set)
    advanced: dict[Value, tuple[Value, str]] = field(default_factory=dict)
    eager_loads: bool = False

    def is_dead_after(self, value: Value, op: Op) -> bool:
        """True if no op behind `op` (of the same block) reads the tile `value`, directly or through lazy
        values."""
        sinks = self.sinks.get(value, [])
        return bool(sinks) and all(s.block is op.block and s.index <= op.index for s in sinks)


def make_plan(function: Function, checked: bool) -> Plan:
    """Decide every tile value of a kernel; in a checked one every load is done where it stands, in all
    its lanes."""
    plan = Plan(eager_loads=checked)
    order = [op for block in function.blocks for op in _code(block)]
    for op in order:
        if op.name == "scf.for":
            _find_advanced(plan, op)
    for op in reversed(order):
        for value in op.results:
            _decide(plan, value, op)
    for block in function.blocks:
        _argument_sinks(plan, block)
    _find_addressing(plan, order)
    return plan


def _code(block: Block) -> Iterator[Op]:
    """The ops of a block and of its control flow, without the combine functions of reductions and scans."""
    for op in block.ops:
        yield op
        if op.name not in COMBINERS:
            for region in op.regions:
                yield from _code(region)


def advance_of(loop: Op, k: int) -> Value | None:
    """The step tile if carried tile `k` of a loop only moves by the same scalar each time: pointers,
    index tiles."""
    arg = loop.regions[0].args[k + 1]
    if arg.type.shape is None or arg.type.elem == "i1" or arg.type.is_float:
        return None
    step = loop.regions[0].terminator.operands[k].op
    if step is None or step.name not in ("tt.addptr", "arith.addi") or step.operands[0] is not arg:
        return None
    by = step.operands[1]
    if by.op is None or by.op.name not in ("tt.splat", "arith.constant"):
        return None
    return by


def _find_advanced(plan: Plan, loop: Op) -> None:
    for k, result in enumerate(loop.results):
        start, arg = loop.operands[3 + k], loop.regions[0].args[k + 1]
        if advance_of(loop, k) is not None and _is_cheap(plan, start):
            plan.cheap |= {arg, result}
            plan.lazy |= {arg, result}
            plan.advanced |= {arg: (start, f"offset {id(arg)}"), result: (start, f"offset {id(arg)}")}


def _is_cheap(plan: Plan, value: Value) -> bool:
    """Recomputing an element costs no memory access and no floating point."""
    if value.type.shape is None or value in plan.cheap:
        return True
    op = value.op
    if op is None or not is_elementwise(op) or op.name in ("tt.load", "tt.extern_elementwise"):
        return False
    if op.name.startswith("math.") or (value.type.is_float and op.name not in _FREE_FLOATS):
        return False
    if all(_is_cheap(plan, x) for x in op.operands):
        plan.cheap.add(value)
        return True
    return False


def _find_sinks(plan: Plan, value: Value, block: Block | None) -> list[Op]:
    sinks: dict[Op, None] = {}
    for user in value.uses:
        through = [r for r in user.results if r in plan.lazy and r.type.shape is not None]
        if user.block is block and through and is_elementwise(user):
            for result in user.results:
                sinks.update(dict.fromkeys(plan.sinks.get(result, [])))
        else:
            sinks[user] = None
    plan.sinks[value] = list(sinks)
    return plan.sinks[value]


def _decide(plan: Plan, value: Value, op: Op) -> None:
    if value.type.shape is None:
        return
    sinks = _find_sinks(plan, value, op.block)
    if not is_elementwise(op):
        return
    if op.name in _MOVES or _is_cheap(plan, value):
        plan.lazy.add(value)
        return
    # reading a wide element again costs what reading it from an array would
    is_wide_load = op.name == "tt.load" and value.type.elem in ("f32", "f64", "i32", "i64")
    if len(sinks) != 1 or sinks[0].block is not op.block or (_is_repeated(value) and not is_wide_load):
        return
    assert op.block is not None
    if op.name == "tt.load":
        between = op.block.ops[op.index + 1 : sinks[0].index]
        if plan.eager_loads or any(_writes(q) for q in between) or _disturbs(plan, sinks[0], op):
            return
    plan.lazy.add(value)


def _is_repeated(value: Value) -> bool:
    """True if the value is broadcast: lazy, it would be computed once per row."""
    for user in value.uses:
        if user.name == "tt.broadcast" or (user.name in _MOVES and _is_repeated(user.results[0])):
            return True
    return False


def _disturbs(plan: Plan, write: Op, load: Op) -> bool:
    """True if `write`, done element by element, may change what the load has not read yet.

    It may where both go to one tensor but not, in each step, to the same element. Two pointer arguments are
    taken for one tensor, whose strides then are the same numbers, or for two without a common byte.
    """
    if write.name not in WRITES:
        return False
    if _is_moved(load.results[0], write):
        return True
    # by identity, because names are unique within a region only
    symbols = Affine(lambda v: f"{'*' if v.type.is_ptr else ''}{id(v)}", plan.advanced.get)
    index = tuple(f"i{d}" for d in range(len(load.results[0].type.shape or ())))
    read, written = (symbols.poly(op.operands[0], index) for op in (load, write))
    if read is None or written is None:
        return True
    difference = add(read, written, -1)
    offsets = [monomial for monomial in difference if not any(name.startswith("*") for name in monomial)]
    if len(offsets) == len(difference):
        return bool(difference)
    is_stride = [len(monomial) > 1 and set(monomial).isdisjoint(index) for monomial in offsets]
    return not all(is_stride)


def _is_moved(value: Value, sink: Op) -> bool:
    """True if elements change their places on the way from a lazy value to its sink."""
    todo, seen = [value], {value}
    while todo:
        users = [user for user in todo.pop().uses if user is not sink]
        if any(user.name in (*_MOVES, "tt.join", "tt.split") for user in users):
            return True
        reached = {result for user in users for result in user.results} - seen
        seen |= reached
        todo += reached
    return False


def _writes(op: Op) -> bool:
    return op.name in WRITES or any(_writes(q) for region in op.regions for q in region.ops)


def _argument_sinks(plan: Plan, block: Block) -> None:
    for region in (r for op in block.ops if op.name not in COMBINERS for r in op.regions):
        for arg in region.args:
            if arg.type.shape is not None:
                _find_sinks(plan, arg, region)
        _argument_sinks(plan, region)


def _find_addressing(plan: Plan, order: list[Op]) -> None:
    """Integers that end in an address or a loop bound: C may assume that they do not overflow.

    Only as far back as sums and products go: what a hash feeds through a mask or a remainder does overflow.
    """
    seeds: list[Value] = []
    for op in order:
        if op.name == "tt.addptr":
            seeds.append(op.operands[1])
        elif op.name == "scf.for":
            seeds += op.operands[:3]
    while seeds:
        value = seeds.pop()
        if value in plan.addressing:
            continue
        plan.addressing.add(value)
        if value.op is not None and value.op.name in _LINEAR:
            seeds += value.op.operands
