"""Tuned configurations against analytic defaults, in one run, turn by turn; and what an autotune hit costs.

    python -m bench.tune                                   # every op, both 16 and 32 bits
    python -m bench.tune --ops gemv matmul --rounds 21

Each key is searched as a warm-up would, in a cache of this run's own; then default and winner are timed anew,
turn by turn. Says whether three lines hold: tuned never below 0.97x of the default; the default within 1.10x
of tuned in the geometric mean and nowhere beyond 1.5x; a hit at most 5 % of a launch. Needs a calm machine.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.machine import machine, results_path
from bench.run import DTYPES, MODELS, RESULTS, inputs, questions
from trinfer import backend, kernels
from trinfer.autotune import Call, choose, collect, forget, suspended
from trinfer.autotune.measure import Trial, rotation
from trinfer.autotune.rows import key_text
from trinfer.autotune.search import measure
from trinfer.kernels import OPS
from trinfer.kernels.op import Op

LEAST_GAIN, MEAN_GAIN, MOST_GAIN, HIT_SHARE = 0.97, 1.10, 1.5, 0.05


def call_of(op: Op, model: str, rows: int, dtype: str) -> Call | None:
    """The launch of an op in the sizes of a model."""
    arguments = inputs(op, model, rows, DTYPES[dtype], backend.default_device())
    with collect() as calls, torch.no_grad():
        op.launcher(**arguments)
    return next(iter(calls.values()), None)


def gain_of(call: Call, rounds: int) -> dict[str, Any]:
    """Search one key, then time default and winner anew; the gain is the median over rounds."""
    row = measure(call)
    default = call.op.default(call.key)
    base = {"op": call.op.name, "key": key_text(call.key), "tried": row["tried"], "config": row["config"]}
    if row["config"] == default:
        return base | {"gain": 1.0, "us": row["us"], "default_us": row["us"]}
    with suspended():
        copies = rotation(call)
        trials = [Trial(call, config, copies) for config in (default, row["config"])]
        pairs = [[trial.sample() for trial in trials] for _ in range(rounds)]
    return base | {
        "gain": round(statistics.median(a / b for a, b in pairs), 3),
        "us": round(trials[1].us, 2),
        "default_us": round(trials[0].us, 2),
    }


def hit_share(rounds: int = 31) -> float:
    """What `choose` takes of the cheapest launch there is, in the time of one thread."""
    torch.set_num_threads(1)
    x, weight = (torch.zeros(n, 16, device=backend.default_device()) for n in (1, 16))
    with collect() as calls:
        kernels.gemv(x, weight)
    ((op, key),) = calls
    sides = (lambda: kernels.gemv(x, weight)), (lambda: choose(op, key))
    times = [[_thread_seconds(side) for side in sides] for _ in range(rounds)]
    launches, hits = zip(*times, strict=True)
    return min(hits) / min(launches)


def _thread_seconds(call: Any, repeats: int = 300) -> float:
    start = time.thread_time()
    for _ in range(repeats):
        call()
    return time.thread_time() - start


def verdict(rows: list[dict[str, Any]], hit: float) -> dict[str, Any]:
    """The three lines, and whether each holds."""
    gains = [row["gain"] for row in rows]
    mean = statistics.geometric_mean(gains)
    return {
        "least_gain": min(gains),
        "mean_gain": round(mean, 4),
        "most_gain": max(gains),
        "hit_share": round(hit, 4),
        "tuned never below 0.97x of the default": min(gains) >= LEAST_GAIN,
        "default within 1.10x of tuned, none above 1.5x": mean <= MEAN_GAIN and max(gains) <= MOST_GAIN,
        "a hit is at most 5 % of a launch": hit <= HIT_SHARE,
    }


def save(rows: list[dict[str, Any]], result: dict[str, Any], folder: Path) -> Path:
    """Replace the list `tune` of the device's file."""
    path = results_path(folder)
    content = json.loads(path.read_text()) if path.exists() else {}
    content["tune"] = {"machine": machine(backend.default_device()), **result, "rows": rows}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, time, print, save; 1 if a line does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", nargs="+", choices=[op.name for op in OPS])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["smollm2"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    os.environ["TRINFER_AUTOTUNE_CACHE"] = tempfile.mkdtemp()
    forget()
    rows: list[dict[str, Any]] = []
    print(f"{'op':18}{'default us':>11}{'tuned us':>10}{'gain':>7}  key")
    for question in questions(args):
        call = call_of(*question)
        if call is None or any(
            row["key"] == key_text(call.key) and row["op"] == call.op.name for row in rows
        ):
            continue
        rows.append(row := gain_of(call, args.rounds))
        numbers = f"{row['default_us']:11.1f}{row['us']:10.1f}{row['gain']:6.2f}x"
        print(f"{row['op']:18}{numbers}  {row['key']}", flush=True)
    result = verdict(rows, hit_share())
    print(json.dumps(result, indent=1))
    print(f"saved to {save(rows, result, args.results)}")
    return 0 if all(value for value in result.values() if isinstance(value, bool)) else 1


if __name__ == "__main__":
    sys.exit(main())
