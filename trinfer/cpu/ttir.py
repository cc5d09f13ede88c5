"""TTIR as Python objects, read from the text that Triton prints (the same form in Triton 3.6 to 3.9)."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Type:
    """A scalar (`shape` None) or a tensor of `elem`: i1..i64, f16, bf16, f32, f64, f8..., `ptr<...>`."""

    shape: tuple[int, ...] | None
    elem: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape or ())

    @property
    def is_ptr(self) -> bool:
        return self.elem.startswith("ptr<")

    @property
    def pointee(self) -> str:
        return self.elem[4:-1]

    @property
    def is_float(self) -> bool:
        return self.elem[0] in "bf"


@dataclass(eq=False)
class Value:
    """An SSA value: its printed name, its type, the op that makes it (None: an argument) and the ops
    that use it."""

    name: str
    type: Type
    op: "Op | None" = None
    uses: list["Op"] = field(default_factory=list)


@dataclass(eq=False)
class Op:
    """One operation; `attrs` is the printed text with the operands taken out, `line` its source line."""

    name: str
    operands: list[Value]
    attrs: str
    line: str
    types: str = ""
    results: list[Value] = field(default_factory=list)
    regions: list["Block"] = field(default_factory=list)
    successors: list[tuple[str, list[Value]]] = field(default_factory=list)
    block: "Block | None" = None
    index: int = 0

    def attr(self, key: str) -> str | None:
        """Value of `key = value` in the printed attributes."""
        found = re.search(rf"\b{key} = (-?\w+)", self.attrs)
        return found[1] if found else None

    def ints(self, key: str) -> list[int]:
        """Value of `key = array<i32: 1, 0>`."""
        found = re.search(rf"\b{key} = array<i\d+(?:: (.*?))?>", self.attrs)
        assert found, f"{self.name} has no attribute {key}"
        return [int(x) for x in (found[1] or "").split(",") if x]


@dataclass(eq=False)
class Block:
    """A list of ops with arguments; `label` is set for the blocks of a function with early returns."""

    args: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    label: str = "bb0"
    parent: Op | None = None

    @property
    def terminator(self) -> Op:
        return self.ops[-1]


@dataclass(eq=False)
class Function:
    """The kernel: its name, arguments and blocks (the first is the entry)."""

    name: str
    args: list[Value]
    blocks: list[Block]
    line: str

    def ops(self) -> Iterator[Op]:
        """All ops in printed order, those of nested regions behind the op that holds them."""
        for block in self.blocks:
            yield from _nested(block)

    def symbols(self) -> set[str]:
        """The C functions that the kernel calls by name."""
        return {found[1] for op in self.ops() if (found := re.search(r'\bsymbol = "(\w+)"', op.attrs))}


def _nested(block: Block) -> Iterator[Op]:
    for op in block.ops:
        yield op
        for region in op.regions:
            yield from _nested(region)


def parse_type(text: str) -> Type:
    """`tensor<16x64x!tt.ptr<bf16>>` -> Type((16, 64), "ptr<bf16>")."""
    text = text.strip()
    if text.startswith("tensor<"):
        tensor = re.match(r"tensor<((?:\d+x)*)(.*)>$", text)
        assert tensor, text
        return Type(tuple(int(x) for x in tensor[1].split("x")[:-1]), parse_type(tensor[2]).elem)
    if text.startswith("!tt.ptr<"):
        pointer = re.match(r"!tt\.ptr<(.*?)(?:, \d+)?>$", text)
        assert pointer, text
        return Type(None, f"ptr<{parse_type(pointer[1]).elem}>")
    return Type(None, text)


def split_top(text: str, separator: str = ",") -> list[str]:
    """Split at separators that stand outside all brackets and quotes."""
    parts, depth, start, quoted = [], 0, 0, False
    for i, c in enumerate(text):
        quoted ^= c == '"'
        if quoted:
            continue
        if c in "<([{":
            depth += 1
        elif c in ")]}" or (c == ">" and text[i - 1] != "-"):
            depth -= 1
        elif depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i])
            start = i + len(separator)
    parts.append(text[start:])
    return [p.strip() for p in parts if p.strip()]


class Locations:
    """The `#loc` table at the end of the text; finds the line a person wrote."""

    _loc = re.compile(r' loc\(((?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*")*\))*\))*)\)')

    def __init__(self, text: str) -> None:
        self.table = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.M))

    def split(self, line: str) -> tuple[str, str]:
        """A printed line -> (the line without locations, the source line of its op)."""
        found = self._loc.findall(line)
        frames = self._frames(found[-1]) if found else []
        own = [f for f in frames if "triton/language" not in f] or frames
        return self._loc.sub("", line).strip(), own[0] if own else "?"

    def names(self, line: str) -> list[str | None]:
        """For each location of a printed line, the name that its value was given first."""
        return [self._name(body) for body in self._loc.findall(line)]

    def _name(self, body: str) -> str | None:
        named = re.match(r'"([^"]*)"\((.*)\)$', self.table.get(body, body))
        return named and (self._name(named[2]) or named[1])

    def _frames(self, body: str) -> list[str]:
        """Locations from the innermost call outwards, as `file:line`."""
        if place := re.match(r'"(.*)":(\d+):\d+$', body):
            return [f"{place[1]}:{place[2]}"]
        if named := re.match(r'"[^"]*"\((.*)\)$', body):
            return self._frames(named[1])
        if call := re.match(r"callsite\((.*) at (.*)\)$", body):
            return self._frames(call[1]) + self._frames(call[2])
        return self._frames(self.table[body]) if body in self.table else []


_NAME = r"%[\w$.-]+(?:#\d+)?"


class Parser:
    """Recursive descent over the printed lines; SSA names are only unique per region, so they are scoped."""

    def __init__(self, text: str) -> None:
        self.locations = Locations(text)
        self.lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#loc")]
        self.at = 0
        self.scopes: list[dict[str, Value]] = [{}]

    def function(self) -> Function:
        """The public function of the module."""
        while "tt.func public" not in self.lines[self.at]:
            self.at += 1
        raw = self.lines[self.at]
        line, place = self.locations.split(raw)
        self.at += 1
        head = re.match(r"tt\.func public @([\w$.]+)\((.*)\)(?:\s*attributes.*)?\s*\{$", line)
        assert head, line
        args = [self.argument(re.sub(r"\s*\{.*?\}$", "", a)) for a in split_top(head[2])]
        # an argument is printed with the name of the variable that it was last assigned to
        for arg, name in zip(args, self.locations.names(raw), strict=False):
            arg.name = f"%{name}" if name else arg.name
        entry = Block(args)
        return Function(head[1], args, self.blocks(entry)[0], place)

    def argument(self, text: str) -> Value:
        name, kind = text.split(":", 1)
        return self.define(name.strip(), parse_type(kind))

    def define(self, name: str, kind: Type, op: Op | None = None) -> Value:
        self.scopes[-1][name] = value = Value(name, kind, op)
        return value

    def use(self, name: str) -> Value:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise KeyError(name)

    def blocks(self, first: Block) -> tuple[list[Block], str]:
        """Blocks up to the closing brace, and the line that closes them."""
        blocks = [first]
        while True:
            raw = self.lines[self.at]
            line, place = self.locations.split(raw)
            self.at += 1
            if line.startswith("}"):
                return blocks, line
            if line.startswith("^"):
                self.label(re.sub(r":\s*(//.*)?$", "", line), blocks)
            else:
                blocks[-1].ops.append(self.op(line, place, blocks[-1]))

    def label(self, line: str, blocks: list[Block]) -> None:
        head = re.match(r"\^(\w+)(?:\((.*)\))?$", line)
        assert head, line
        if head[1] != "bb0" and blocks[-1].ops:
            blocks.append(Block(label=head[1]))
        blocks[-1].args += [self.argument(a) for a in split_top(head[2] or "")]

    def region(self, op: Op, args: list[tuple[str, Type]] | None = None) -> str:
        self.scopes.append({})
        block = Block([self.define(n, t) for n, t in args or []], parent=op)
        op.regions.append(block)
        _, end = self.blocks(block)
        self.scopes.pop()
        return end

    def op(self, line: str, place: str, block: Block) -> Op:
        names: list[str] = []
        if left := re.match(rf"({_NAME}(?::\d+)?(?:, {_NAME}(?::\d+)?)*) = (.*)$", line):
            line = left[2]
            for name in left[1].split(", "):
                many = re.match(r"(.*):(\d+)$", name)
                names += [f"{many[1]}#{i}" for i in range(int(many[2]))] if many else [name]
        head = re.match(r'"?([\w.]+)"?\s*(.*)$', line)
        assert head, line
        reader = {"scf.for": self.scf_for, "scf.if": self.scf_if, "scf.while": self.scf_while}.get(
            head[1], self.with_body if head[2].endswith("({") else self.plain
        )
        op = Op(head[1], [], "", place, block=block, index=len(block.ops))
        kinds = reader(op, head[2])
        if len(kinds) == 1:
            kinds *= len(names)
        op.results = [self.define(n, t, op) for n, t in zip(names, kinds, strict=False)]
        for value in [*op.operands, *(v for _, args in op.successors for v in args)]:
            value.uses.append(op)
        return op

    def scf_for(self, op: Op, text: str) -> list[Type]:
        head = re.match(
            r"(?:unsigned )?(%\S+) = (%\S+) to (%\S+) step (%\S+)"
            r"(?: iter_args\((.*?)\) -> \((.*?)\)\s*)?\s*(?:: (\w+) )?\{$",
            text,
        )
        assert head, text
        carried = [pair.split(" = ") for pair in split_top(head[5] or "")]
        kinds = [parse_type(t) for t in split_top(head[6] or "")]
        op.operands = [self.use(x) for x in [head[2], head[3], head[4], *(init for _, init in carried)]]
        induction = (head[1], Type(None, head[7] or "i32"))
        self.region(op, [induction, *((name, t) for (name, _), t in zip(carried, kinds, strict=True))])
        return kinds

    def scf_if(self, op: Op, text: str) -> list[Type]:
        head = re.match(r"(%\S+)(?: -> \((.*)\))? \{$", text)
        assert head, text
        op.operands = [self.use(head[1])]
        if "else" in self.region(op):
            self.region(op)
        return [parse_type(t) for t in split_top(head[2] or "")]

    def scf_while(self, op: Op, text: str) -> list[Type]:
        head = re.match(r"(?:\((.*?)\) )?: \((.*?)\) -> \(?(.*?)\)? \{$", text)
        assert head, text
        carried = [pair.split(" = ") for pair in split_top(head[1] or "")]
        kinds = [parse_type(t) for t in split_top(head[2])]
        op.operands = [self.use(init) for _, init in carried]
        self.region(op, [(name, t) for (name, _), t in zip(carried, kinds, strict=True)])
        self.region(op)
        return [parse_type(t) for t in split_top(head[3])]

    def with_body(self, op: Op, text: str) -> list[Type]:
        """`"tt.reduce"(%x) <{axis = 0 : i32}> ({ ... }) : (...) -> ...`"""
        head = re.match(r"\((.*?)\)(?: <\{(.*?)\}>)? \(\{$", text)
        assert head, text
        op.operands = [self.use(x) for x in split_top(head[1])]
        op.attrs = head[2] or ""
        tail = self.region(op).split(") : ", 1)[1]
        return [parse_type(t) for t in split_top(split_top(tail, "->")[1].strip("()"))]

    def plain(self, op: Op, text: str) -> list[Type]:
        body, *types = split_top(text, " : ") or [""]
        if types and types[0].startswith("%"):
            # tt.print has its operands behind its attributes
            body += " " + types.pop(0)
        op.types = " : ".join(types)
        for block, args in re.findall(r"\^(\w+)(?:\((.*?)\))?", body):
            op.successors.append((block, [self.use(x) for x in re.findall(_NAME, args.split(":")[0])]))
        bare = re.sub(r'"[^"]*"|\{.*?\}|\^\w+(\(.*?\))?', "", body)
        op.operands = [self.use(x) for x in re.findall(_NAME, bare)]
        op.attrs = re.sub(rf'("[^"]*")|{_NAME}', lambda m: m[1] or "", body)
        return self.result_types(op)

    def result_types(self, op: Op) -> list[Type]:
        arrow = re.split(r" -> | to ", op.types)
        if len(arrow) > 1:
            return [parse_type(t) for t in split_top(arrow[1].strip("()"))]
        if op.name in ("tt.get_program_id", "tt.get_num_programs"):
            return [Type(None, "i32")]
        if op.name == "arith.constant":
            return [parse_type(op.types) if op.types else Type(None, "i1")]
        if not op.operands:
            return [parse_type(op.types)] if op.types else []
        first = op.operands[0].type
        if op.name in ("arith.cmpi", "arith.cmpf"):
            return [Type(first.shape, "i1")]
        if op.name == "arith.select":
            return [op.operands[1].type]
        if op.name == "tt.load":
            return [Type(first.shape, first.pointee)]
        return [first]


def parse(text: str) -> Function:
    """The kernel in a printed TTIR module."""
    return Parser(text).function()
