"""The mask function that transformers calls once per forward."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trinfer.compat import full_mask, is_plain_mask


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    *,
    config: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """What the attention of this forward must know of its padding.

    Returns:
        None where nothing is padded; int32 [B, 2], the first valid key and the one after the last, where the
        valid keys of each row are one run; else bool [B, 1, M, N], True where a query may attend.
    """
    sizes = (q_length, kv_length, q_offset, kv_offset)
    skips = (allow_is_causal_skip, allow_is_bidirectional_skip)
    if is_plain_mask(*sizes, config, local_size, use_vmap, *skips):
        if attention_mask is None:
            return None
        valid = visible_keys(attention_mask, kv_length, kv_offset)
        if bool(valid.all()):
            return None
        bounds = key_ranges(valid)
        if bounds is not None:
            return bounds
    return full_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        use_vmap=use_vmap,
        **kwargs,
    )


def visible_keys(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """The columns of a padding mask that belong to the present keys, bool [B, N]; a missing one is False."""
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    valid = attention_mask.to(torch.bool)
    return (pad(valid, (0, missing)) if missing > 0 else valid)[:, kv_offset : kv_offset + kv_length]


def key_ranges(valid: Tensor) -> Tensor | None:
    """int32 [B, 2] start and end of the valid keys of each row; None if a row has a hole."""
    count = valid.sum(-1)
    start = valid.int().argmax(-1)
    last = valid.shape[-1] - valid.flip(-1).int().argmax(-1)
    # a row without any valid key finds both searches at their first column
    end = torch.where(count > 0, last, start)
    if bool((end - start != count).any()):
        return None
    return torch.stack((start, end), -1).to(torch.int32)
