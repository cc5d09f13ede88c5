"""Prefill and decode step of a whole model as launches: embedding, blocks, final norm, head, token choice."""

import copy
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trinfer.cache import Buffers, KVCache, Store
from trinfer.graphs import Graphs, Pieces
from trinfer.kernels.advance import advance
from trinfer.kernels.attention import attention
from trinfer.kernels.decode_attention import decode_attention
from trinfer.kernels.embedding import Table, embedding
from trinfer.kernels.heads import Prologue, flat_heads
from trinfer.kernels.lm_head import MAX_ROWS, lm_head
from trinfer.kernels.qkv_post import qkv_post
from trinfer.kernels.splits import split_scratch
from trinfer.layers import records
from trinfer.layers.attention import rotary_table
from trinfer.layers.block import (
    Parameters,
    block,
    heads_of,
    norm_at,
    parameters,
    score_options,
)
from trinfer.layers.embedding import check_ids
from trinfer.step.workspace import Workspace

# rotary embeddings whose frequencies depend on how long the sequence is
LENGTH_DEPENDENT = {"dynamic", "longrope"}
# a prompt of up to so many tokens is recorded when its shape comes again: then no launch waits for Python.
# Every recording holds the hidden states of all layers, which bounds its size
RECORDED_TOKENS = 512


class Layer(NamedTuple):
    """What a layer reads and writes in the calls that share a cache."""

    parameters: Parameters
    prologue: Prologue
    buffers: Buffers


