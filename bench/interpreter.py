"""Kernels compiled for the CPU against the same kernels in Triton's interpreter, with equal blocks.

    python -m bench.interpreter

The interpreter is chosen when triton is imported, so each side runs in a process of its own. Writes
bench/results/<device>.json.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import compare
from bench.machine import machine
from trinfer import backend
from trinfer.autotune import pin
from trinfer.kernels import OPS, attention, matmul

BLOCKS = {
    "matmul": {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64},
    "attention": {"BLOCK_M": 64, "BLOCK_N": 64},
}


def calls() -> dict[str, tuple[str, Callable[[], Any]]]:
    """Op and call of each case."""
    x, weight = torch.randn(16, 576), torch.randn(1536, 576)
    q, k, v = torch.randn(1, 9, 128, 64), torch.randn(1, 3, 128, 64), torch.randn(1, 3, 128, 64)
    return {
        "matmul 16x576x1536 fp32": ("matmul", lambda: matmul(x, weight)),
        "causal attention, 9 query and 3 kv heads of 64, 128 tokens, fp32": (
            "attention",
            lambda: attention(q, k, v, sm_scale=0.125, is_causal=True),
        ),
    }


def times_us(repeats: int) -> dict[str, float]:
    """Microseconds of each case in this process, the best of `repeats` calls after one that may compile."""
    torch.set_num_threads(1)
    found = {}
    for name, (op_name, call) in calls().items():
        with pin(next(op for op in OPS if op.name == op_name), BLOCKS[op_name]):
            call()
            best = float("inf")
            for _ in range(repeats):
                start = time.perf_counter()
                call()
                best = min(best, time.perf_counter() - start)
        found[name] = best * 1e6
    return found


def interpreted_us() -> dict[str, float]:
    """The same in a process where Triton interprets."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.interpreter", "--print-times"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    times: dict[str, float] = json.loads(done.stdout)
    return times


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--print-times", action="store_true", help="only this process, one call, as JSON")
    parser.add_argument("--results", type=Path, default=compare.RESULTS)
    args = parser.parse_args()
    if args.print_times:
        print(json.dumps(times_us(1)))
        return
    compiled, interpreted = times_us(50), interpreted_us()
    rows = [
        {
            "name": f"{name}, against the interpreter",
            "threads": 1,
            "us": round(us, 1),
            "against": "interpreter",
            "against_us": round(interpreted[name], 1),
            "ratio": round(interpreted[name] / us, 1),
            "rounds": 1,
            "date": compare.now(),
        }
        for name, us in compiled.items()
    ]
    for row in rows:
        print(f"{row['ratio']:8.0f}x of the interpreter, {row['us']:9.1f} us  {row['name']}")
    print(f"saved to {compare.save(rows, machine(backend.default_device()), args.results)}")


if __name__ == "__main__":
    main()
