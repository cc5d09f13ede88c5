"""From a planned kernel to C: one method or function a statement; the C follows the TTIR op by op."""

import re
from collections.abc import Callable, Collection

from trinfer.cpu import control, dot, memory, reduce
from trinfer.cpu.affine import Affine
from trinfer.cpu.nest import Nest, Read, unit_stride_axis
from trinfer.cpu.plan import Plan, make_plan
from trinfer.cpu.scalar import c_type, expression, from_memory, is_elementwise, literal, tile_type
from trinfer.cpu.sites import Checks
from trinfer.cpu.tile import Advanced, Array
from trinfer.cpu.ttir import Block, Function, Op, Value

STACK_LIMIT_BYTES = 4 << 20
"""Tiles live on the stack of a pool thread, which is 8 MiB where nothing else is configured."""

_RESERVED = re.compile(
    # keywords, and macros that gcc defines by itself
    r"auto|break|case|char|const|continue|default|do|double|else|enum|extern|float|for|goto|if|inline|int|long"
    r"|register|restrict|return|short|signed|sizeof|static|struct|switch|typedef|union|unsigned|void|volatile"
    r"|while|asm|typeof|bool|true|false|linux|unix"
    # names that the emitted code has itself
    r"|kernel|args|pid\d|grid\d|i\d*|block_i\d+|part|batch|before|behind|step|at|from|to|last|t_.*"
    r"|sqrtf?|fmaf?|fmod|memcpy|memset|printf|fflush|stdout|NAN|INFINITY"
    # what is no name in C
    r"|\d.*|"
)


class UnsupportedOpError(NotImplementedError):
    """An op of a kernel that the CPU backend has no rule for."""


