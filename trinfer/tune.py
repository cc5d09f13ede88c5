"""The launches that a model will make, found by a dry run, and the search over them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from trinfer import backend
from trinfer.autotune import Call, collect
from trinfer.cache import KVCache
from trinfer.compat import cache_key

# seconds; what is left over then is searched at the next start
BUDGET_S = 600.0
# sequences at once, beside one: their products are those of short prompts, but attention over the cache and
# the head have keys of their own
BATCHES = (2, 4, 8, 16)


def lengths(most: int) -> list[int]:
    """Lengths of prompts, one for every bucket of the keys, up to `most` tokens, which count too."""
    return sorted({*(1 << n for n in range(most.bit_length())), most})


def refuse_to_tune(model: Any) -> None:
    """Refuse what cannot be tuned, before the model is touched.

    Raises:
        ValueError: no kernel runs compiled here, or the model takes something else than tokens.
    """
    if backend.kind() not in ("gpu", "cpu"):
        raise ValueError(
            f"triton_autotune=True has nothing to measure where kernels run as {backend.kind()}; allowed: a "
            "GPU or a C compiler; leave triton_autotune out"
        )
    takes = getattr(model, "main_input_name", "input_ids")
    if takes != "input_ids":
        raise ValueError(
            f"triton_autotune=True tunes models of tokens, {type(model).__name__} takes {takes}; leave "
            "triton_autotune out"
        )


@torch.no_grad()
def dry_run(model: nn.Module, max_out_tokens: int) -> list[Call]:
    """Run `model` on prompts of every bucket and decode a step after each, also of several sequences; note
    what is launched.

    On the meta device nothing may run: call it where launches are caught.
    """
    run = _run_meta if next(model.parameters()).is_meta else _run
    with collect() as calls:
        for length in lengths(prompt_limit(model, max_out_tokens)):
            run(model, length, 1)
        for rows in BATCHES if _generates(model) else ():
            run(model, 1, rows)
    return list(calls.values())


def prompt_limit(model: Any, max_out_tokens: int) -> int:
    """The longest prompt that leaves room for the token whose step is noted."""
    config = getattr(model, "config", None)
    longest = getattr(config, "max_position_embeddings", None) or max_out_tokens
    return max(1, min(max_out_tokens, longest) - (2 if _generates(model) else 0))


def _generates(model: Any) -> bool:
    limits = getattr(model, "_trinfer_limits", None)
    return bool(getattr(model, "can_generate", bool)()) and not (limits and limits.why_not)


def _run(model: Any, length: int, rows: int) -> None:
    """Prompts, and of a model that generates one decode step: the one place that says how."""
    ids = torch.ones(rows, length, dtype=torch.long, device=next(model.parameters()).device)
    mask = torch.ones_like(ids)
    if _generates(model):
        options = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False, "num_beams": 1}
        model.generate(ids, attention_mask=mask, **options)
    else:
        model(input_ids=ids, attention_mask=mask)


def _run_meta(model: Any, length: int, rows: int) -> None:
    """The same without numbers: `generate` would look at its tokens."""
    ids = torch.ones(rows, length, dtype=torch.long, device="meta")
    if not _generates(model):
        model(input_ids=ids)
        return
    cache = {cache_key(): KVCache(length + 2)}
    model(input_ids=ids, use_cache=True, **cache)
    model(input_ids=ids[:, :1], use_cache=True, **cache)


def tune(
    model: nn.Module,
    max_out_tokens: int,
    budget_s: float = BUDGET_S,
    progress: Callable[[Iterable[Call]], Iterable[Call]] | None = None,
) -> list[Any]:
    """Search the configurations of every launch that `model` will make; a finding for each."""
    # the search launches kernels, which need triton
    from trinfer.autotune.search import search

    return search(dry_run(model, max_out_tokens), budget_s, progress or bar)


def bar(calls: Iterable[Call]) -> Iterator[Call]:
    """Go through calls behind a progress bar with the time left; none is shown for none."""
    # a heavy package, needed only here
    from tqdm.auto import tqdm

    calls = list(calls)
    with tqdm(total=len(calls), desc="tuning", unit="key", disable=not calls) as shown:
        for call in calls:
            shown.set_postfix_str(call.op.name)
            yield call
            shown.update()
