"""Greedy decoding through trinfer against transformers' own eager code, interleaved in one process.

    python -m bench.generate --model smollm2 --dtype fp32
    python -m bench.generate --dtype bf16 --batch 8
    python -m bench.generate --dtype bf16 --competitors 1      # beside a process that keeps one core busy

trinfer records its steps (`enable_cuda_graph=True`). Between the runs a probe reads memory with all threads:
a step can take no less than its weights and its keys and values at that rate.

Writes bench/results/<device>.json and a picture beside it. No ratio is printed unless trinfer's kernels were
launched and both sides say the same: float32 the same tokens; 16 bits, where rounding may choose the other of
two nearly equal tokens, the same perplexity of 1,000 tokens of prose within 0.5 %.
"""

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

import trinfer
from bench.machine import machine, results_path
from trinfer import backend, checkpoint
from trinfer.cache import bytes_per_token
from trinfer.compat import kv_shape
from trinfer.kernels import count_launches

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
    rate = len(ids) * (new_tokens - 1) / (last - first)
    return tokens[:, ids.shape[1] :].cpu(), (first - start) * 1e3, rate


def step_bytes(model: Any, batch: int, tokens: int) -> int:
    """What one step must read: every weight but an untied embedding, keys and values of `tokens` tokens."""
    layers, num_kv_heads, head_dim = kv_shape(model.config)  # type: ignore[misc]
    size = model.dtype.itemsize
    weights = sum(p.numel() for p in model.parameters())
    if not model.config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel()
    return weights * size + bytes_per_token(batch, (layers, num_kv_heads, head_dim), size) * tokens


class Peer:
    """Another engine on the same model, in a process and a Python of its own: `bench/peer.py`.

    Raises:
        SystemExit: that Python cannot run it.
    """

    def __init__(self, name: str, python: str, folder: str, dtype: str) -> None:
        self.name = name
        command = [python, str(HERE / "peer.py"), name, folder, dtype]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        if self.process.stdout.readline() != "ready\n":
            reason = self.process.stderr.read().strip().splitlines() or ["it said nothing"]
            raise SystemExit(f"peer {name} does not run in {python}: {reason[-1]}")

    def measure(self, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
        """Prefill in ms, decoding in tokens per second."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"ids": ids.tolist(), "new_tokens": new_tokens}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["prefill_ms"], answer["tokens_per_s"]

    def end(self) -> None:
        """Stop the process."""
        self.process.kill()
        self.process.communicate()


@contextmanager
def peers_of(wanted: list[str], model: Any) -> Iterator[list[Peer]]:
    """The peers NAME=PYTHON, on a copy of `model` on disk, while the block runs."""
    peers: list[Peer] = []
    with tempfile.TemporaryDirectory() as folder:
        if wanted:
            model.save_pretrained(folder)
        try:
            for entry in wanted:
                name, _, python = entry.partition("=")
                dtype = str(model.dtype).removeprefix("torch.")
                peers.append(Peer(name, python or sys.executable, folder, dtype))
            yield peers
        finally:
            for peer in peers:
                peer.end()


@contextmanager
def competing(processes: int) -> Iterator[None]:
    """Processes that keep a core busy each, while the block runs."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


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
        enable_cuda_graph=True,
        max_out_tokens=max(PERPLEXITY_TOKENS, args.prompt_tokens + args.new_tokens),
    )
    eager.to(engine.device)
    # a token that ends the text early would make the two sides decode different lengths
    eager.generation_config.eos_token_id = engine.generation_config.eos_token_id = None
    text = tokenizer(PROSE.read_text(), return_tensors="pt").input_ids.to(engine.device)
    text = text[:, : min(PERPLEXITY_TOKENS, eager.config.max_position_embeddings)]
    ids = prompts(text, args.batch, args.prompt_tokens)
    with count_launches() as launches:
        tokens = measure(engine, ids, args.new_tokens)[0]
    if not launches:
        raise SystemExit("no kernel of trinfer was launched: nothing to compare; see: trinfer plan")
    expected = measure(eager, ids, args.new_tokens)[0]
    agreement = agree(eager, engine, text, tokens, expected)
    runs: dict[str, list[tuple[float, float]]] = {"transformers": [], "trinfer": []}
    probes = []
    with peers_of(args.peers, eager) as peers, competing(args.competitors):
        sides: dict[str, Any] = {"transformers": eager, "trinfer": engine}
        sides |= {peer.name: peer for peer in peers}
        for peer in peers:
            peer.measure(ids, args.new_tokens)
        for repeat in range(args.repeats):
            for name, side in sides.items():
                run = side.measure if isinstance(side, Peer) else partial(measure, side)
                found = run(ids, args.new_tokens)[-2:]
                runs.setdefault(name, []).append(found)
                print(f"run {repeat + 1}  {name:22}  prefill {found[0]:7.1f} ms  {found[1]:7.2f} tokens/s")
            probes.append(backend.read_gbps(engine.device))
    tokens = args.prompt_tokens + args.new_tokens // 2
    return row(args, runs, probes, step_bytes(engine, args.batch, tokens)) | agreement


