"""Every kernel against its PyTorch reference: time, bytes, operations, and how near the machine's limits.

    python -m bench.run                      # every op
    python -m bench.run --ops gemv rms_norm --threads 1

Writes bench/results/<device>.json. Both sides run in turn in one process; a number is the median over rounds,
a ratio the median over the ratios of the rounds. On a CPU the arguments of a small op stay in the cache.
"""

import argparse
import datetime
import inspect
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.machine import machine, results_path
from trinfer import backend
from trinfer.kernels import OPS
from trinfer.kernels.op import Op

RESULTS = Path(__file__).parent / "results"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# the shape letters of trinfer.kernels in SmolLM2-135M and in Llama-3-8B
MODELS = {
    "smollm2": {"B": 1, "H": 9, "G": 3, "N": 1536, "K": 576, "D": 64, "R": 64, "V": 49152, "E": 8},
    "llama3": {"B": 1, "H": 32, "G": 8, "N": 4096, "K": 4096, "D": 128, "R": 128, "V": 128256, "E": 8},
}
PROMPT, TOKEN = 512, 1
ROUND_S = 0.02


def rows_of(op: Op) -> tuple[int, ...]:
    """The numbers of rows an op is measured with: a prompt, one token, or both."""
    names = inspect.signature(op.inputs).parameters
    if "M" not in names:
        return (TOKEN,)
    return (TOKEN,) if op.name.endswith("gemv") or op.name in ("lm_head", "router") else (TOKEN, PROMPT)


def inputs(
    op: Op, model: str | dict[str, int], rows: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Arguments of an op in the sizes of a model."""
    sizes = (MODELS[model] if isinstance(model, str) else model) | {"M": rows}
    names = [name for name in inspect.signature(op.inputs).parameters if name in sizes]
    return op.inputs(**{name: sizes[name] for name in names}, dtype=dtype, device=device)


def rounds(sides: dict[str, Callable[[], Any]], count: int) -> dict[str, list[float]]:
    """Microseconds of a call of each side, one number a round; the sides take turns within a round."""
    repeats = {name: _repeats(call) for name, call in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(count):
        for name, call in sides.items():
            times[name].append(_timed(call, repeats[name]) * 1e6)
    return times


def _timed(call: Callable[[], Any], repeats: int) -> float:
    """Seconds a call."""
    _wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait()
    return (time.perf_counter() - start) / repeats


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _repeats(call: Callable[[], Any]) -> int:
    """Calls that fill a round; the first call, which may compile, does not count."""
    call()
    return max(1, round(ROUND_S / max(1e-6, min(_timed(call, 1) for _ in range(3)))))


def ratio(times: dict[str, list[float]], ours: str, theirs: str) -> float:
    """How many times as fast `ours` is: the median over rounds."""
    return statistics.median(t / o for o, t in zip(times[ours], times[theirs], strict=True))


def measure(op: Op, model: str, rows: int, dtype: str, count: int) -> dict[str, Any]:
    """One row of results."""
    device = backend.default_device()
    arguments = inputs(op, model, rows, DTYPES[dtype], device)
    sides = {"trinfer": lambda: op.launcher(**arguments), "reference": lambda: op.ref(**arguments)}
    times = rounds(sides, count)
    moved, operations = op.cost(**arguments)
    us = statistics.median(times["trinfer"])
    return {
        "op": op.name,
        "model": model,
        "rows": rows,
        "dtype": dtype,
        "us": round(us, 2),
        "us_range": [round(min(times["trinfer"]), 2), round(max(times["trinfer"]), 2)],
        "reference_us": round(statistics.median(times["reference"]), 2),
        "ratio": round(ratio(times, "trinfer", "reference"), 3),
        "gb_per_s": round(moved / us / 1e3, 2),
        "gflop_per_s": round(operations / us / 1e3, 2),
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def questions(args: argparse.Namespace) -> Iterator[tuple[Op, str, int, str]]:
    """Op, model, rows and dtype of every row."""
    for op in OPS:
        if not args.ops or op.name in args.ops:
            for model, rows, dtype in itertools.product(args.models, rows_of(op), args.dtypes):
                yield op, model, rows, dtype


KEY = ("op", "model", "rows", "dtype", "threads")


def save(rows: list[dict[str, Any]], facts: dict[str, Any], folder: Path) -> Path:
    """Put rows into the device's file; a row for the same question replaces the older one."""
    path = results_path(folder)
    content = json.loads(path.read_text()) if path.exists() else {}
    table = {tuple(r[key] for key in KEY): r for r in content.get("kernels", [])}
    table |= {tuple(r[key] for key in KEY): r | {"machine": facts} for r in rows}
    folder.mkdir(parents=True, exist_ok=True)
    kernels = [table[key] for key in sorted(table)]
    path.write_text(json.dumps(content | {"kernels": kernels}, indent=1) + "\n")
    return path


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", nargs="+", choices=[op.name for op in OPS])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["smollm2"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = backend.default_device()
    facts = machine(device) | {"read_gb_per_s": round(backend.read_gbps(device), 1)}
    print("  ".join(f"{key}: {value}" for key, value in facts.items()))
    print(
        f"{'op':22}{'model':9}{'rows':>5} {'dtype':6}{'us':>10}{'GB/s':>8}{'GFLOP/s':>9}{'x reference':>13}"
    )
    rows = []
    for op, model, count, dtype in questions(args):
        row = measure(op, model, count, dtype, args.rounds)
        rows.append(row)
        print(
            f"{op.name:22}{model:9}{count:5} {dtype:6}{row['us']:10.1f}{row['gb_per_s']:8.1f}"
            f"{row['gflop_per_s']:9.1f}{row['ratio']:13.2f}"
        )
    print(f"saved to {save(rows, facts, args.results)}")


if __name__ == "__main__":
    main()
