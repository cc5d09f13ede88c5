"""The rules of CONTRIBUTING.md that a parser can check: direction of imports, sizes, types, banned calls.

Every test lists all violations by file, line and name.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "trinfer"

MAX_FILE, MAX_FUNCTION, MAX_KERNEL, MAX_KERNEL_PARAMETERS, MAX_NESTING = 400, 40, 120, 20, 3
MAY_IMPORT_TRANSFORMERS = {
    "compat", "layers/attention", "layers/moe", "cache", "rewrite", "checkpoint", "generation", "engine",
    "survey", "warmup", "__main__",
}  # fmt: skip
MAY_PRINT = {"__main__", "warmup"}
# what makes a kernel file: everything in kernels/ but the record, the shared element functions and the door;
# a shared file may import those on its left
SHARED = (
    "op",
    "launch",
    "elements",
    "norm_elements",
    "row_elements",
    "splits",
    "scores",
    "heads",
    "argmax_elements",
    "quant_elements",
    "routing_elements",
)
NOT_AN_OP = {"__init__", *SHARED}
# heavy and optional: these may be imported inside a function
LAZY = {"transformers", "triton", "safetensors", "tqdm", "matplotlib", "IPython"}
ENVIRONMENT = {
    "TRITON_INTERPRET",
    "TRINFER_AUTOTUNE_CACHE",
    "TRINFER_CPU_CHECK",
    "CC",
    "TRITON_DEFAULT_FP_FUSION",
}
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)


class Module(NamedTuple):
    """One source file: its path below the repository, its place below trinfer/ without suffix, its tree."""

    path: str
    place: str
    lines: int
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.place.split("/")[0]


class Function(NamedTuple):
    """One function, methods and nested ones included."""

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef
    is_kernel: bool

    def __str__(self) -> str:
        return f"{self.module.path}:{self.node.lineno} {self.node.name}"


class Import(NamedTuple):
    """One imported module, by its full dotted name."""

    name: str
    line: int
    is_inside_function: bool


def read(path: Path) -> Module:
    text = path.read_text()
    place = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).with_suffix("").as_posix()
    return Module(str(path.relative_to(ROOT)), place, text.count("\n"), ast.parse(text, str(path)))


@functools.cache
def package() -> list[Module]:
    return [read(path) for path in sorted(PACKAGE.rglob("*.py"))]


@functools.cache
def sources() -> list[Module]:
    return package() + [read(path) for path in sorted((ROOT / "bench").rglob("*.py"))]


@functools.cache
def the_map() -> list[str]:
    """The rooms from left to right, as CONTRIBUTING.md lists them."""
    (line,) = re.findall(r"^config -> .*$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    return re.split(r" -> |, ", line)


def functions(modules: list[Module]) -> Iterator[Function]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Function(module, node, any("jit" in names_in(d) for d in node.decorator_list))


def names_in(node: ast.AST) -> set[str]:
    parts = list(ast.walk(node))
    return {p.id for p in parts if isinstance(p, ast.Name)} | {
        p.attr for p in parts if isinstance(p, ast.Attribute)
    }


def imports(module: Module) -> Iterator[Import]:
    inside = {id(node) for f in functions([module]) for node in ast.walk(f.node) if node is not f.node}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            # `from trinfer import cpu` reaches the room, not the door
            names = [f"trinfer.{alias.name}" for alias in node.names] if base == "trinfer" else [base]
        else:
            continue
        yield from (Import(name, node.lineno, id(node) in inside) for name in names)


def absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    here = ["trinfer", *module.place.split("/")][: -node.level]
    return ".".join([*here, *([node.module] if node.module else [])])


def room_of(name: str) -> str:
    """The room that an import reaches: kernels for `trinfer.kernels.op`, __init__ for `trinfer.Plan`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in the_map() else "__init__"


