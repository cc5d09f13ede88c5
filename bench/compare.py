"""Kernels against what one would otherwise call, in one run: torch's own operators, or kernels apart.

    python -m bench.compare

Writes bench/results/<device>.json. A ratio is the median over rounds of theirs divided by ours.
"""

import argparse
import datetime
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.machine import machine, results_path
from bench.run import ratio, rounds
from trinfer import backend
from trinfer.cpu.record import record
from trinfer.kernels import (
    Norm,
    attention,
    gated_activation,
    gemv,
    list_launches,
    matmul,
    quant_gemv,
    quantize,
    rms_norm,
)

RESULTS = Path(__file__).parent / "results"
Sides = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Comparison:
    """What is compared, on how many threads of a CPU."""

    name: str
    threads: int
    sides: Callable[[], Sides]


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
    return x.to(backend.default_device(), dtype)


def _launch() -> Sides:
    x, weight = _random(1, 64), _random(64, 64)

    def long_way() -> Tensor:
        # while launches are listed every launcher checks, chooses and asks Triton
        with list_launches():
            return gemv(x, weight)

    return {"trinfer": lambda: gemv(x, weight), "the long way": long_way}


def _norm() -> Sides:
    x, weight = _random(128, 576), _random(576)
    return {
        "trinfer": lambda: rms_norm(x, weight, 1e-5),
        "torch": lambda: F.rms_norm(x, (576,), weight, 1e-5),
    }


def _linear_gelu() -> Sides:
    x, weight, bias = _random(128, 576), _random(1536, 576), _random(1536)
    return {
        "trinfer": lambda: matmul(x, weight, bias, act="gelu"),
        "torch": lambda: F.gelu(F.linear(x, weight, bias)),
    }


