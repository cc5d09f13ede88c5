"""What a row of a table says: its key as text, the configurations it may name, what it was measured with."""

import ast
import functools
import hashlib
import io
import math
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from trinfer import backend
from trinfer.autotune.records import Config, Tunable

# fields of keys that stand for a range of sizes: a row may serve its neighbours in these, and in no others
BUCKETS = ("M", "pairs", "programs", "rows")
# what no CPU kernel depends on
GPU_ONLY = ("num_stages", "num_warps")
# fields that a CPU's candidates vary around its default, and how far
CPU_FIELDS = {"BLOCK_N": (8, 512), "SPLITS": (1, 64)}
NUMBERS = ("us", "default_us", "floor_us")
# a day
MOST_US = 86_400e6
VERSIONS = ("triton", "torch", "driver", "src")

Row = dict[str, Any]


def key_text(key: Any) -> str:
    """The fields of a key as sorted `name=value`, on a CPU with the threads: the same in every process."""
    named = key._asdict() if hasattr(key, "_asdict") else {f"k{n}": value for n, value in enumerate(key)}
    fields = {name: _text(value) for name, value in named.items()}
    if backend.kind() == "cpu":
        fields["threads"] = str(torch.get_num_threads())
    return " ".join(f"{name}={fields[name]}" for name in sorted(fields))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return str(value).removeprefix("torch.")


def neighbours(key: Any, texts: Iterator[str] | list[str]) -> list[tuple[float, Any]]:
    """(distance in powers of 2, key) of the `texts` that differ from `key` in bucketed fields only."""
    mine = dict(part.split("=", 1) for part in key_text(key).split(" "))
    bucketed = [name for name in BUCKETS if name in mine]
    found: list[tuple[float, Any]] = []
    if not bucketed:
        return found
    for text in texts:
        theirs = dict(part.split("=", 1) for part in text.split(" ") if "=" in part)
        if mine.keys() != theirs.keys() or any(mine[n] != theirs[n] for n in mine if n not in bucketed):
            continue
        if all(theirs[name].isdecimal() and int(theirs[name]) > 0 for name in bucketed):
            sizes = {name: int(theirs[name]) for name in bucketed}
            distance = sum(abs(math.log2(sizes[n] / max(1, int(mine[n])))) for n in bucketed)
            found.append((distance, key._replace(**sizes)))
    return sorted(found, key=lambda pair: (pair[0], key_text(pair[1])))


def candidates(op: Tunable, key: Any) -> list[Config]:
    """Every configuration that `op` can run `key` in, the default first, none twice."""
    default = op.default(key)
    configs = [default, *({**default, **part} for part in op.space)]
    if backend.kind() == "cpu":
        unused = {name: default[name] for name in GPU_ONLY if name in default}
        configs = [{**config, **unused} for config in (default, *_around(op, default), *configs[1:])]
    return list({tuple(sorted(config.items())): config for config in configs}.values())


def _around(op: Tunable, default: Config) -> list[Config]:
    """The default of a CPU with half, twice, a quarter and four times a block: spaces are made for GPUs.

    Only of fields that the op's space varies, so that a kernel is right for any value.
    """
    return [
        {**default, name: size}
        for name, (least, most) in CPU_FIELDS.items()
        if name in default and len({part.get(name) for part in op.space} - {None}) > 1
        for size in (default[name] // 2, default[name] * 2, default[name] // 4, default[name] * 4)
        if least <= size <= most
    ]


def is_row(row: Any) -> bool:
    """True if `row` has the fields of a row, whatever it says."""
    if not isinstance(row, dict) or not isinstance(row.get("config"), dict):
        return False
    if not all(_is_time(row.get(name)) for name in NUMBERS):
        return False
    return all(isinstance(row.get(name), str) for name in (*VERSIONS, "date"))


def _is_time(us: Any) -> bool:
    # a bool is an int in Python, and is no time
    return type(us) in (int, float) and 0 <= us < MOST_US


def is_possible(op: Tunable, key: Any, config: Config) -> bool:
    """True if this version of `op` can produce `config` for `key`: what it was not made for is never run."""
    return any(
        config.keys() == known.keys() and all(_same(config[name], known[name]) for name in known)
        for known in candidates(op, key)
    )


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def versions(op: Tunable) -> dict[str, str]:
    """What a row of `op` would be measured with now: a row that says otherwise is a stale hint."""
    return {
        "triton": backend.triton_version(),
        "torch": torch.__version__,
        "driver": backend.driver_version(),
        "src": source_hash(op),
    }


def stale(op: Tunable, row: Row) -> list[str]:
    """What has changed since a row was measured, `name: then -> now`."""
    now = versions(op)
    return [f"{name}: {row[name]} -> {now[name]}" for name in VERSIONS if row[name] != now[name]]


@functools.cache
def source_hash(op: Tunable) -> str:
    """A hash of the code of the op's file and of the files beside it that it takes functions from."""
    home = sys.modules[op.launcher.__module__]
    package = home.__name__.rpartition(".")[0]
    digest = hashlib.sha256()
    for module in sorted(_reached(home, package), key=lambda module: module.__name__):
        digest.update(_code(Path(str(module.__file__)).read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:8]


@functools.cache
def _code(text: str) -> str:
    """Python source without comments, docstrings and blank lines, in words that every Python agrees on."""
    lines = text.split("\n")
    expressions = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    alone = {(value.lineno, value.col_offset) for value in expressions if isinstance(value, ast.Constant)}
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    # from the last to the first: what stands before keeps its place
    for token in reversed(tokens):
        (row, column), (last, end) = token.start, token.end
        is_docstring = token.type == tokenize.STRING and (row, column) in alone
        if token.type == tokenize.COMMENT or is_docstring:
            lines[row - 1 : last] = [lines[row - 1][:column] + lines[last - 1][end:]]
    return "\n".join(stripped for line in lines if (stripped := line.rstrip()))


@functools.cache
def settle(op: Tunable) -> None:
    """Give every function that a kernel of `op` calls its cache key before the kernel gets its own.

    Triton puts the constants of a called function into a kernel's key only if that function has its own by
    then: without this, keys depend on what a process launches first, and the next process compiles anew.
    """
    home = sys.modules[op.launcher.__module__]
    package = home.__name__.rpartition(".")[0]
    modules = [
        (len(_reached(module, package)), module.__name__, module) for module in _reached(home, package)
    ]
    # whoever uses others reaches more files than they do; in a file, what is called stands first
    for _, _, module in sorted(modules, key=lambda entry: entry[:2]):
        for value in vars(module).values():
            if getattr(value, "__module__", None) == module.__name__:
                getattr(value, "cache_key", None)


def _reached(home: ModuleType, package: str) -> set[ModuleType]:
    """`home` and every module of `package` whose names it uses, directly or through others."""
    reached, waiting = set[ModuleType](), [home]
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached.add(module)
        owners = {getattr(value, "__module__", None) for value in vars(module).values()}
        beside = [str(name) for name in owners if package and str(name).startswith(f"{package}.")]
        waiting += [sys.modules[name] for name in beside if name in sys.modules]
    return reached
