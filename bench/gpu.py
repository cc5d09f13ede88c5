"""The parts of bench/gpu_run.sh: constants of the device, a search, whole models, and a summary.

    python -m bench.gpu calibrate|tune|models|summary --out FOLDER [--small]

Rows and constants go where TRINFER_AUTOTUNE_CACHE says. `--small` is a rehearsal: tiny models, short samples.
"""

import argparse
import inspect
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import trinfer
from bench.generate import measure as generate
from bench.machine import machine
from bench.run import DTYPES, MODELS
from trinfer import backend, tune
from trinfer.autotune import Call, collect, devices
from trinfer.autotune import measure as measuring
from trinfer.autotune.search import describe, search
from trinfer.kernels import OPS, count_launches
from trinfer.kernels.op import Op

SMALL = {"B": 1, "H": 4, "G": 2, "N": 128, "K": 64, "D": 32, "R": 32, "V": 512, "E": 4}
# rows of a launch: a token, a few sequences, prompts
ROWS = (1, 4, 16, 128, 1024)
FEW_ROWS = 16
# difference of the logits, by their RMS, that rounding in 16 bits may make
LOGITS_LIMIT = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}

SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}


def calibrate(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the constants of this device and keep them in the user's table."""
    device = backend.default_device()
    found = devices.calibrate(device)
    slug = backend.device_slug(device)
    devices.keep(slug if device.type == "cuda" else f"{slug} threads={torch.get_num_threads()}", found)
    print(json.dumps(asdict(found), indent=1))
    return {"slug": slug, "constants": asdict(found), "machine": machine(device)}


def calls_of(op: Op, sizes: dict[str, int], dtype: torch.dtype) -> Iterator[Call]:
    """The launches of an op, one of each key."""
    taken = inspect.signature(op.inputs).parameters
    many: tuple[int, ...] = ROWS if "M" in taken else (1,)
    if op.name.endswith("gemv") or op.name in ("lm_head", "router"):
        many = tuple(rows for rows in ROWS if rows <= FEW_ROWS)
    with collect() as calls, torch.no_grad():
        for rows in many:
            given = {name: size for name, size in (sizes | {"M": rows}).items() if name in taken}
            op.launcher(**op.inputs(**given, dtype=dtype, device=backend.default_device()))
    yield from calls.values()


def tune_ops(args: argparse.Namespace) -> dict[str, Any]:
    """Search the keys of both models' ops, op by op, so that no more arguments are held than those of one."""
    if args.small:
        measuring.SAMPLE_S = 1e-5
    models = [SMALL] if args.small else [MODELS["smollm2"], MODELS["llama3"]]
    ops = [op for op in OPS if not args.small or op.name in ("gemv", "rms_norm")]
    end, findings = time.monotonic() + args.budget, []
    for op in ops:
        for sizes in models:
            calls = list(calls_of(op, sizes, DTYPES[args.dtype]))
            # on the device at hand, whatever the shipped tables say
            found = search(calls, max(0.0, end - time.monotonic()), tune.bar, again=True)
            findings += [(f.status, f.row) for f in found]
            print("\n".join(describe(found)), flush=True)
    gains = [row["default_us"] / row["us"] for _, row in findings if row]
    measured = sum(status == "measured" for status, _ in findings)
    return {"keys": len(findings), "measured": measured, "least_gain": min(gains), "most_gain": max(gains)}


def model_of(shape: dict[str, Any], dtype: torch.dtype) -> LlamaForCausalLM:
    """A random model, made on the device."""
    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=4096, **shape)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(backend.default_device()):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def compare_model(name: str, shape: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Decode and prefill of transformers' eager code and of trinfer on one random model, in turn."""
    dtype, (prompt, new) = DTYPES[args.dtype], (16, 8) if args.small else (128, 64)
    model = model_of(shape, dtype)
    model.set_attn_implementation("eager")
    ids = torch.randint(4, shape["vocab_size"], (1, prompt), device=model.device)
    with torch.no_grad():
        expected = model(ids).logits.float()
    theirs = [generate(model, ids, new)[1:] for _ in range(args.repeats + 1)][1:]
    start = time.perf_counter()
    engine = trinfer.init_inference(
        model, dtype=dtype, replace_with_kernel_inject=True, max_out_tokens=prompt + new
    )
    with count_launches() as launches:
        actual = engine(ids).logits.float()
        generate(engine, ids, new)
    first_call_s = time.perf_counter() - start
    difference = float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    row = {"model": name, "difference": round(difference, 5), "first_call_s": round(first_call_s, 2)}
    if not launches or difference > LOGITS_LIMIT[dtype]:
        return row | {"refused": "no kernel was launched" if not launches else "the logits differ"}
    ours = [generate(engine, ids, new)[1:] for _ in range(args.repeats)]
    return row | _rates(model, theirs, ours, dtype)


def _rates(model: Any, theirs: list[Any], ours: list[Any], dtype: torch.dtype) -> dict[str, Any]:
    """The best of each side; what a step must read, and the share of the device's bandwidth that this is."""
    embedding = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    step_bytes = (sum(p.numel() for p in model.parameters()) - embedding) * dtype.itemsize
    best = {
        side: (min(ms for ms, _ in runs), max(rate for _, rate in runs))
        for side, runs in (("transformers", theirs), ("trinfer", ours))
    }
    bound = devices.current().read_gbps * 1e9 / step_bytes
    result: dict[str, Any] = {
        side: {"prefill_ms": round(ms, 2), "tokens_per_s": round(rate, 2)}
        for side, (ms, rate) in best.items()
    }
    return result | {
        "decode_ratio": round(best["trinfer"][1] / best["transformers"][1], 3),
        "prefill_ratio": round(best["transformers"][0] / best["trinfer"][0], 3),
        "bound_tokens_per_s": round(bound, 1),
        "of_bound": round(best["trinfer"][1] / bound, 3),
    }


def models(args: argparse.Namespace) -> dict[str, Any]:
    """Random models of two shapes, transformers' eager code against trinfer."""
    rows = {}
    for name, shape in ({"tiny": TINY} if args.small else SHAPES).items():
        rows[name] = compare_model(name, shape, args)
        print(json.dumps(rows[name], indent=1), flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows


def summary(args: argparse.Namespace) -> dict[str, Any]:
    """Join what the other parts left, and say in a line each how it went."""
    parts = {
        path.stem: json.loads(path.read_text())
        for path in sorted(args.out.glob("*.json"))
        if path.stem != "summary"
    }
    steps = (args.out / "steps.txt").read_text().split("\n") if (args.out / "steps.txt").exists() else []
    print("\n".join(step for step in steps if step))
    return {"steps": [step.split() for step in steps if step], **parts}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "calibrate": calibrate,
    "tune": tune_ops,
    "models": models,
    "summary": summary,
}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run one part and save what it found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="a rehearsal")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--budget", type=float, default=130.0, help="seconds of the search")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(arguments)
    result = PARTS[args.part](args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.part}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
