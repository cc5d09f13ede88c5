"""One peer of `bench.generate`, in a process and a Python of its own, which need not have trinfer.

    python bench/peer.py NAME FOLDER DTYPE

FOLDER is a Hugging Face model. Every line on the input, {"ids": [[...], ...], "new_tokens": n}, is answered
with one line: {"prefill_ms": ..., "tokens_per_s": ...}. A new peer is an entry of PEERS.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[list[list[int]], int], dict[str, float]]


def transformers_peer(folder: str, dtype: str, attention: str, cache: str) -> Run:
    """Greedy decoding by transformers with other options than the eager code that is the yardstick."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.set_attn_implementation(attention)
    model.generation_config.eos_token_id = None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.times_s: list[float] = []

        def put(self, value: Any) -> None:
            self.times_s.append(time.perf_counter())

        def end(self) -> None:
            """Nothing is buffered."""

    def run(ids: list[list[int]], new_tokens: int) -> dict[str, float]:
        clock, given = Clock(), torch.tensor(ids, device=device)
        options = {"max_new_tokens": new_tokens, "do_sample": False, "cache_implementation": cache}
        model.generate(given, attention_mask=torch.ones_like(given), streamer=clock, **options)
        start, first, last = clock.times_s[0], clock.times_s[1], clock.times_s[-1]
        rate = len(ids) * (new_tokens - 1) / (last - first)
        return {"prefill_ms": (first - start) * 1e3, "tokens_per_s": rate}

    return run


PEERS: dict[str, Callable[[str, str], Run]] = {
    "transformers-sdpa": lambda folder, dtype: transformers_peer(folder, dtype, "sdpa", "dynamic"),
    # transformers compiles a model that decodes on a static cache, a minute for each new shape
    "transformers-compiled": lambda folder, dtype: transformers_peer(folder, dtype, "sdpa", "static"),
}


def main() -> None:
    """Answer line after line."""
    name, folder, dtype = sys.argv[1:]
    run = PEERS[name](folder, dtype)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run(request["ids"], request["new_tokens"])), flush=True)


if __name__ == "__main__":
    main()
