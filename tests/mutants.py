"""Do the tests of kernels notice a fault? Plant small ones, one at a time, and run the tests of that kernel.

    python -m tests.mutants                  # three a kernel file
    python -m tests.mutants --files gemv.py --each 5

A mutant lives in a copy of the project; its tests run under the sanitizer, as in `make test`. It is caught if
a test fails. What survives is printed with its place, to be explained or to become a test.
"""

import argparse
import ast
import concurrent.futures
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "trinfer" / "kernels"
SHARED = ("__init__.py", "op.py")
TIMEOUT_S = 900


@dataclass(frozen=True)
class Mutant:
    """A changed kernel file."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {self.before} -> {self.after}"


Change = Callable[[ast.AST, ast.FunctionDef], ast.AST | None]


def flip_mask(node: ast.AST, function: ast.FunctionDef) -> ast.AST | None:
    """a < b becomes a <= b."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Lt):
        return ast.Compare(node.left, [ast.LtE()], node.comparators)
    return None


def drop_int64(node: ast.AST, function: ast.FunctionDef) -> ast.AST | None:
    """x.to(tl.int64) becomes x."""
    if isinstance(node, ast.Call) and any("int64" in ast.unparse(a) for a in node.args):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            return node.func.value
        if ast.unparse(node.func) == "tl.cast":
            return node.args[0]
    return None


def shorten_loop(node: ast.AST, function: ast.FunctionDef) -> ast.AST | None:
    """range(a, b, c) becomes range(a, b - 1, c)."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "range" and len(node.args) > 1:
        low, high, *step = node.args
        return ast.Call(node.func, [low, ast.BinOp(high, ast.Sub(), ast.Constant(1)), *step], node.keywords)
    return None


def swap_stride(node: ast.AST, function: ast.FunctionDef) -> ast.AST | None:
    """x * stride_a becomes x * stride_b."""
    strides = [a.arg for a in function.args.args if a.arg.startswith("stride_")]
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and len(strides) > 1):
        return None
    if not (isinstance(node.right, ast.Name) and node.right.id in strides):
        return None
    other = strides[(strides.index(node.right.id) + 1) % len(strides)]
    return ast.BinOp(node.left, node.op, ast.Name(other))


def remove_other(node: ast.AST, function: ast.FunctionDef) -> ast.AST | None:
    """A masked load loses other=."""
    if isinstance(node, ast.Call) and any(k.arg == "other" for k in node.keywords):
        return ast.Call(node.func, node.args, [k for k in node.keywords if k.arg != "other"])
    return None


def flip_sign(node: ast.AST, function: ast.FunctionDef) -> ast.AST | None:
    """a + b becomes a - b."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return ast.BinOp(node.left, ast.Sub(), node.right)
    return None


CHANGES: tuple[Change, ...] = (flip_mask, drop_int64, shorten_loop, swap_stride, remove_other, flip_sign)


def jit_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions that Triton compiles."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            yield node


class _Replace(ast.NodeTransformer):
    def __init__(self, place: tuple[int, int, int], change: Change, function: ast.FunctionDef) -> None:
        self.place, self.change, self.function, self.done = place, change, function, False

    def visit(self, node: ast.AST) -> ast.AST:
        here = (
            getattr(node, "lineno", -1),
            getattr(node, "col_offset", -1),
            getattr(node, "end_col_offset", -1),
        )
        if not self.done and here == self.place and (new := self.change(node, self.function)) is not None:
            self.done = True
            return ast.copy_location(new, node)
        return self.generic_visit(node)


def mutants(path: Path) -> Iterator[Mutant]:
    """Every mutant of a kernel file."""
    tree = ast.parse(path.read_text())
    for function in jit_functions(tree):
        for change in CHANGES:
            for node in ast.walk(function):
                new = change(node, function)
                if new is None or not isinstance(node, ast.expr):
                    continue
                changed = copy.deepcopy(tree)
                assert node.end_col_offset is not None
                place = (node.lineno, node.col_offset, node.end_col_offset)
                changed = _Replace(place, change, function).visit(changed)
                source = ast.unparse(ast.fix_missing_locations(changed))
                before, after = ast.unparse(node), ast.unparse(ast.fix_missing_locations(new))
                yield Mutant(path.name, node.lineno, change.__name__, before, after, source)


def choose(path: Path, each: int) -> list[Mutant]:
    """A few mutants of a file, of different kinds where it offers them; always the same ones."""
    found = sorted(mutants(path), key=lambda m: (m.line, m.kind, m.before))
    random.Random(path.name).shuffle(found)
    kinds: dict[str, list[Mutant]] = {}
    for mutant in found:
        kinds.setdefault(mutant.kind, []).append(mutant)
    chosen: list[Mutant] = []
    while len(chosen) < each and any(kinds.values()):
        for kind in sorted(kinds, key=lambda k: -len(kinds[k])):
            if kinds[kind] and len(chosen) < each:
                chosen.append(kinds[kind].pop())
    return chosen


def tests_of(file: str) -> list[str]:
    """The test files that run the kernels of a file; for shared functions, those of the ops that use them."""
    name = file.removesuffix(".py")
    own = sorted((ROOT / "tests" / "kernels").glob(f"test_{name}*.py"))
    always = ["tests/kernels/test_sources.py"]
    if own:
        return [*always, *[str(p.relative_to(ROOT)) for p in own], "tests/kernels/test_large_offsets.py"]
    users = [p.stem for p in KERNELS.glob("*.py") if f"kernels.{name} import" in p.read_text()]
    tests = [f"tests/kernels/test_{user}.py" for user in sorted(users)]
    return [*always, *[t for t in tests if (ROOT / t).exists()], "tests/kernels/test_large_offsets.py"]


def is_caught(mutant: Mutant) -> bool:
    """Run the tests of a mutant in a copy of the project."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in ("trinfer", "tests", "bench"):
            shutil.copytree(
                ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__", "results")
            )
        shutil.copy(ROOT / "pyproject.toml", place)
        (place / "trinfer" / "kernels" / mutant.file).write_text(mutant.source)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *tests_of(mutant.file),
        ]
        environment = os.environ | {
            "TRINFER_CPU_CHECK": "1",
            "TRITON_CACHE_DIR": str(place / "cache"),
            "PYTHONPATH": str(place),
            "CI": "1",
        }
        try:
            done = subprocess.run(
                command, cwd=place, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            # a loop that does not end is noticed
            return True
        return done.returncode != 0


def main() -> int:
    """Plant, run, print; the exit status tells whether enough were caught."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", nargs="+", help="names in trinfer/kernels; all by default")
    parser.add_argument("--each", type=int, default=3, help="mutants a file")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    paths = [p for p in sorted(KERNELS.glob("*.py")) if p.name not in SHARED]
    paths = [p for p in paths if not args.files or p.name in args.files]
    chosen = [mutant for path in paths for mutant in choose(path, args.each)]
    start, caught = time.monotonic(), 0
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        for mutant, noticed in zip(chosen, pool.map(is_caught, chosen), strict=True):
            caught += noticed
            print("caught  " if noticed else "SURVIVED", mutant, flush=True)
    print(f"{caught} of {len(chosen)} mutants caught in {time.monotonic() - start:.0f} s")
    return 0 if caught >= 0.95 * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