class Decoder:
    """Generation of one model by launches alone; its buffers and recordings last from call to call.

    A call is `begin`, `prefill`, any number of `step`, `finish`. A copied or unpickled decoder starts anew.

    Args:
        names: what the plan found around the layers.
        is_recorded: record a step once per batch size and replay it (`enable_cuda_graph`).
    """

    # end tokens that a step can look for
    max_eos = 16

    def __init__(self, names: records.Decoder, is_recorded: bool, store: Store | None = None) -> None:
        self.names, self.is_recorded = names, is_recorded
        self.store, self.graphs = store or Store(), Graphs()
        self._forget()
        # a context manager around every prefill and step, such as one that takes the time
        self.clock: Callable[[], Any] | None = None
        self._addresses: tuple[Any, ...] = ()
        self._shape: tuple[Any, ...] = ()

    def __deepcopy__(self, memo: Any) -> "Decoder":
        return Decoder(self.names, self.is_recorded, copy.deepcopy(self.store, memo))

    def __reduce__(self) -> Any:
        return Decoder, (self.names, self.is_recorded, self.store)

    def is_length_dependent(self, model: nn.Module) -> bool:
        """True if the same position turns differently in a longer sequence."""
        rotary = model.get_submodule(self.names.rotary) if self.names.rotary else None
        return any(_depends_on_length(rotary, kind) for kind in self.names.rotary_kinds)

    def begin(self, model: nn.Module, cache: KVCache, rows: int) -> None:
        """Make everything ready for `rows` sequences in `cache`; recordings stay if no address changed."""
        addresses = tuple([(p.data_ptr(), p.dtype) for p in model.parameters()])
        if addresses != self._addresses:
            self._bind(model)
            self._addresses = addresses
        self.store.adopt(cache, rows)
        self._take_buffers(cache, rows)
        shape = (self.store.generation, self.store.rows, self.store.limit)
        if shape != self._shape:
            self._forget()
            self.workspace = self._allocate(self.store.rows, self.store.limit)
            self.prologues = self._prologues()
            self._shape = shape
        buffers: list[Any] = [layer.buffers for layer in cache.kv_layers]
        parts = (self.parameters, self.prologues, buffers)
        self.layers = [Layer(*of_layer) for of_layer in zip(*parts, strict=True)]
        # whoever called holds it; a decoder that did would keep the buffers from the next call
        self.cache: Any = weakref.proxy(cache)
        self.rows = rows

    def prefill(
        self, ids: Tensor, sequences: Tensor, start: Tensor | None, eos: Tensor | None, length: int
    ) -> Tensor:
        """Read the tokens that the cache does not hold yet, and choose the next one.

        Args:
            ids: [B, M], these tokens.
            sequences: [B, P], all tokens so far.
            start: [B] int32, the first key of each row that is not padding; None where nothing is padded.
            eos: [E] int64, the tokens that end a sequence; None for none.
            length: tokens that a row may reach in this call.

        Returns:
            [B, V], the logits of the last token of each row; overwritten by the next step.
        """
        check_ids(ids, self.table.shape[0])
        w, rows, end = self.workspace, self.rows, self.cache.get_seq_length() + ids.shape[1]
        self._fill_tables(end, length)
        self._start(sequences, start, eos, end)
        if start is not None and ids.shape[1] == end:
            last = self._packed(ids, start)
        else:
            last = self._dense(ids, end, w.kv_range[:rows] if start is not None else None)
        self._head(last, rows, True)
        self._length = end
        return w.logits[:rows]

    def step(self, pad: int, has_logits: bool) -> Tensor | None:
        """Append the chosen tokens, run the model on them and choose the next; [B, V] logits if wanted.

        They, and the choice in `workspace.token`, are overwritten by the next step.
        """
        launch = self.launch(pad, has_logits)
        if self.is_recorded:
            w = self.workspace
            state = (w.token, w.finished, w.kv_range, w.column, w.sequences)
            self.graphs.run((self.rows, pad, has_logits), launch, state)
        else:
            launch()
        self._length += 1
        return self.workspace.logits[: self.rows] if has_logits else None

    def finish(self, surplus: int = 0) -> None:
        """Let the cache show what it holds now, without the last `surplus` tokens."""
        for layer in self.cache.kv_layers:
            layer.show(self._length - surplus)

    def choose(self, tokens: Tensor) -> None:
        """Let the next step append these tokens [B] instead of the most likely ones."""
        self.workspace.token[: self.rows].copy_(tokens)

    def append(self, pad: int) -> Tensor:
        """Append the chosen tokens without running the model; all sequences, [B, S]."""
        self._advance(self.rows, pad)
        return self.workspace.sequences[: self.rows]

    def launch(self, pad: int, has_logits: bool) -> Callable[[], None]:
        """The launches of one step of the present rows."""
        return partial(self._launch, self.rows, pad, has_logits)

    def _launch(self, rows: int, pad: int, has_logits: bool) -> None:
        """The launches of one step."""
        w = self.workspace
        self._advance(rows, pad)
        x = self._embed(w.token[:rows], {"kv_range": w.kv_range[:rows]}, w.hidden[:rows])
        for layer in self.layers:
            x = block(layer.parameters, x, partial(self._attend_step, layer, rows), out=x)
        self._head(x, rows, has_logits)

    def _advance(self, rows: int, pad: int) -> None:
        w = self.workspace
        advance(
            w.token[:rows],
            w.finished[:rows],
            w.kv_range[:rows],
            w.sequences[:rows],
            w.column[:rows],
            w.eos,
            pad=pad,
        )

    def _embed(self, ids: Tensor, rows: dict[str, Tensor], out: Tensor | None = None) -> Tensor:
        """States before the first layer; `rows` says where the position table is read (see `Table`)."""
        scale, norm, positions = self.scale, self.embedding_norm, None
        if self.positions is not None:
            positions = Table(self.positions, offset=self.names.position_offset, **rows)
        return embedding(ids, self.table, scale=scale, positions=positions, norm=norm, out=out)

    def _head(self, x: Tensor, rows: int, has_logits: bool) -> None:
        """Logits and most likely tokens of `rows` rows of hidden states."""
        w, names = self.workspace, self.names
        for first in range(0, rows, MAX_ROWS):
            part = slice(first, min(rows, first + MAX_ROWS))
            lm_head(
                x[part],
                self.head.weight,
                self.head.bias,
                norm=self.final_norm,
                scale=names.logit_scale,
                softcap=names.logit_cap,
                has_logits=has_logits,
                logits=w.logits[part] if has_logits else None,
                scratch=w.argmax[2 * part.start : 2 * part.stop],
                out=w.token[part],
            )

    def _attend_step(self, layer: Layer, rows: int, qkv: Tensor) -> Tensor:
        w, (p, prologue, buffers) = self.workspace, layer
        q, k, v = heads_of(p, qkv[:, None])
        o = decode_attention(
            q,
            buffers.keys[:rows],
            buffers.values[:rows],
            kv_range=w.kv_range[:rows],
            new=(k, v),
            prologue=prologue,
            scratch=(w.partials, w.tickets),
            **score_options(p),
        )
        return o.view(rows, -1)

    def _dense(self, ids: Tensor, end: int, kv_range: Tensor | None) -> Tensor:
        """Hidden states of the last token of each row [B, K]; every row computes all its tokens."""
        B, M = ids.shape
        positions = torch.arange(end - M, end, dtype=torch.int32, device=ids.device).expand(B, M)
        first = 0 if kv_range is None else kv_range[:, :1]

        def attend(columns: Tensor, layer: Layer, qkv: Tensor) -> Tensor:
            p, prologue, buffers = layer
            q, k, v = (flat_heads(x) for x in heads_of(p, qkv.view(B, M, -1)))
            keys, values = buffers.keys[:B, :, :end], buffers.values[:B, :, :end]
            q = qkv_post(q, k, v, keys, values, columns, prologue, kv_range=kv_range)
            o = attention(q, keys, values, is_causal=True, kv_range=kv_range, **score_options(p))
            return o.view(B * M, -1)

        def states(inputs: Any) -> Tensor:
            tokens, columns, places = inputs
            x = self._embed(tokens.flatten(), {"ids": places})
            return self._blocks(x, partial(attend, columns)).view(B, M, -1)[:, -1]

        inputs = (ids, positions, (positions - first).clamp(min=0).flatten())
        key = (B, M, end, kv_range is None)
        came = key in self._prompts
        self._prompts.append(key)
        # heads that do not lie evenly are copied on the way, which no recording holds
        is_even = all(p.record.attention.qkv_layout in ("concat", "heads") for p in self.parameters)
        if came and is_even and self.is_recorded and B * M <= RECORDED_TOKENS:
            return self._prefills.run(states, inputs, key)
        return states(inputs)

    def _packed(self, ids: Tensor, start: Tensor) -> Tensor:
        """As `_dense` from an empty cache, with the tokens that are not padding side by side in one row."""
        B, M = ids.shape
        counts = M - start
        ends = counts.cumsum(0, dtype=torch.int32)
        q_range = torch.stack((ends - counts, ends), 1)
        sequence, column = (torch.arange(M, device=ids.device) >= start[:, None]).nonzero(as_tuple=True)
        rows, positions = sequence.to(torch.int32), column.to(torch.int32)[None]
        kv_range, most = self.workspace.kv_range[:B], int(counts.max())

        def attend(layer: Layer, qkv: Tensor) -> Tensor:
            p, prologue, buffers = layer
            q, k, v = (flat_heads(x) for x in heads_of(p, qkv[None]))
            keys, values = buffers.keys[:B, :, :M], buffers.values[:B, :, :M]
            q = qkv_post(q, k, v, keys, values, positions, prologue, kv_range=kv_range, rows=rows)
            ranges: dict[str, Any] = {"kv_range": kv_range, "q_range": q_range, "max_queries": most}
            o = attention(q, keys, values, is_causal=True, **ranges, **score_options(p))
            return o.view(len(rows), -1)

        x = self._embed(ids[sequence, column], {"ids": column - start[sequence]})
        return self._blocks(x, attend)[ends.long() - 1]

    def _blocks(self, x: Tensor, attend: Callable[[Layer, Tensor], Tensor]) -> Tensor:
        for layer in self.layers:
            x = block(layer.parameters, x, partial(attend, layer), out=x)
        return x

    def _prologues(self) -> list[Prologue]:
        """What each layer does to its heads before they attend."""
        prologues = []
        for p, kind in zip(self.parameters, self.names.rotary_kinds, strict=True):
            heads, prologue = p.record.attention, Prologue()
            if heads.qk_norm == "head" and heads.norm:
                assert p.query_norm and p.key_norm
                norms = (p.query_norm.weight, p.key_norm.weight)
                prologue = Prologue(*norms, eps=heads.norm.eps, weight_offset=heads.norm.offset)
            if heads.rotary != "none":
                cos, sin = self.workspace.tables[kind]
                prologue = prologue._replace(cos=cos, sin=sin, interleaved=heads.rotary == "interleaved")
            prologues.append(prologue)
        return prologues

    def _forget(self) -> None:
        """Drop every recording: an address has changed."""
        self.graphs.clear()
        self._prefills = Pieces(2)
        self._prompts: deque[Any] = deque(maxlen=16)

    def _bind(self, model: nn.Module) -> None:
        """Look up every tensor of the model that a step reads."""
        names = self.names
        self._forget()
        layers = [model.get_submodule(path) for path in names.layers]
        pairs = zip(layers, names.blocks, strict=True)
        self.parameters = [parameters(layer, record) for layer, record in pairs]
        self.table = attrgetter(names.embedding)(model).weight
        self.positions = attrgetter(names.positions)(model).weight if names.positions else None
        self.embedding_norm = norm_at(model, names.embedding_norm)
        scale = names.embedding_scale
        self.scale = float(torch.tensor(scale, dtype=self.table.dtype)) if names.is_scale_rounded else scale
        self.head: Any = model.get_submodule(names.head)
        self.final_norm = norm_at(model, names.final_norm)
        # a copy: transformers' own keeps the longest length it has seen
        self.rotary: Any = copy.deepcopy(model.get_submodule(names.rotary)) if names.rotary else None
        self._shape = ()

    def _take_buffers(self, cache: KVCache, rows: int) -> None:
        """Keys and values of every layer, from the store."""
        for index, p in enumerate(self.parameters):
            layer, heads = cache.layer(index), p.record.attention
            if layer.buffers is None or (layer.length == 0 and layer.rows != rows):
                like = self.table.new_empty((rows, heads.num_kv_heads, 0, heads.head_dim))
                layer.lazy_initialization(like, like)
            if layer.rows != rows:
                raise ValueError(f"{rows} rows do not fit a cache of {layer.rows}; use another cache")

    def _allocate(self, rows: int, length: int) -> Workspace:
        empty, device = partial(torch.empty, device=self.table.device), self.table.device
        heads = [p.record.attention for p in self.parameters]
        most, dim = max(names.num_heads for names in heads), max(names.head_dim for names in heads)
        partials, tickets = split_scratch(rows, most, dim, device=device)
        positions = torch.arange(min(length, self.names.max_positions or length), device=device)
        kinds = set(self.names.rotary_kinds) if self.rotary else ()
        return Workspace(
            token=torch.zeros(rows, dtype=torch.int64, device=device),
            finished=torch.zeros(rows, dtype=torch.uint8, device=device),
            kv_range=torch.zeros(rows, 2, dtype=torch.int32, device=device),
            sequences=empty(rows, length + 1, dtype=torch.int64),
            column=torch.zeros(rows, dtype=torch.int64, device=device),
            eos=empty(self.max_eos, dtype=torch.int64),
            hidden=empty(rows, self.table.shape[1], dtype=self.table.dtype),
            logits=empty(rows, self.head.weight.shape[0], dtype=self.table.dtype),
            partials=partials,
            tickets=tickets,
            argmax=torch.zeros(2 * rows, dtype=torch.int64, device=device),
            tables={kind: self._rotary_rows(positions, kind) for kind in kinds},
        )

    def _start(self, sequences: Tensor, start: Tensor | None, eos: Tensor | None, end: int) -> None:
        """Set everything that the steps of a call count on."""
        w, rows = self.workspace, self.rows
        w.finished.zero_()
        w.kv_range[:rows, 0] = 0 if start is None else start
        w.kv_range[:rows, 1] = end
        w.column.fill_(sequences.shape[1])
        w.sequences[:rows, : sequences.shape[1]] = sequences
        w.eos.fill_(-1)
        if eos is not None:
            w.eos[: len(eos)] = eos

    def _fill_tables(self, prompt: int, length: int) -> None:
        """Rotary rows that depend on the length reached when they are used: for a prompt, for each token."""
        device = self.table.device
        for kind, (cos, sin) in self.workspace.tables.items():
            if not _depends_on_length(self.rotary, kind):
                continue
            # a short sequence makes the module forget the longest that it has seen
            self._rotary_rows(torch.zeros(1, dtype=torch.int64, device=device), kind)
            for positions in (
                torch.arange(prompt, device=device),
                *torch.arange(prompt, length, device=device),
            ):
                rows = positions.reshape(-1)
                cos[rows], sin[rows] = self._rotary_rows(rows, kind)

    def _rotary_rows(self, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Rows of the rotary table as the kernels read them."""
        heads = next(b.attention for b in self.names.blocks if b.attention.rotary != "none")
        told = {"layer_type": kind} if kind else {}
        found = self.rotary(self.table[:1], position_ids=positions[None], **told)
        cos, sin = rotary_table(heads, *found)
        return cos[0].contiguous(), sin[0].contiguous()


def _depends_on_length(rotary: Any, kind: str) -> bool:
    found = getattr(rotary, "rope_type", "")
    return (found.get(kind) if isinstance(found, dict) else found) in LENGTH_DEPENDENT