def own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    skipped = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
    return function.end_lineno - function.lineno + 1 - skipped


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Deepest block inside `node`; `elif` is no deeper than its `if`, a nested function counts on its own."""
    deepest = depth
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        is_elif = isinstance(node, ast.If) and field == "orelse" and len(children) == 1
        for child in children:
            if not isinstance(child, ast.AST) or isinstance(child, ast.FunctionDef | ast.ClassDef):
                continue
            deeper = isinstance(child, BLOCKS) and not (is_elif and isinstance(child, ast.If))
            deepest = max(deepest, nesting(child, depth + deeper))
    return deepest


def needs_optional(name: str) -> bool:
    """True if importing the module `name` of trinfer imports a heavy optional package on the way."""
    by_name = {".".join(["trinfer", *m.place.split("/")]).removesuffix(".__init__"): m for m in package()}
    parts, seen = name.split("."), set[str]()
    open_names = [".".join(parts[: end + 1]) for end in range(1, len(parts))]
    while open_names:
        here = open_names.pop()
        if here.split(".")[0] in LAZY:
            return True
        if here in by_name and here not in seen:
            open_names += [i.name for i in imports(by_name[here]) if not i.is_inside_function]
        seen.add(here)
    return False


def none(violations: list[str]) -> None:
    """Fail with every violation, one a line."""
    if violations:
        pytest.fail("\n".join(violations), pytrace=False)


def test_every_room_is_on_the_map() -> None:
    unknown = {module.room for module in package()} - set(the_map())
    none([f"trinfer/{room}: put it into the list of CONTRIBUTING.md" for room in sorted(unknown)])


def test_imports_point_one_way() -> None:
    rank = {room: number for number, room in enumerate(the_map())}
    violations = []
    for module in package():
        reached = [i for i in imports(module) if i.name.split(".")[0] == "trinfer"]
        bad = [i for i in reached if module.room in rank and rank[room_of(i.name)] > rank[module.room]]
        violations += [f"{module.path}:{i.line} {module.room} imports {i.name}, on its right" for i in bad]
    none(violations)


@pytest.mark.parametrize("room", ["config", "cpu"])
def test_room_imports_nothing_of_trinfer(room: str) -> None:
    none([
        f"{module.path}:{i.line} imports {i.name}"
        for module in package() if module.room == room
        for i in imports(module) if i.name.split(".")[0] == "trinfer" and room_of(i.name) != room
    ])  # fmt: skip


def test_only_some_files_import_transformers() -> None:
    none([
        f"{module.path}:{i.line} imports {i.name}; allowed in {', '.join(sorted(MAY_IMPORT_TRANSFORMERS))}"
        for module in package() if not {module.room, module.place} & MAY_IMPORT_TRANSFORMERS
        for i in imports(module) if i.name.split(".")[0] == "transformers"
    ])  # fmt: skip


def test_u108_private_parts_of_triton_are_used_in_few_places() -> None:
    private = ("triton.backends", "triton.compiler", "triton.runtime", "triton._C")
    none([
        f"{module.path}:{i.line} imports {i.name}; allowed in cpu/, backend and compat"
        for module in package() if module.room not in ("cpu", "backend", "compat")
        for i in imports(module) if i.name.startswith(private)
    ])  # fmt: skip


def test_kernels_know_no_models_and_not_each_other() -> None:
    outside = {"trinfer.backend", "trinfer.autotune"}
    shared = [f"trinfer.kernels.{name}" for name in SHARED]
    violations = []
    for module in package():
        if module.room != "kernels" or module.place.endswith("__init__"):
            continue
        name = module.place.removeprefix("kernels/")
        allowed = outside | set(shared)
        if name in SHARED:
            allowed = outside | set(shared[: SHARED.index(name)])
        reached = [i for i in imports(module) if i.name.split(".")[0] == "trinfer" and i.name not in allowed]
        violations += [
            f"{module.path}:{i.line} imports {i.name}; allowed: {sorted(allowed)}" for i in reached
        ]
    none(violations)


def test_imports_stand_at_the_top() -> None:
    none([
        f"{module.path}:{i.line} imports {i.name} inside a function; may: what needs one of {sorted(LAZY)}"
        for module in package()
        for i in imports(module)
        if i.is_inside_function and i.name.split(".")[0] not in LAZY and not needs_optional(i.name)
    ])  # fmt: skip


def test_files_are_short() -> None:
    none([f"{m.path} has {m.lines} lines, at most {MAX_FILE}" for m in sources() if m.lines > MAX_FILE])


def test_functions_are_short() -> None:
    none([
        f"{f} has {own_lines(f.node)} lines, at most {MAX_FUNCTION} beside its docstring"
        for f in functions(sources()) if not f.is_kernel and own_lines(f.node) > MAX_FUNCTION
    ])  # fmt: skip


def test_kernels_are_short() -> None:
    none([
        f"{f} has {own_lines(f.node)} lines, at most {MAX_KERNEL}"
        for f in functions(sources()) if f.is_kernel and own_lines(f.node) > MAX_KERNEL
    ])  # fmt: skip


def test_kernels_take_few_parameters() -> None:
    none([
        f"{f} takes {len(plain_parameters(f))}, at most {MAX_KERNEL_PARAMETERS} beside strides and constexpr"
        for f in functions(sources()) if f.is_kernel and len(plain_parameters(f)) > MAX_KERNEL_PARAMETERS
    ])  # fmt: skip


def plain_parameters(f: Function) -> list[str]:
    constexprs = [a.arg for a in f.node.args.args if a.annotation and "constexpr" in names_in(a.annotation)]
    return [a.arg for a in f.node.args.args if not a.arg.startswith("stride_") and a.arg not in constexprs]


def test_u102_no_kernel_is_compiled_for_a_length_a_batch_or_a_stride() -> None:
    none([
        f"{f} has the constexpr {a.arg}"
        for f in functions(package()) if f.is_kernel
        for a in f.node.args.args
        if a.annotation and "constexpr" in names_in(a.annotation)
        and (a.arg in ("B", "M", "P", "rows") or a.arg.startswith("stride_"))
    ])  # fmt: skip


def test_blocks_are_shallow() -> None:
    none([
        f"{f} nests {nesting(f.node)} blocks, at most {MAX_NESTING}"
        for f in functions(sources()) if nesting(f.node) > MAX_NESTING
    ])  # fmt: skip


def test_functions_are_typed() -> None:
    none([
        f"{f} has no type for {', '.join(untyped(f.node))}"
        for f in functions(sources()) if not f.is_kernel and untyped(f.node)
    ])  # fmt: skip


def untyped(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    everything = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    bare = [a.arg for a in everything if a and a.annotation is None and a.arg not in ("self", "cls")]
    return bare if node.returns else [*bare, "its result"]


def test_nothing_prints_but_the_command_line() -> None:
    none([
        f"{module.path}:{node.lineno} prints"
        for module in package() if module.room not in MAY_PRINT
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ])  # fmt: skip


def test_no_broad_except() -> None:
    none([
        f"{module.path}:{node.lineno} catches everything; name the exception"
        for module in sources() for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or names_in(node.type) & {"Exception", "BaseException"})
    ])  # fmt: skip


def test_no_global_state_statements() -> None:
    none([
        f"{module.path}:{node.lineno} global {', '.join(node.names)}"
        for module in sources() for node in ast.walk(module.tree) if isinstance(node, ast.Global)
    ])  # fmt: skip


def test_no_banned_triton_calls() -> None:
    banned = {"autotune", "make_block_ptr"}
    none([
        f"{module.path}:{node.lineno} {ast.unparse(node)}"
        for module in sources() for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in banned
        and isinstance(node.value, ast.Name) and node.value.id in ("triton", "tl")
    ])  # fmt: skip


def test_environment_variables_are_the_known_ones() -> None:
    violations = []
    for module in package():
        for name, line, is_set in environment(module):
            if name not in ENVIRONMENT:
                violations.append(f"{module.path}:{line} {name}; allowed: {sorted(ENVIRONMENT)}")
            elif is_set and (module.room, name) != ("cpu", "TRITON_DEFAULT_FP_FUSION"):
                violations.append(f"{module.path}:{line} sets {name}")
    none(violations)


def environment(module: Module) -> Iterator[tuple[str, int, bool]]:
    """(name, line, is set) of every environment variable that the module touches, code where no literal."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Subscript) and is_environ(node.value):
            yield literal(node.slice), node.lineno, isinstance(node.ctx, ast.Store)
        elif isinstance(node, ast.Compare) and any(map(is_environ, node.comparators)):
            yield literal(node.left), node.lineno, False
        elif isinstance(node, ast.Call) and touches_environ(node.func):
            writes = bool(names_in(node.func) & {"setdefault", "update", "pop", "clear"})
            yield literal(node.args[0]) if node.args else ast.unparse(node), node.lineno, writes


