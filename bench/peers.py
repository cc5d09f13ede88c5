"""Kernels against torch's own operators (cuBLAS, SDPA and the rest on a GPU), in the sizes of two models.

    python -m bench.peers --out FOLDER

Both sides take turns on copies of the same arguments. No ratio is given where the results differ.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.run import DTYPES, MODELS, PROMPT, TOKEN, inputs
from trinfer import backend
from trinfer.autotune.measure import agree, host_seconds, recorded_on_gpu, rotation, tensors
from trinfer.autotune.records import Call
from trinfer.kernels import OPS

ROUNDS, SAMPLE_S = 9, 0.01
Operator = Callable[..., Tensor]


@dataclass(frozen=True)
class Peer:
    """What torch would be called for an op's own arguments, for how many rows."""

    op: str
    rows: int
    theirs: Operator

    def __str__(self) -> str:
        return f"{self.op}, {self.rows} rows"


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def _attention(q: Tensor, k: Tensor, v: Tensor, sm_scale: float, is_causal: bool = False) -> Tensor:
    y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=sm_scale, enable_gqa=True)
    return y.transpose(1, 2)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    return F.silu(gate) * up


PEERS = (
    Peer("gemv", TOKEN, _linear),
    Peer("gemv", 8, _linear),
    Peer("matmul", PROMPT, _linear),
    Peer("attention", PROMPT, _attention),
    Peer("decode_attention", TOKEN, _attention),
    Peer("rms_norm", PROMPT, _rms_norm),
    Peer("layer_norm", PROMPT, _layer_norm),
    Peer("softmax", PROMPT, functools.partial(torch.softmax, dim=-1)),
    Peer("gated_activation", PROMPT, _gated),
)


def arguments_of(peer: Peer, sizes: dict[str, int], dtype: str) -> dict[str, Any]:
    """The op's own arguments; without the residual, for which torch has no operator."""
    op = next(op for op in OPS if op.name == peer.op)
    # a causal mask of torch starts at the first key, one of trinfer ends at the last: as many keys as queries
    model = sizes | ({"N": peer.rows} if peer.op == "attention" else {})
    given = inputs(op, model, peer.rows, DTYPES[dtype], backend.default_device())
    given.pop("residual", None)
    return given


def measure(peer: Peer, sizes: dict[str, int], dtype: str, count: int = ROUNDS) -> dict[str, Any]:
    """One row: both medians and their ratio, or why there is none."""
    op = next(op for op in OPS if op.name == peer.op)
    given = arguments_of(peer, sizes, dtype)
    with torch.no_grad():
        ours, theirs = op.launcher(**given), peer.theirs(**given)
    row = {"op": peer.op, "rows": peer.rows, "dtype": dtype}
    if not agree([*tensors((ours,))][:1], [theirs]):
        return row | {"refused": "the results differ"}
    copies = [kwargs for _, kwargs in rotation(Call(op, None, (), given))]
    samplers = [_sampler(call, copies) for call in (op.launcher, peer.theirs)]
    times = [[sampler() for sampler in samplers] for _ in range(count)]
    us, torch_us = (statistics.median(side) for side in zip(*times, strict=True))
    moved, operations = op.cost(**given)
    return row | {
        "us": round(us, 2),
        "torch_us": round(torch_us, 2),
        "ratio": round(statistics.median(b / a for a, b in times), 3),
        "gb_per_s": round(moved / us / 1e3, 1),
        "tflop_per_s": round(operations / us / 1e6, 3),
    }


def _sampler(call: Callable[..., Any], copies: list[dict[str, Any]]) -> Callable[[], float]:
    """A function that measures once more; microseconds of a call."""

    def run(count: int) -> None:
        with torch.no_grad():
            for number in range(count):
                call(**copies[number % len(copies)])

    run(2)
    once = min(host_seconds(run, 1) for _ in range(3))
    repeats = min(200, max(1, round(SAMPLE_S / max(once, 1e-7))))
    seconds = (
        recorded_on_gpu(run, repeats) if torch.cuda.is_available() else lambda: host_seconds(run, repeats)
    )
    return lambda: seconds() / repeats * 1e6


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    head = f"{row['op']:18}{row['model']:9}{row['rows']:5} {row['dtype']:5}"
    if "refused" in row:
        return f"{head} no ratio: {row['refused']}"
    return (
        f"{head}{row['us']:10.1f} us{row['torch_us']:10.1f} us{row['ratio']:7.2f}x"
        f"{row['gb_per_s']:9.1f} GB/s{row['tflop_per_s']:9.2f} TFLOP/s"
    )


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    rows = []
    print(f"{'op':18}{'model':9}{'rows':>5} {'dtype':5}{'trinfer':>13}{'torch':>13}{'ratio':>8}")
    for peer in PEERS:
        for model in args.models:
            for dtype in args.dtypes:
                row = {"model": model} | measure(peer, MODELS[model], dtype, args.rounds)
                rows.append(row)
                print(line(row), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "peers.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
