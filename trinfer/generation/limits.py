"""How many tokens a call may reach: max_out_tokens, or less where memory is short."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig

from trinfer import backend
from trinfer.cache import bytes_per_token
from trinfer.compat import kv_shape


@dataclass(frozen=True)
class Limits:
    """Tokens a call may reach, and whether the cache is trinfer's own.

    `waits_for` is the device type that a model kept on the host must be moved to first; `has_warned` says
    that the caller was told of a smaller limit; `why_not` is why the model no longer generates.
    """

    max_out_tokens: int
    min_out_tokens: int
    own_cache: bool
    waits_for: str = ""
    has_warned: bool = False
    why_not: str = ""


def check_length(prompt: int, new: int, limit: int) -> None:
    """The one place where max_out_tokens is kept.

    Raises:
        ValueError: naming prompt, new tokens and limit.
    """
    if prompt + new > limit:
        shorter = f"ask for at most {limit - prompt} new tokens, or " if limit - prompt > 0 and new else ""
        raise ValueError(
            f"prompt of {prompt} tokens + {new} new tokens = {prompt + new} exceed max_out_tokens={limit}; "
            f"{shorter}pass max_out_tokens={prompt + new} to init_inference"
        )


def limit_in_force(model: Any, config: GenerationConfig, batch_size: int) -> int:
    """max_out_tokens, or what fits into free memory if that is less, with one warning.

    Raises:
        ValueError: not even min_out_tokens fit.
    """
    limits, shape = model._trinfer_limits, kv_shape(model.config)
    if config.use_cache is False or shape is None:
        return limits.max_out_tokens
    rows = batch_size * max(config.num_beams or 1, config.num_return_sequences or 1)
    per_token = bytes_per_token(rows, shape, model.dtype.itemsize)
    free = backend.free_bytes(model.device) + model._trinfer_store.nbytes
    fitting = tokens_that_fit(limits, rows, per_token, free)
    if fitting < limits.max_out_tokens and not limits.has_warned:
        warnings.warn(
            f"max_out_tokens={limits.max_out_tokens} for {rows} rows needs "
            f"{limits.max_out_tokens * per_token} bytes, more than are free; the limit is now {fitting}",
            stacklevel=4,
        )
        model._trinfer_limits = replace(limits, has_warned=True)
    return fitting


def tokens_that_fit(limits: Limits, rows: int, per_token: int, free: int) -> int:
    """Tokens per row up to max_out_tokens whose cache fits into `free` bytes.

    Raises:
        ValueError: fewer than min_out_tokens.
    """
    fitting = min(free // per_token, limits.max_out_tokens)
    if fitting < limits.min_out_tokens:
        raise ValueError(
            f"a cache of min_out_tokens={limits.min_out_tokens} for {rows} rows needs "
            f"{limits.min_out_tokens * per_token} bytes and {free} are free; lower one of them"
        )
    return fitting
