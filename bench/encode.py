"""Sentences through an encoder, trinfer against transformers in float32, interleaved in one process.

    python -m bench.encode --dtype bf16

Writes bench/results/<device>.json. No ratio is printed unless trinfer's kernels were launched and the mean
vectors of both sides point the same way, to a cosine of 0.999.
"""

import argparse
import datetime
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import trinfer
from bench.generate import DTYPES
from bench.machine import machine, results_path
from trinfer import backend, checkpoint
from trinfer.kernels import count_launches

HERE = Path(__file__).parent
SENTENCES = HERE.parent / "tests" / "data" / "sentences.txt"
LEAST_COSINE = 0.999


def batch_of(tokenizer: Any, rows: int, tokens: int) -> torch.Tensor:
    """Token ids [rows, tokens] of sentences, repeated to fill every row."""
    text = tokenizer(SENTENCES.read_text().replace("\n", " "), add_special_tokens=False).input_ids
    needed = rows * tokens
    return torch.tensor((text * (needed // len(text) + 1))[:needed]).view(rows, tokens)


@torch.no_grad()
def encode(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Mean vectors [rows, hidden] in float32."""
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.float().mean(1).cpu()


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Sentences a second of both sides, medians, their ratio and the least cosine between their vectors.

    Raises:
        SystemExit: the vectors differ, or no kernel was launched: then there is nothing to compare.
    """
    eager, tokenizer = checkpoint.load_model(args.model, torch.float32)
    eager.set_attn_implementation("eager")
    model = checkpoint.load_model(args.model, torch.float32)[0]
    engine = trinfer.init_inference(
        model, dtype=DTYPES[args.dtype], replace_with_kernel_inject=True, enable_cuda_graph=True
    )
    ids = batch_of(tokenizer, args.rows, args.tokens).to(engine.device)
    eager.to(engine.device).eval()
    with count_launches() as launches:
        ours = encode(engine, ids)
    if not launches:
        raise SystemExit("no kernel of trinfer was launched: nothing to compare; see: trinfer plan")
    cosine = float(torch.nn.functional.cosine_similarity(ours, encode(eager, ids)).min())
    if cosine < LEAST_COSINE:
        raise SystemExit(f"vectors differ (cosine {cosine:.5f}): a speed would mean nothing")
    times: dict[str, list[float]] = {"transformers": [], "trinfer": []}
    for _ in range(args.repeats):
        for name, side in (("transformers", eager), ("trinfer", engine)):
            start = time.perf_counter()
            encode(side, ids)
            times[name].append(time.perf_counter() - start)
    rates = {name: args.rows / statistics.median(values) for name, values in times.items()}
    return {
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "rows": args.rows,
        "tokens": args.tokens,
        "repeats": args.repeats,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{f"{name}_per_s": round(rate, 1) for name, rate in rates.items()},
        "ratio": round(rates["trinfer"] / rates["transformers"], 3),
        "least_cosine": round(cosine, 6),
    }


def save(result: dict[str, Any], folder: Path) -> Path:
    """Put the row into the device's file; a row for the same question replaces the older one."""
    device = backend.default_device()
    path = results_path(folder)
    content = json.loads(path.read_text()) if path.exists() else {}
    question = ("model", "dtype", "rows", "tokens")
    kept = [row for row in content.get("encode", []) if any(row[key] != result[key] for key in question)]
    new = result | {"machine": machine(device)}
    rows = sorted([*kept, new], key=lambda row: [row[key] for key in question])
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | {"encode": rows}, indent=1) + "\n")
    return path


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="minilm", help="a name or folder as in `trinfer plan`")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="trinfer's; the other side is fp32")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    result = compare(args)
    print("  ".join(f"{key} {value}" for key, value in result.items()))
    print(f"trinfer in {args.dtype} encodes {result['ratio']}x as fast as transformers in fp32")
    print(f"saved to {save(result, args.results)}")


if __name__ == "__main__":
    main()