class Emitter:
    """The state of writing one kernel."""

    def __init__(self, function: Function, checked: bool) -> None:
        self.function = function
        self.checks = Checks(function) if checked else None
        self.plan: Plan = make_plan(function, checked)
        self.lines: list[str] = []
        self.indent = 1
        # a variable must not hide a C function that the kernel calls
        self.counters: dict[str, int] = dict.fromkeys(function.symbols(), 1)
        self.scalars: dict[Value, str] = {}
        self.arrays: dict[Value, Array] = {}
        self.advanced: dict[Value, Advanced] = {}
        self.affine = Affine(self.scalars.get, self._moved)
        self.stack_bytes = 0
        self.uses_tiles = False

    def _moved(self, value: Value) -> tuple[Value, str] | None:
        moved = self.advanced.get(value)
        return (moved.start, moved.offset) if moved else None

    # ---- text

    def line(self, text: str) -> None:
        """Append a line of C."""
        self.lines.append("  " * self.indent + text)

    def open(self, text: str) -> None:
        """Append a line that opens a block."""
        self.line(text)
        self.indent += 1

    def close(self, text: str = "}") -> None:
        """Append the line that closes a block."""
        self.indent -= 1
        self.line(text)

    def fresh(self, base: str) -> str:
        """A C name after an SSA name, unique in the kernel."""
        base = re.sub(r"\W", "_", base.lstrip("%"))
        if _RESERVED.fullmatch(base):
            base = f"v{base}"
        count, name = self.counters.get(base, 0), base
        while name in self.counters:
            count += 1
            name = f"{base}_{count}"
        self.counters[base] = max(count, 1)
        self.counters.setdefault(name, 1)
        return name

    def unsupported(self, op: Op) -> UnsupportedOpError:
        """The error for an op without a rule."""
        return UnsupportedOpError(
            f"kernel {self.function.name}, {op.line}: {op.name} is not supported by the CPU backend; "
            "write the line with other Triton ops, or run this kernel on a GPU"
        )

    # ---- values

    def scalar(self, value: Value) -> str:
        """C text of a scalar that has been computed."""
        if value not in self.scalars and value.op is not None and value.op.name == "arith.constant":
            return literal(value.op)
        return self.scalars[value]

    def read(self, op: Op, text: str) -> str:
        """The C expression of what a pointer points to."""
        return f"T_READ({self.checks.site(op)}, {text})" if self.checks else f"*{text}"

    def write(self, op: Op, text: str, value: str) -> str:
        """The C statement that stores through a pointer."""
        return f"T_WRITE({self.checks.site(op)}, {text}, {value});" if self.checks else f"*{text} = {value};"

    def atom(self, op: Op, text: str) -> str:
        """The C pointer of an atomic update."""
        return self.checks.atom(op, text) if self.checks else text

    def own(self, value: Value, array: str, op: Op) -> None:
        """Record the array that an op has filled with its result."""
        self.arrays[value] = Array(array, op.block)

    def declare(self, value: Value, block: Block | None) -> str:
        """Declare the array of a tile value."""
        name = self.new_array(value.type.elem, value.type.numel, value.name)
        self.arrays[value] = Array(name, block)
        return name

    def new_array(self, elem: str, count: int, base: str, kind: str = "") -> str:
        """Declare a C array that no value owns."""
        name, kind = self.fresh(base), kind or tile_type(elem)
        self.stack_bytes += count * (8 if kind in ("int64_t", "double") or "*" in kind else 4)
        if self.stack_bytes > STACK_LIMIT_BYTES:
            raise ValueError(
                f"kernel {self.function.name}: its tiles take over {STACK_LIMIT_BYTES >> 20} MiB of stack "
                "on a CPU; launch it with smaller block sizes"
            )
        self.line(f"{kind} {name}[{count}] T_ALIGNED;")
        return name

    def materialize(self, value: Value, at: Op | None = None, kept: Collection[str] = ()) -> str:
        """The name of an array that holds a tile; a lazy one is written now, if possible over a tile
        that `at` ends, but not over the arrays `kept`."""
        if value in self.arrays:
            return self.arrays[value].name
        dest = self._in_place(value, at, kept) if at is not None else None
        dest = dest or self.new_array(value.type.elem, value.type.numel, value.name)
        self.fill(value, dest)
        return dest

    def copy(self, value: Value, dest: str) -> None:
        """Write a tile to the array `dest`."""
        if value not in self.arrays:
            self.fill(value, dest)
        elif self.arrays[value].name != dest:
            self.line(f"memcpy({dest}, {self.arrays[value].name}, sizeof {dest});")

    def fill(self, value: Value, target: str) -> None:
        """Write every element of a tile to an array."""
        shape = value.type.shape or ()
        Nest(self, shape, unit_stride_axis(self, value, shape)).run(
            lambda nest: nest.statement(f"{target}[{nest.linear(shape, nest.index)}] = {nest.stored(value)};")
        )

    def reads(self, value: Value) -> tuple[list[Read], tuple[str, ...]]:
        """The arrays that evaluating a lazy tile reads, and the index at which it writes."""
        nest = Nest(self, value.type.shape or ())
        nest.probe(lambda nest: nest.statement(nest.stored(value)))
        return nest.reads, nest.index

    def _in_place(self, value: Value, at: Op, kept: Collection[str] = ()) -> str | None:
        reads, index = self.reads(value)
        for read in reads:
            array = self.arrays[read.owner]
            if array.home is not at.block or array.name in kept:
                continue
            if read.c_type != tile_type(value.type.elem):
                continue
            owners = [v for v, a in self.arrays.items() if a.name == array.name]
            same = all(r.index == index for r in reads if r.array == array.name)
            if same and all(self.plan.is_dead_after(v, at) for v in owners):
                return array.name
        return None

    # ---- ops

    def block(self, block: Block) -> None:
        """All ops of a block but its terminator, which the op around it writes."""
        for op in block.ops:
            self.op(op)

    def op(self, op: Op) -> None:
        """Write one op."""
        if (rule := RULES.get(op.name)) is not None:
            rule(self, op)
        elif not is_elementwise(op):
            raise self.unsupported(op)
        elif op.results[0].type.shape is None:
            self._scalar_op(op)
        else:
            for result in op.results:
                if result not in self.plan.lazy:
                    self._tile_op(op, result)

    def _tile_op(self, op: Op, result: Value) -> None:
        dest = self._in_place(result, op) or self.new_array(result.type.elem, result.type.numel, result.name)
        self.fill(result, dest)
        self.own(result, dest, op)

    def _scalar_op(self, op: Op) -> None:
        result = op.results[0]
        if op.name == "arith.constant":
            self.scalars[result] = literal(op)
            return
        args = [self.scalar(x) for x in op.operands]
        elem = result.type.elem
        if op.name == "tt.load":
            text: str | None = from_memory(elem, self.read(op, args[0]))
            if len(args) > 1:
                text = f"{args[1]} ? {text} : {args[2] if len(args) > 2 else '0'}"
        else:
            text = expression(op, args, wraps=result not in self.plan.addressing)
        if text is None:
            raise self.unsupported(op)
        self.scalars[result] = name = self.fresh(result.name)
        self.line(f"{'' if result.type.is_ptr else 'const '}{c_type(elem)} {name} = {text};")


