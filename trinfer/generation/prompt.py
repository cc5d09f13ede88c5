"""Whether the decode step of launches can take a call, and what its prefill is given."""

from typing import Any

import torch
from torch import Tensor

from trinfer.cache import KVCache
from trinfer.compat import cache_key, has_user_hooks
from trinfer.layers.mask import key_ranges


def prompt_of(model: Any, input_ids: Tensor, config: Any, criteria: Any, kwargs: dict[str, Any]) -> Any:
    """The arguments of `step.Decoder.prefill`, or None where the model's own forward must run.

    Launches take token ids whose padding, if any, is on the left, with the positions that follow from it.
    """
    decoder, cache = model._trinfer_decoder, kwargs.get(cache_key())
    if decoder is None or not isinstance(cache, KVCache) or input_ids.shape[1] == 0:
        return None
    if kwargs.get("inputs_embeds") is not None:
        return None
    if getattr(config, "prefill_chunk_size", None) is not None or has_user_hooks(model):
        return None
    mask, device = kwargs.get("attention_mask"), model.device
    past, columns = cache.get_seq_length(), input_ids.shape[1]
    total = getattr(config, "_mask_length", past + columns) if mask is None else mask.shape[-1]
    # all tokens may be given again, or only those that the cache does not hold
    if mask is not None and mask.dim() != 2 or total not in (columns, past + columns) or total <= past:
        return None
    start = None if mask is None else _start(mask.to(device))
    if start is not None and (len(start) == 0 or decoder.is_length_dependent(model)):
        return None
    if not _follow(kwargs.get("position_ids"), start, total):
        return None
    most = total + max(1, criteria.max_length - columns) if criteria.max_length else cache.limit + 1
    if decoder.names.max_positions is not None and most - 1 > decoder.names.max_positions:
        return None
    return {
        "ids": input_ids[:, past - total :].to(device),
        "sequences": input_ids.to(device),
        "start": start,
        "length": most - 1,
    }


def _follow(positions: Tensor | None, start: Tensor | None, total: int) -> bool:
    """True if the positions of the last of `total` tokens are those that count from the start of each row."""
    if positions is None:
        return True
    if positions.dim() != 2 or positions.shape[1] > total:
        return False
    columns = torch.arange(total - positions.shape[1], total, device=positions.device)[None]
    if start is None:
        return bool((positions == columns).all())
    start = start.to(positions.device)[:, None]
    return bool(((positions == columns - start) | (columns < start)).all())


def _start(mask: Tensor) -> Tensor | None:
    """int32 [B], the first valid column of each row; None without padding, empty if it is not on the left."""
    valid = mask.bool()
    if bool(valid.all()):
        return None
    ranges = key_ranges(valid)
    if ranges is None or bool((ranges[:, 1] != mask.shape[1]).any()):
        return mask.new_empty(0)
    return ranges[:, 0]
