"""The accesses of a checked kernel: where each stands in the source, and which arguments it may reach."""

import re

from trinfer.cpu.scalar import MEMORY
from trinfer.cpu.ttir import Block, Function, Op, Value

_KEEP = (
    "tt.addptr",
    "tt.splat",
    "tt.broadcast",
    "tt.expand_dims",
    "tt.trans",
    "tt.bitcast",
    "tt.reshape",
    "tt.unsplat",
)


class Provenance:
    """Follows pointers back through arithmetic, choices and loops to the arguments of a kernel."""

    def __init__(self, function: Function) -> None:
        self.args = {arg: k for k, arg in enumerate(function.args)}
        self.sources: dict[Value, list[Value]] = {}
        labels = {block.label: block for block in function.blocks}
        for block in function.blocks:
            self._visit(block, labels)

    def _join(self, targets: list[Value], values: list[Value]) -> None:
        for target, value in zip(targets, values, strict=False):
            self.sources.setdefault(target, []).append(value)

    def _visit(self, block: Block, labels: dict[str, Block]) -> None:
        for op in block.ops:
            for label, values in op.successors:
                self._join(labels[label].args, values)
            self._visit_regions(op)
            for region in op.regions:
                self._visit(region, labels)

    def _visit_regions(self, op: Op) -> None:
        if op.name == "scf.if":
            for region in op.regions:
                self._join(op.results, region.terminator.operands if op.results else [])
        elif op.name == "scf.for":
            carried, yielded = op.regions[0].args[1:], op.regions[0].terminator.operands
            self._join(carried, op.operands[3:])
            self._join(carried, yielded)
            self._join(op.results, carried)
        elif op.name == "scf.while":
            before, after = op.regions
            self._join(before.args, op.operands)
            self._join(before.args, after.terminator.operands)
            self._join(after.args, before.terminator.operands[1:])
            self._join(op.results, after.args)
        elif op.name == "arith.select":
            self._join(op.results * 2, op.operands[1:])
        elif op.name in _KEEP:
            self._join(op.results, op.operands[:1])

    def roots(self, pointer: Value) -> tuple[list[int], bool]:
        """Positions of the arguments; all pointer arguments, and True, if the pointer itself was loaded or
        made of an integer."""
        found: set[int] = set()
        seen: set[Value] = set()
        todo = [pointer]
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in self.args:
                found.add(self.args[value])
            elif value in self.sources:
                todo += self.sources[value]
            else:
                return [k for arg, k in self.args.items() if arg.type.is_ptr], True
        return sorted(found), False


class Checks:
    """Collects the accesses of a kernel while it is written."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.provenance = Provenance(function)
        self.sites: dict[Op, str] = {}
        self.loaded: set[int] = set()
        self.stored: dict[int, list[str]] = {}

    def site(self, op: Op) -> str:
        """C text of the address of the site of a load, store or atomic."""
        if op not in self.sites:
            self.sites[op] = self._site(op)
        return f"&t_sites[{list(self.sites).index(op)}]"

    def atom(self, op: Op, text: str) -> str:
        """The C pointer of an atomic update, which the checks learn of together with its memory order."""
        order = re.search(r"\b(acq_rel|acquire|release|relaxed)\b", op.attrs)
        acquires = int(order is None or order[1] in ("acquire", "acq_rel"))
        releases = int(order is None or order[1] in ("release", "acq_rel"))
        return f"T_ATOM({self.site(op)}, {text}, {acquires}, {releases})"

    def _site(self, op: Op) -> str:
        pointer = op.operands[0]
        roots, is_anywhere = self.provenance.roots(pointer)
        if op.name == "tt.store":
            for k in roots:
                self.stored.setdefault(k, []).append(op.line)
        else:
            self.loaded |= set(roots)
        names = " or ".join(self.function.args[k].name.lstrip("%") for k in roots)
        mask = sum(1 << k for k in roots)
        elem = pointer.type.pointee
        size = f"sizeof({MEMORY[elem]})" if elem in MEMORY else "sizeof(void*)"
        return f'{{"{names}", "{op.line}", {mask}ull, {size}, {len(self.sites)}, {int(is_anywhere)}}}'

    def table(self) -> list[str]:
        """The C definition of the sites."""
        return [
            "static const struct t_site t_sites[] = {",
            *(f"  {text}," for text in self.sites.values()),
            "};",
            "",
        ]

    def outputs(self) -> list[tuple[int, str, str]]:
        """(position, name, lines of its stores) of the arguments that are only stored to, and so have to be
        filled."""
        names = {k: self.function.args[k].name.lstrip("%") for k in self.stored if k not in self.loaded}
        lines = {k: " and ".join(dict.fromkeys(self.stored[k])) for k in names}
        return [(k, name, lines[k]) for k, name in names.items() if "cache" not in name]
