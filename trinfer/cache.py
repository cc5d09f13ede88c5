"""The key/value cache: buffers that outlive a call, behind transformers' Cache interface."""

import copy
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class Buffers:
    """Memory for the keys [R, G, N, D] and values [R, G, N, Dv] of one layer.

    Keys and values in 8 bits come with a scale per token and head, float32 [R, G, N].
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


class Store:
    """The buffers of an engine, for a bucket of rows and max_out_tokens, lent from call to call.

    The system gives memory only to pages that are written. A cache that a caller keeps, keeps its buffers:
    the next call gets new ones. `generation` counts how often that happened: an address noted in an earlier
    one is void.
    """

    def __init__(self) -> None:
        self.rows, self.limit, self.generation = 0, 0, 0
        self._buffers: dict[int, Buffers] = {}
        self._borrower: weakref.ref[KVCache] | None = None

    def __deepcopy__(self, memo: Any) -> "Store":
        return Store()

    def __reduce__(self) -> Any:
        return Store, ()

    @property
    def nbytes(self) -> int:
        """Bytes that the next cache gets without a new allocation."""
        kept = self._borrower is not None and self._borrower() is not None
        held = [(b.keys, b.values) for b in self._buffers.values()]
        return 0 if kept else sum(x.numel() * x.element_size() for pair in held for x in pair)

    def lend(self, rows: int, limit: int) -> "KVCache":
        """An empty cache for `rows` sequences of up to `limit` tokens."""
        kept = self._borrower is not None and self._borrower() is not None
        if kept or rows > self.rows or limit > self.limit:
            self._renew(max(rows, self.rows), max(limit, self.limit))
        cache = KVCache(limit, self)
        self._borrower = weakref.ref(cache)
        return cache

    def owns(self, cache: "KVCache") -> bool:
        """True while the buffers of `cache` are the ones that this store hands out."""
        is_lent = self._borrower is not None and self._borrower() is cache
        return is_lent and all(layer.store is self for layer in cache.kv_layers)

    def adopt(self, cache: "KVCache", rows: int) -> None:
        """Take over the buffers of a cache that a caller kept and passes again."""
        if self.owns(cache):
            return
        layers = [layer for layer in cache.kv_layers if layer.buffers is not None]
        self._renew(rows, cache.limit)
        self.rows = min([self.rows, *(layer.capacity for layer in layers)])
        self._buffers = {layer.index: layer.buffers for layer in layers if layer.buffers is not None}
        self._borrower = weakref.ref(cache)
        for layer in cache.kv_layers:
            layer.store = self
        cache.made_by.store = self

    def buffers(self, index: int, keys: Tensor, values: Tensor) -> Buffers:
        """Those of layer `index`, for keys [B, G, M, D] and values [B, G, M, Dv] like these."""
        held = self._buffers.get(index)
        if held is None or not _fits(held, keys, values):
            if held is not None:
                self.generation += 1
            shapes = [(self.rows, x.shape[1], self.limit, x.shape[3]) for x in (keys, values)]
            held = Buffers(keys.new_empty(shapes[0]), values.new_empty(shapes[1]))
            self._buffers[index] = held
        return held

    def _renew(self, rows: int, limit: int) -> None:
        # a power of 2, so that slowly growing batches do not allocate each time
        self.rows, self.limit = 1 << (rows - 1).bit_length() if rows else 0, limit
        self._buffers = {}
        self.generation += 1


def _fits(held: Buffers, keys: Tensor, values: Tensor) -> bool:
    return all(
        (buffer.shape[1], buffer.shape[3], buffer.dtype, buffer.device)
        == (x.shape[1], x.shape[3], x.dtype, x.device)
        for buffer, x in ((held.keys, keys), (held.values, values))
    )


class KVCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, G, N, D] views of buffers that come at the first update.

    `keys` and `values` show the valid tokens only, as every transformers cache does.
    """

    # a compileable cache would make generate call torch.compile by itself
    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, limit: int, store: Store, index: int) -> None:
        super().__init__()
        self.limit, self.store, self.index = limit, store, index
        self.length = self.rows = 0
        self.buffers: Buffers | None = None

    def __deepcopy__(self, memo: Any) -> "KVCacheLayer":
        twin = KVCacheLayer(self.limit, Store(), self.index)
        memo[id(self)] = twin
        if self.buffers is not None:
            twin.store.rows, twin.store.limit = self.rows, self.limit
            keys, values = copy.deepcopy((self.keys, self.values), memo)
            assert keys is not None and values is not None
            twin.update(keys, values)
        return twin

    @property
    def capacity(self) -> int:
        """Rows that the buffers have room for."""
        return 0 if self.buffers is None else self.buffers.keys.shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take buffers for tensors like these; keys and values may differ in their last dimension."""
        self.buffers = self.store.buffers(self.index, key_states, value_states)
        self.rows = key_states.shape[0]
        self.is_initialized = True
        self.show(0)

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
        if self.buffers is None or (start == 0 and rows != self.rows):
            self._make_room(rows)
            self.lazy_initialization(key_states, value_states)
        if rows != self.rows:
            raise ValueError(f"keys of {rows} rows do not fit a cache of {self.rows}; use another cache")
        assert self.buffers is not None
        self.buffers.keys[:rows, :, start:end] = key_states
        self.buffers.values[:rows, :, start:end] = value_states
        return self.show(end)

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
        if self.buffers is not None:
            self.show(max(min(left, self.length), 0))

    def reset(self) -> None:
        """Forget all tokens and keep the buffers."""
        self.crop(-self.length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self._take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._take(torch.arange(self.rows, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self._take(torch.arange(self.rows).repeat_interleave(repeats))

    def show(self, length: int) -> tuple[Tensor, Tensor]:
        """Let `keys` and `values` be the first `length` tokens of the buffers."""
        assert self.buffers is not None
        self.length = length
        self.keys = self.buffers.keys[: self.rows, :, :length]
        self.values = self.buffers.values[: self.rows, :, :length]
        return self.keys, self.values

    def _make_room(self, rows: int) -> None:
        """Leave the store for one of its own where more rows come than it has."""
        if rows > self.store.rows:
            self.store = Store()
            self.store.rows, self.store.limit = rows, self.limit

    def _take(self, rows: Tensor) -> None:
        if self.buffers is None:
            return
        length = self.length
        keys, values = (x.index_select(0, rows.to(x.device)) for x in self.show(length))
        if len(rows) > self.capacity:
            self._make_room(len(rows))
            self.buffers = self.store.buffers(self.index, keys, values)
        self.rows = len(rows)
        for shown, states in zip(self.show(length), (keys, values), strict=True):
            shown.copy_(states)


class _Layers:
    """Makes the layers of a cache one after the other, as transformers meets them."""

    def __init__(self, limit: int, store: Store) -> None:
        self.limit, self.store, self.count = limit, store, 0

    def __call__(self) -> KVCacheLayer:
        self.count += 1
        return KVCacheLayer(self.limit, self.store, self.count - 1)


class KVCache(Cache):
    """One `KVCacheLayer` per layer that stores something, made when its first keys arrive.

    Args:
        limit: tokens it may hold at most, max_out_tokens.
        store: where its buffers come from; one of its own if none is given.
    """

    def __init__(self, limit: int, store: Store | None = None) -> None:
        self.made_by = _Layers(limit, store or Store())
        super().__init__(layer_class_to_replicate=self.made_by)  # type: ignore[arg-type]
        self.limit = limit

    @property
    def kv_layers(self) -> list[KVCacheLayer]:
        """The layers there are, by their own type."""
        return self.layers  # type: ignore[return-value]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens it can grow to; known before the first layer exists."""
        return self.limit

    def layer(self, index: int) -> KVCacheLayer:
        """Layer `index`, made now if it is not there yet."""
        while len(self.layers) <= index:
            self.layers.append(self.made_by())
        return self.layers[index]  # type: ignore[return-value]


def bytes_per_token(batch_size: int, kv_shape: tuple[int, int, int], itemsize: int) -> int:
    """Cache bytes of one more token in every row; `kv_shape` is (layers, key/value heads, head_dim)."""
    layers, num_kv_heads, head_dim = kv_shape
    return 2 * batch_size * layers * num_kv_heads * head_dim * itemsize