def _attention(dtype: torch.dtype) -> Callable[[], Sides]:
    def sides() -> Sides:
        q = _random(1, 9, 512, 64, dtype=dtype)
        k, v = _random(1, 3, 512, 64, dtype=dtype), _random(1, 3, 512, 64, dtype=dtype)
        return {
            "trinfer": lambda: attention(q, k, v, sm_scale=0.125, is_causal=True),
            "torch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        }

    return sides


def _replayed(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What `call` launches, recorded once: a launch list on a CPU, a CUDA graph on a GPU."""
    call()
    if backend.kind() == "cpu":
        with record() as recording:
            result = call()
        replay = recording.replay
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        replay = graph.replay

    def again() -> Tensor:
        replay()
        return result

    return again


def _token(dtype: torch.dtype, is_replayed: bool) -> Callable[[], Sides]:
    """All products of one SmolLM2-135M token: 30 layers and the head."""

    def sides() -> Sides:
        x, wide = _random(1, 576, dtype=dtype), _random(1, 1536, dtype=dtype)
        layers = [
            [_random(n, k, dtype=dtype) for n, k in ((576, 576), (192, 576), (192, 576), (576, 576))]
            + [_random(n, k, dtype=dtype) for n, k in ((1536, 576), (1536, 576), (576, 1536))]
            for _ in range(30)
        ]
        head = _random(49152, 576, dtype=dtype)

        def ours() -> Tensor:
            for q, k, v, o, gate, up, down in layers:
                gemv(x, (q, k, v))
                gemv(x, o, residual=x)
                gemv(x, (gate, up), act="silu", gated=True)
                gemv(wide, down, residual=x)
            return gemv(x, head)

        def theirs() -> Tensor:
            for q, k, v, o, gate, up, down in layers:
                _ = F.linear(x, q), F.linear(x, k), F.linear(x, v)
                _ = F.linear(x, o) + x
                _ = F.silu(F.linear(x, gate)) * F.linear(x, up)
                _ = F.linear(wide, down) + x
            return F.linear(x, head)

        return {"trinfer": _replayed(ours) if is_replayed else ours, "torch": theirs}

    return sides


def _gated() -> Sides:
    x, gate, up = _random(1, 576), _random(1536, 576), _random(1536, 576)
    return {
        "trinfer": lambda: gemv(x, (gate, up), act="silu", gated=True),
        "separate kernels": lambda: gated_activation(gemv(x, gate), gemv(x, up), "silu"),
    }


def _norm_qkv() -> Sides:
    x, weight = _random(1, 576), _random(576)
    qkv: tuple[Tensor, ...] = tuple(_random(n, 576) for n in (576, 192, 192))
    norm = Norm(weight, eps=1e-5)

    def apart() -> Tensor:
        normalised = rms_norm(x, weight, 1e-5)
        assert isinstance(normalised, Tensor)
        return gemv(normalised, qkv)

    return {"trinfer": lambda: gemv(x, qkv, norm=norm), "separate kernels": apart}


def _codes(bits: int, group: int | None) -> Callable[[], Sides]:
    def sides() -> Sides:
        x, weight = _random(1, 576), _random(49152, 576)
        q, scale = quantize(weight, bits=bits, group=group)
        return {
            "trinfer": lambda: quant_gemv(x, q, scale, group=group),
            "torch float32": lambda: F.linear(x, weight),
        }

    return sides


_HEADS = "causal attention, 9 query and 3 kv heads of 64, 512 tokens"
COMPARISONS = (
    Comparison("launch of a product 64x64 fp32, its kind known", 1, _launch),
    Comparison("rms_norm 128x576 fp32", 1, _norm),
    Comparison("linear and gelu 128x576x1536 fp32", 1, _linear_gelu),
    Comparison(f"{_HEADS}, fp32", 1, _attention(torch.float32)),
    Comparison(f"{_HEADS}, bf16", 1, _attention(torch.bfloat16)),
    Comparison("products of one SmolLM2-135M token fp32", 2, _token(torch.float32, False)),
    Comparison("products of one SmolLM2-135M token fp32, replayed", 2, _token(torch.float32, True)),
    Comparison("products of one SmolLM2-135M token bf16", 2, _token(torch.bfloat16, False)),
    Comparison("products of one SmolLM2-135M token bf16, replayed", 2, _token(torch.bfloat16, True)),
    Comparison("gated product 2x1536x576 fp32", 1, _gated),
    Comparison("norm and products of q, k, v 960x576 fp32", 1, _norm_qkv),
    Comparison("int8 product 49152x576", 1, _codes(8, None)),
    Comparison("int8 product 49152x576, groups of 64", 1, _codes(8, 64)),
    Comparison("int4 product 49152x576, groups of 64", 1, _codes(4, 64)),
    Comparison("int4 product 49152x576, groups of 32", 1, _codes(4, 32)),
)


def measure(comparison: Comparison, count: int) -> dict[str, Any]:
    """One row of results."""
    torch.set_num_threads(comparison.threads)
    sides = comparison.sides()
    times = rounds(sides, count)
    (theirs,) = sides.keys() - {"trinfer"}
    return {
        "name": comparison.name,
        "threads": comparison.threads,
        "us": round(statistics.median(times["trinfer"]), 1),
        "against": theirs,
        "against_us": round(statistics.median(times[theirs]), 1),
        "ratio": round(ratio(times, "trinfer", theirs), 3),
        "rounds": count,
        "date": now(),
    }


def now() -> str:
    """Date and time of a row."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def save(rows: list[dict[str, Any]], facts: dict[str, Any], folder: Path) -> Path:
    """Put rows into the device's file; a row of the same name replaces the older one."""
    path = results_path(folder)
    content = json.loads(path.read_text()) if path.exists() else {}
    table = {row["name"]: row for row in content.get("comparisons", [])}
    table |= {row["name"]: row | {"machine": facts} for row in rows}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | {"comparisons": list(table.values())}, indent=1) + "\n")
    return path


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="part of the names of the comparisons to run")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    facts = machine(backend.default_device())
    print("  ".join(f"{key}: {value}" for key, value in facts.items()))
    rows = []
    for comparison in COMPARISONS:
        if args.only in comparison.name:
            rows.append(row := measure(comparison, args.rounds))
            print(
                f"{row['ratio']:6.2f}x of {row['against']:27}{row['threads']} threads "
                f"{row['us']:9.1f} us  {row['name']}"
            )
    print(f"saved to {save(rows, facts, args.results)}")


if __name__ == "__main__":
    main()