def is_environ(node: ast.AST) -> bool:
    return "environ" in names_in(node) and not isinstance(node, ast.Call)


def touches_environ(function: ast.AST) -> bool:
    return "getenv" in names_in(function) or (
        isinstance(function, ast.Attribute) and is_environ(function.value)
    )


def literal(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


OP_FILES = sorted(path.stem for path in (PACKAGE / "kernels").glob("*.py") if path.stem not in NOT_AN_OP)


@pytest.mark.parametrize("op", OP_FILES)
def test_op_file_is_complete(op: str) -> None:
    module = read(PACKAGE / "kernels" / f"{op}.py")
    defined = {f.node.name: f for f in functions([module])}
    kernels = [name for name, f in defined.items() if f.is_kernel]
    exported = {i.name for i in imports(read(PACKAGE / "kernels" / "__init__.py"))}
    parts = {
        f"kernel _{op}_kernel under @triton.jit": f"_{op}_kernel" in kernels,
        f"launcher {op}": op in defined,
        f"launcher {op} under @launcher": op in defined and "launcher" in decorators(defined[op]),
        f"reference {op}_ref": f"{op}_ref" in defined,
        "record OP = Op(...) as its last statement": assigned(module.tree.body[-1]) == {"OP"},
        f"line in trinfer/kernels/__init__.py for {op}": f"trinfer.kernels.{op}" in exported,
        f"test tests/kernels/test_{op}.py": (ROOT / "tests" / "kernels" / f"test_{op}.py").exists(),
    }
    violations = [f"{module.path} has no {part}" for part, is_there in parts.items() if not is_there]
    # a launch that `launch` does not see is missing when the call is made again
    violations += [
        f"{module.path}:{node.lineno} launches {name}[...] itself; type: launch({name}, grid)(...)"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Subscript) and (name := ast.unparse(node.value)) in kernels
    ]
    if op in defined and f"{op}_ref" in defined:
        ours, truth = (signature(defined[name]) for name in (op, f"{op}_ref"))
        violations += [f"{module.path}: {op} takes {ours}, its reference {truth}"] if ours != truth else []
    none(violations)


def decorators(f: Function) -> set[str]:
    return {name for decorator in f.node.decorator_list for name in names_in(decorator)}


def assigned(statement: ast.stmt) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def signature(f: Function) -> tuple[list[str], list[str]]:
    arguments = f.node.args
    return [a.arg for a in [*arguments.posonlyargs, *arguments.args]], [a.arg for a in arguments.kwonlyargs]