def prompts(text: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """Rows [batch, tokens] from a text [1, N], each beginning a little later."""
    starts = [row * ((text.shape[1] - tokens) // max(1, batch)) for row in range(batch)]
    return torch.cat([text[:, start : start + tokens] for start in starts])


def agree(
    eager: Any, engine: Any, text: torch.Tensor, tokens: torch.Tensor, expected: torch.Tensor
) -> dict[str, Any]:
    """How well both sides agree: on `expected`, the greedy tokens of transformers, or on a text.

    Raises:
        SystemExit: they do not, as the first lines of this file define it.
    """
    different = (tokens != expected).any(0).nonzero()
    equal_tokens = int(different[0]) if len(different) else expected.shape[1]
    if eager.dtype == torch.float32:
        if equal_tokens < expected.shape[1]:
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


def row(
    args: argparse.Namespace, runs: dict[str, list[tuple[float, float]]], probes: list[float], step: int
) -> dict[str, Any]:
    """Medians of both sides, their ratio, and how near a step comes to reading its bytes."""
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "batch": args.batch,
        "competitors": args.competitors,
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
    result["read_gbps"] = round(statistics.median(probes), 1)
    result["step_bytes"] = step
    for name in runs:
        steps_per_s = result[name]["tokens_per_s"] / args.batch
        result[name]["share_of_read"] = round(steps_per_s * step / 1e9 / result["read_gbps"], 3)
    return result


def save(result: dict[str, Any], facts: dict[str, Any], folder: Path) -> Path:
    """Put the row into the device's file; a row for the same question replaces the older one."""
    path = results_path(folder)
    content = json.loads(path.read_text()) if path.exists() else {}
    question = ("model", "dtype", "batch", "competitors", "prompt_tokens", "new_tokens")
    kept = [r for r in content.get("generate", []) if any(r.get(key) != result[key] for key in question)]
    rows = sorted([*kept, result | {"machine": facts}], key=lambda r: [r.get(key, 0) for key in question])
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | {"generate": rows}, indent=1) + "\n")
    draw(rows, path.with_name(f"{path.stem}_generate.png"))
    return path


def situation(r: dict[str, Any]) -> str:
    """Batch and competitors of a row."""
    beside = f", {r['competitors']} busy beside" if r.get("competitors") else ""
    return f"batch {r['batch']}{beside}\n"


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
        range(len(rows)),
        [f"{r['model']} {r['dtype']}\n{situation(r)}x {r['tokens_per_s_ratio']}" for r in rows],
    )
    axes.set_ylabel("decoding, tokens per second")
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
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--competitors", type=int, default=0, help="processes that keep a core busy")
    parser.add_argument(
        "--peers", nargs="*", default=[], metavar="NAME[=PYTHON]",
        help="engines of bench/peer.py that join the run, each in the Python that has it",
    )  # fmt: skip
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    facts = machine(backend.default_device())
    print("  ".join(f"{key}: {value}" for key, value in facts.items()))
    result = compare(args)
    for name in ("transformers", "trinfer", *(peer.partition("=")[0] for peer in args.peers)):
        print(f"{name:22}  " + "  ".join(f"{key} {value}" for key, value in result[name].items()))
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
