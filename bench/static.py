"""What every kernel needs of a GPU that is not here, and how long the model thinks it takes.

    python -m bench.static --target sm_90                    # what is shipped, and the model's first choices
    python -m bench.static --target sm_90 --ops gemv --all   # every configuration that may be tuned

Registers, spills and shared memory come from compiling; occupancy, waves, bytes in flight and microseconds
from the cost model and the constants in autotune_cache/devices.json. Draws the roofline into bench/results.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.run import DTYPES, MODELS, PROMPT, RESULTS, TOKEN, inputs
from trinfer.autotune import Call, collect
from trinfer.autotune.measure import named
from trinfer.autotune.model import in_flight_bytes, occupancy, waves
from trinfer.autotune.ranking import Estimate, best, constants, default, estimate, every, launches_on
from trinfer.backend.targets import TARGETS
from trinfer.kernels import OPS
from trinfer.kernels.op import Op

# beyond this many rows of x other kernels are launched
FEW_ROWS = {"gemv", "quant_gemv", "grouped_gemv", "lm_head"}
HEAD = (
    f"{'op':18}{'model':8}{'rows':>5}{'regs':>5}{'spill':>6}{'shared':>8}{'occ':>4}{'waves':>7}"
    f"{'in flight':>10}{'us':>9}{'floor':>8}{'of floor':>9}  configuration"
)


def rows_of(op: Op) -> tuple[int, ...]:
    """One token, and a prompt where the op takes one."""
    return (TOKEN,) if op.name in FEW_ROWS else (TOKEN, PROMPT)


def call_of(op: Op, model: str, rows: int, dtype: str, target: str) -> Call | None:
    """The launch of an op in the sizes of a model, on tensors without memory."""
    arguments = inputs(op, model, rows, DTYPES[dtype], torch.device("meta"))
    with launches_on(target), collect() as calls:
        op.launcher(**arguments)
    return next(iter(calls.values()), None)


def estimates(args: argparse.Namespace) -> Iterator[tuple[str, int, bool, Estimate]]:
    """(model, rows, is the default, estimate) of everything that was asked for, every key once."""
    ops = [op for op in OPS if not args.ops or op.name in args.ops]
    seen: set[tuple[str, str]] = set()
    for op, model in itertools.product(ops, args.models):
        for rows in rows_of(op):
            call = call_of(op, model, rows, args.dtype, args.target)
            if call is not None and (op.name, repr(call.key)) not in seen:
                seen.add((op.name, repr(call.key)))
                yield from _estimates(call, model, rows, args)


def _estimates(
    call: Call, model: str, rows: int, args: argparse.Namespace
) -> Iterator[tuple[str, int, bool, Estimate]]:
    shipped = default(call, args.target)
    others = every(call, args.target) if args.all else best(call, args.target, args.most)
    yield model, rows, True, estimate(call, shipped, args.target)
    for config in others:
        if config != shipped:
            yield model, rows, False, estimate(call, config, args.target)


def line(model: str, rows: int, is_default: bool, found: Estimate, target: str) -> str:
    """One row of the report."""
    work, device = found.work, constants(target)
    registers = max(f.registers for f in found.facts)
    spilled = sum(f.spilled_bytes for f in found.facts)
    text = " ".join(f"{name}={value}" for name, value in found.config.items())
    return (
        f"{found.call.op.name:18}{model:8}{rows:5}{registers:5}{spilled:6}{work.shared_bytes:8}"
        f"{occupancy(work, device):4}{waves(work, device):7.2f}{in_flight_bytes(work, device):10.0f}"
        f"{found.us:9.1f}{found.floor_us:8.1f}{found.floor_us / found.us:9.0%}  "
        f"{'shipped: ' if is_default else ''}{text}"
    )


def draw(points: Sequence[tuple[str, Estimate]], target: str, dtype: str, path: Path) -> None:
    """Operations a second over operations a byte, below what the device can do."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    device = constants(target)
    peak, read = device.peak_tflops(DTYPES[dtype]), device.read_gbps
    figure, axes = pyplot.subplots(figsize=(10, 6.5))
    ridge = peak * 1e3 / read
    axes.plot([0.05, ridge, 20 * ridge], [0.05 * read / 1e3, peak, peak], color="black", linewidth=1.5)
    axes.annotate(f"{read:.0f} GB/s", (0.06, 0.06 * read / 1e3 * 1.5), rotation=36, fontsize=9)
    axes.annotate(f"{peak:.0f} TFLOP/s", (2 * ridge, peak * 1.15), fontsize=9)
    marks, palette = "osD^vPX*<>", pyplot.get_cmap("tab20")
    colors = [palette(number) for number in range(20)]
    names = sorted({found.call.op.name for _, found in points})
    for number, name in enumerate(names):
        mine = [(model, _place(found)) for model, found in points if found.call.op.name == name]
        color, mark = colors[number % 20], marks[number % len(marks)]
        for at, (model, (x, y)) in enumerate(mine):
            face = color if model == "llama3" else "none"
            axes.scatter(x, y, s=44, marker=mark, edgecolors=color, facecolors=face,
                         label=None if at else name)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s, predicted")
    title = f"Shipped configurations on {target} in {dtype}: predicted, not measured"
    axes.set_title(f"{title}\nfilled: Llama-3-8B, hollow: SmolLM2-135M")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def _place(found: Estimate) -> tuple[float, float]:
    moved, flops = found.call.op.cost(**named(found.call))
    return flops / moved, flops / found.us / 1e6


def main(arguments: Sequence[str] | None = None) -> list[Any]:
    """Compile, print, draw; returns what was estimated."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=TARGETS, default="sm_90")
    parser.add_argument("--ops", nargs="+", choices=[op.name for op in OPS])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--most", type=int, default=2, help="first choices of the model beside the default")
    parser.add_argument("--all", action="store_true", help="every configuration that may be tuned")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    print(HEAD)
    found = []
    for model, rows, is_default, one in estimates(args):
        found.append((model, rows, is_default, one))
        print(line(*found[-1], args.target), flush=True)
    shipped = [(model, one) for model, _, is_default, one in found if is_default]
    path = args.results / f"static_{args.target}.png"
    draw(shipped, args.target, args.dtype, path)
    print(f"drawn: {path}; times are predicted, nothing was measured")
    return found


if __name__ == "__main__":
    main()