def _program_id(emitter: Emitter, op: Op) -> None:
    axis = re.search(r"\b([xyz])\b", op.attrs)
    assert axis
    kind = "pid" if op.name == "tt.get_program_id" else "grid"
    emitter.scalars[op.results[0]] = f"{kind}{'xyz'.index(axis[1])}"


def _reshape(emitter: Emitter, op: Op) -> None:
    source = op.operands[0]
    name = emitter.materialize(source, at=op)
    if source in emitter.arrays:
        # two values share the array from here on, so neither may overwrite it
        emitter.arrays[source].home = None
    emitter.arrays[op.results[0]] = emitter.arrays.get(source) or Array(name, op.block)


def _unsplat(emitter: Emitter, op: Op) -> None:
    array, result = emitter.materialize(op.operands[0], at=op), op.results[0]
    # a variable, because the array may be written over before the scalar is used
    emitter.scalars[result] = name = emitter.fresh(result.name)
    elem = result.type.elem
    emitter.line(f"{c_type(elem)} {name} = {from_memory(elem, f'{array}[0]')};")


def _nothing(emitter: Emitter, op: Op) -> None:
    """Ops without effect here: terminators, barriers (a program is one thread), hints."""


RULES: dict[str, Callable[[Emitter, Op], None]] = {
    **dict.fromkeys(("tt.get_program_id", "tt.get_num_programs"), _program_id),
    **dict.fromkeys(("tt.return", "scf.yield", "scf.condition", "llvm.intr.assume", "ub.poison"), _nothing),
    **dict.fromkeys(("gpu.barrier", "ttg.barrier", "ttg.local_barrier"), _nothing),
    "tt.reshape": _reshape,
    "tt.unsplat": _unsplat,
    **memory.RULES,
    **control.RULES,
    **reduce.RULES,
    **dot.RULES,
}


def _is_number(declaration: str) -> bool:
    return "*" not in declaration


def to_c(function: Function, checked: bool = False) -> tuple[str, list[tuple[int, str, str]]]:
    """The C source of a kernel: `programs(args, begin, end)` runs programs begin..end-1 of its grid.

    `checked`: every access goes through the sanitizer (check.py); the second result are the outputs that
    it watches.
    """
    emitter = Emitter(function, checked)
    for arg in function.args:
        emitter.scalars[arg] = emitter.fresh(arg.name)
    names = [emitter.scalars[arg] for arg in function.args]
    signature = [f"{c_type(a.type.elem)} {n}" for a, n in zip(function.args, names, strict=True)]
    # the pointers first, as the launcher packs them
    fields = ["int32_t grid0, grid1, grid2;", *(f"{text};" for text in sorted(signature, key=_is_number))]
    control.branches(emitter, function.blocks)
    checks = emitter.checks
    grid = "int32_t pid0, int32_t pid1, int32_t pid2, int32_t grid0, int32_t grid1, int32_t grid2"
    call = ["i % a->grid0", "i / a->grid0 % a->grid1", "i / ((int64_t)a->grid0 * a->grid1)"]
    call += [f"a->{n}" for n in ("grid0", "grid1", "grid2", *names)]
    text = "\n".join(
        [
            f"/* {function.name}, {function.line} */",
            '#include "prelude.h"',
            *(['#include "tiles.h"'] if any(op.name == "tt.dot" for op in function.ops()) else []),
            "",
            *(['#include "check.h"', "", *checks.table()] if checks else []),
            f"static void kernel({', '.join([grid, *signature])})",
            "{",
            *emitter.lines,
            "}",
            "",
            f"struct args {{ {' '.join(fields)} }};",
            "",
            "void programs(const struct args* a, int64_t begin, int64_t end)",
            "{",
            *(["  t_tiles_begin();"] if emitter.uses_tiles else []),
            "  for (int64_t i = begin; i < end; i++) {",
            *(["    t_check_program(i);"] if checks else []),
            f"    kernel({', '.join(call)});",
            "  }",
            *(["  t_tiles_end();"] if emitter.uses_tiles else []),
            "}",
            "",
        ]
    )
    return text, checks.outputs() if checks else []
