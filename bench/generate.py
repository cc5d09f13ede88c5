"""Greedy decoding through trinfer against transformers' own eager code, interleaved in one process.

    python -m bench.generate --model smollm2 --dtype fp32

Writes bench/results/<device>.json and a picture beside it. No ratio is printed unless trinfer's kernels were
launched and both sides say the same: float32 the same tokens; 16 bits, where rounding may choose the other of
two nearly equal tokens, the same perplexity of 1,000 tokens of prose within 0.5 %.
"""

import argparse
import datetime
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

import trinfer
from bench.machine import machine
from trinfer import backend, checkpoint
from trinfer.kernels.op import count_launches

HERE = Path(__file__).parent
PROSE = HERE.parent / "tests" / "data" / "prose.txt"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# of perplexity, between both sides reading one text in 16 bits
PERPLEXITY_LIMIT = 0.005
PERPLEXITY_TOKENS = 1000


class Clock(BaseStreamer):
    """Notes when generate hands over the prompt and each token."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """One time per call: the prompt, then each token."""
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered."""


def measure(model: Any, ids: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, float, float]:
    """Tokens, prefill in ms, decoding in tokens per second (the first token belongs to the prefill)."""
    clock = Clock()
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        streamer=clock,
    )
    start, first, last = clock.times_s[0], clock.times_s[1], clock.times_s[-1]
    return tokens[0, ids.shape[1] :].cpu(), (first - start) * 1e3, (new_tokens - 1) / (last - first)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """One row of results: both sides, run after run in turn.

    Raises:
        SystemExit: the tokens differ, or no kernel was launched: then there is nothing to compare.
    """
    dtype = DTYPES[args.dtype]
    eager, tokenizer = checkpoint.load_model(args.model, dtype)
    eager.set_attn_implementation("eager")
    engine = trinfer.init_inference(
        checkpoint.load_model(args.model, dtype)[0],
        dtype=dtype,
        replace_with_kernel_inject=True,
        max_out_tokens=max(PERPLEXITY_TOKENS, args.prompt_tokens + args.new_tokens),
    )
    eager.to(engine.device)
    # a token that ends the text early would make the two sides decode different lengths
    eager.generation_config.eos_token_id = engine.generation_config.eos_token_id = None
    text = tokenizer(PROSE.read_text(), return_tensors="pt").input_ids.to(engine.device)
    text = text[:, : min(PERPLEXITY_TOKENS, eager.config.max_position_embeddings)]
    ids = text[:, : args.prompt_tokens]
    with count_launches() as launches:
        tokens = measure(engine, ids, args.new_tokens)[0]
    if not launches:
        raise SystemExit("no kernel of trinfer was launched: nothing to compare; see: trinfer plan")
    expected = measure(eager, ids, args.new_tokens)[0]
    agreement = agree(eager, engine, text, tokens, expected)
    runs: dict[str, list[tuple[float, float]]] = {"transformers": [], "trinfer": []}
    for repeat in range(args.repeats):
        for name, model in (("transformers", eager), ("trinfer", engine)):
            _, prefill_ms, rate = measure(model, ids, args.new_tokens)
            runs[name].append((prefill_ms, rate))
            print(f"run {repeat + 1}  {name:12}  prefill {prefill_ms:7.1f} ms  {rate:7.2f} tokens/s")
    return row(args, runs) | agreement


def agree(
    eager: Any, engine: Any, text: torch.Tensor, tokens: torch.Tensor, expected: torch.Tensor
) -> dict[str, Any]:
    """How well both sides agree: on `expected`, the greedy tokens of transformers, or on a text.

    Raises:
        SystemExit: they do not, as the first lines of this file define it.
    """
    different = (tokens != expected).nonzero()
    equal_tokens = int(different[0]) if len(different) else len(expected)
    if eager.dtype == torch.float32:
        if equal_tokens < len(expected):
            raise SystemExit(
                f"tokens differ from transformers from token {equal_tokens} on: a speed would mean nothing"
            )
        return {"equal_tokens": equal_tokens}
    mean, other = mean_nll(eager, text), mean_nll(engine, text)
    difference = abs(math.expm1(other - mean))
    if not difference <= PERPLEXITY_LIMIT:
        raise SystemExit(
            f"perplexity differs from transformers' by {difference:.2%}: a speed would mean nothing"
        )
    return {"equal_tokens": equal_tokens, "perplexity_difference": round(difference, 5)}


@torch.no_grad()
def mean_nll(model: Any, text: torch.Tensor) -> float:
    """Mean negative log-likelihood of the tokens of a text behind its first."""
    logits = model(text).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, text[0, 1:]))


def row(args: argparse.Namespace, runs: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians of both sides and their ratio."""
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "batch": 1,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    for name, values in runs.items():
        prefill_ms, rates = zip(*values, strict=True)
        result[name] = {
            "prefill_ms": round(statistics.median(prefill_ms), 2),
            "tokens_per_s": round(statistics.median(rates), 2),
            "tokens_per_s_range": [round(min(rates), 2), round(max(rates), 2)],
        }
    for what, better in (("tokens_per_s", "trinfer"), ("prefill_ms", "transformers")):
        other = "transformers" if better == "trinfer" else "trinfer"
        result[f"{what}_ratio"] = round(result[better][what] / result[other][what], 3)
    return result


def save(result: dict[str, Any], facts: dict[str, Any], folder: Path) -> Path:
    """Put the row into the device's file; a row for the same question replaces the older one."""
    path = folder / f"{backend.device_slug(backend.default_device())}.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    question = ("model", "dtype", "batch", "prompt_tokens", "new_tokens")
    kept = [r for r in content.get("generate", []) if any(r[key] != result[key] for key in question)]
    rows = sorted([*kept, result | {"machine": facts}], key=lambda r: [r[key] for key in question])
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | {"generate": rows}, indent=1) + "\n")
    draw(rows, path.with_name(f"{path.stem}_generate.png"))
    return path


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars: decoding speed of both sides, one pair per row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(1.5 + 2.2 * len(rows), 4), layout="constrained")
    for offset, name, colour in ((-0.2, "transformers", "tab:gray"), (0.2, "trinfer", "tab:blue")):
        rates = [r[name]["tokens_per_s"] for r in rows]
        bars = axes.bar([x + offset for x in range(len(rows))], rates, 0.4, label=name, color=colour)
        axes.bar_label(bars, fmt="%.1f")
    axes.set_xticks(
        range(len(rows)), [f"{r['model']} {r['dtype']}\nx {r['tokens_per_s_ratio']}" for r in rows]
    )
    axes.set_ylabel("decoding, tokens per second, batch 1")
    axes.set_title(rows[0]["machine"]["device"], fontsize="small")
    axes.legend()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", default="smollm2", help="a name, folder or .gguf file as in `trinfer generate`"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    facts = machine(backend.default_device())
    print("  ".join(f"{key}: {value}" for key, value in facts.items()))
    result = compare(args)
    for name in ("transformers", "trinfer"):
        print(f"{name:12}  " + "  ".join(f"{key} {value}" for key, value in result[name].items()))
    print(
        f"equal tokens: {result['equal_tokens']} of {args.new_tokens}"
        + (f", perplexity within {result['perplexity_difference']:.2%}" if args.dtype != "fp32" else "")
    )
    print(
        f"trinfer decodes {result['tokens_per_s_ratio']}x and prefills {result['prefill_ms_ratio']}x as fast"
    )
    print(f"saved to {save(result, facts, args.results)}")


if __name__ == "__main__":
    main()
