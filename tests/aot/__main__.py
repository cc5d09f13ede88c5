"""Compile every kernel for GPUs that are not there, and print what came of it.

python -m tests.aot               # every default and the whole space, four targets
python -m tests.aot --defaults    # only what is shipped
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence

import triton

from tests.aot.gate import Result, compile_all
from tests.aot.jobs import defaults, space
from trinfer.backend.targets import TARGETS


def table(title: str, results: Sequence[Result]) -> None:
    """Counts by op and target."""
    print(f"\n{title}, triton {triton.__version__}")
    print(f"{'op':22}{'target':8}{'compiled':>9}{'fit':>6}{'spill':>6}{'failed':>7}")
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.job.op, result.job.target), []).append(result)
    for (op, target), group in groups.items():
        fit = sum(r.fits for r in group)
        spill = sum(r.spills for r in group if r.fits)
        failed = sum(bool(r.error) for r in group)
        print(f"{op:22}{target:8}{len(group) - failed:9}{fit:6}{spill:6}{failed:7}")


def main() -> int:
    """Compile, print, and tell by the exit status if a default has a fault or anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--defaults", action="store_true", help="only the configurations that are shipped")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    targets, start = tuple(args.targets), time.monotonic()
    shipped = compile_all(defaults(targets), args.workers)
    table("Shipped defaults, with their variants", shipped)
    tunable = [] if args.defaults else compile_all(space(targets), args.workers)
    if tunable:
        table("Configurations that may be tuned", tunable)
    faulty = [f"{r.job}: {fault}" for r in shipped for fault in r.faults]
    faulty += [f"{r.job}: {r.error}" for r in tunable if r.error]
    outside = [f.spilled_bytes for r in shipped if not r.faults for f in r.facts if f.spilled_bytes]
    if outside:
        print(
            f"\n{len(outside)} defaults spill up to {max(outside)} bytes outside of their inner loops: "
            f"triton {triton.__version__} is not the pinned one, for which they are made"
        )
    everything = [*shipped, *tunable]
    print(
        f"\n{len(everything)} compilations in {time.monotonic() - start:.0f} s: "
        f"{sum(not r.fits and not r.error for r in tunable)} configurations do not fit, "
        f"{sum(r.spills for r in tunable if r.fits)} of the others spill, {len(faulty)} faults"
    )
    for line in faulty:
        print(line)
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
