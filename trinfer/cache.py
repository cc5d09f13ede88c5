"""The key/value cache: pre-allocated buffers behind transformers' Cache interface."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class KVCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, G, N, D] views of buffers that are allocated at the first update.

    `keys` and `values` show the valid tokens only, as every transformers cache does. Buffers start with room
    for `expected` tokens and grow up to `limit`, so a cache handed back by generate can be continued.
    """

    # a compileable cache would make generate call torch.compile by itself
    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, limit: int, expected: int) -> None:
        super().__init__()
        self.limit, self.expected = limit, min(expected, limit)
        self.length = 0
        self._buffers: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for tensors like these; keys and values may differ in their last dimension."""
        self._allocate(key_states, value_states, max(self.expected, key_states.shape[-2]))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [B, G, M, D] and return all valid keys and values as views.

        Raises:
            ValueError: more tokens than `limit`.
        """
        start, end = self.length, self.length + key_states.shape[-2]
        if end > self.limit:
            raise ValueError(
                f"the cache holds {start} tokens and {end - start} more exceed max_out_tokens={self.limit}; "
                f"pass max_out_tokens={end} or more to init_inference"
            )
        rows = key_states.shape[0]
        if self._buffers is None or (start == 0 and rows != self._rows()):
            self.lazy_initialization(key_states, value_states)
        if rows != self._rows():
            raise ValueError(f"keys of {rows} rows do not fit a cache of {self._rows()}; use another cache")
        keys, values = self._room_for(end)
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        return self._show(end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset of the mask for `query_length` new tokens."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Valid tokens."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens it can grow to."""
        return self.limit

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -n tokens; a positive n, as older code passes it, is the length to keep."""
        left = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        if self._buffers is not None:
            self._show(max(min(left, self.length), 0))

    def reset(self) -> None:
        """Forget all tokens and keep the buffers."""
        self.crop(-self.length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self._take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._take(torch.arange(self._rows(), device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self._take(torch.arange(self._rows()).repeat_interleave(repeats))

    def _rows(self) -> int:
        return 0 if self._buffers is None else self._buffers[0].shape[0]

    def _allocate(self, keys: Tensor, values: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        shapes = [(*x.shape[:2], tokens, x.shape[-1]) for x in (keys, values)]
        self._buffers = keys.new_empty(shapes[0]), values.new_empty(shapes[1])
        return self._buffers

    def _room_for(self, tokens: int) -> tuple[Tensor, Tensor]:
        assert self._buffers is not None
        if tokens > self._buffers[0].shape[-2]:
            keys, values = self._buffers
            # doubling keeps the copies of a long conversation linear in its length
            self._allocate(keys, values, min(max(2 * tokens, self.expected), self.limit))
            self._fill(keys[:, :, : self.length], values[:, :, : self.length])
        return self._buffers

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        assert self._buffers is not None
        self.length = length
        keys, values = (buffer[:, :, :length] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values

    def _fill(self, keys: Tensor, values: Tensor) -> None:
        for shown, states in zip(self._show(self.length), (keys, values), strict=True):
            shown.copy_(states)

    def _take(self, rows: Tensor) -> None:
        if self._buffers is None:
            return
        taken = [x.index_select(0, rows.to(x.device)) for x in self._show(self.length)]
        if len(rows) != self._rows():
            self._allocate(taken[0], taken[1], self._buffers[0].shape[-2])
        self._fill(*taken)


class KVCache(Cache):
    """One `KVCacheLayer` per layer that stores something, made when its first keys arrive.

    Args:
        limit: tokens it may hold at most, max_out_tokens.
        expected: tokens to allocate at first, prompt + new tokens of the call; `limit` if not given.
    """

    def __init__(self, limit: int, expected: int | None = None) -> None:
        layer: Any = partial(KVCacheLayer, limit, limit if expected is None else expected)
        super().__init__(layer_class_to_replicate=layer)
        self.limit = limit

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens it can grow to; known before the first layer exists."""
        return self.limit


def bytes_per_token(batch_size: int, kv_shape: tuple[int, int, int], itemsize: int) -> int:
    """Cache bytes of one more token in every row; `kv_shape` is (layers, key/value heads, head_dim)."""
    layers, num_kv_heads, head_dim = kv_shape
    return 2 * batch_size * layers * num_kv_heads * head_dim * itemsize
