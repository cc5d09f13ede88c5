"""The loop of greedy decoding and sampling, over one of two forwards: launches alone, or the model's own."""

import inspect
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from trinfer.cache import KVCache
from trinfer.compat import cache_key

# a GPU is asked this seldom whether all sequences have ended: what it computes beyond is cut off
CHECK_EVERY = 16


class Forward(Protocol):
    """Logits of the prompt, then of one token per row after the other."""

    cache: KVCache

    def prefill(self) -> Tensor:
        """[B, V] after the prompt."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """[B, V] after these tokens [B]."""
        ...

    def finish(self) -> None:
        """Called once, after the last step."""


class ModelForward:
    """The model's own forward, with positions and padding mask carried from step to step."""

    def __init__(
        self, model: Any, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> None:
        self.model, self.input_ids, self.config, self.kwargs = model, input_ids, config, model_kwargs
        self.key = cache_key()
        self.cache = model_kwargs[self.key]

    def prefill(self) -> Tensor:
        """The prompt, prepared by transformers."""
        outputs = self.model._prefill(self.input_ids, self.config, self.kwargs, is_first_iteration=True)
        self.mask: Tensor | None = self.kwargs.get("attention_mask")
        self.positions = self._positions()
        return outputs.logits[:, -1]

    def step(self, tokens: Tensor) -> Tensor:
        """One token per row."""
        inputs = {"input_ids": tokens[:, None], self.key: self.cache, "use_cache": True, "return_dict": True}
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], -1)
            inputs["attention_mask"] = self.mask
        if self.positions is not None:
            inputs["position_ids"] = self.positions
            self.positions = self.positions + 1
        device = self.model.device
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        return self.model(**moved).logits[:, -1]

    def finish(self) -> None:
        """The cache has followed every step."""

    def _positions(self) -> Tensor | None:
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            return None
        given = self.kwargs.get("position_ids")
        if given is not None:
            return given[:, -1:] + 1
        if self.mask is not None:
            return self.mask.long().sum(-1, keepdim=True)
        return self.input_ids.new_full((1, 1), self.cache.get_seq_length())


class Launches:
    """The decode step of launches.

    Args:
        decoder: a `step.Decoder`.
        prompt: what its `prefill` takes.
    """

    def __init__(self, model: Any, decoder: Any, cache: KVCache, prompt: dict[str, Any]) -> None:
        self.decoder, self.cache, self.prompt = decoder, cache, prompt
        self.clock: Any = decoder.clock or nullcontext
        decoder.begin(model, cache, len(prompt["ids"]))

    def prefill(self, eos: Tensor | None = None) -> Tensor:
        """The prompt; `eos` are tokens that end a sequence."""
        with self.clock():
            return self.decoder.prefill(**self.prompt, eos=eos)

    def step(self, tokens: Tensor) -> Tensor:
        """One token per row."""
        self.decoder.choose(tokens)
        with self.clock():
            return self.decoder.step(0, True)

    def advance(self, pad: int) -> None:
        """One token per row: the most likely ones."""
        with self.clock():
            self.decoder.step(pad, False)

    def finish(self) -> None:
        """Let the cache show its tokens."""
        self.decoder.finish()


def is_plain(processors: Any, criteria: Any, config: GenerationConfig, most_eos: int) -> bool:
    """True where the next token is the most likely one and only end tokens or the length end a sequence."""
    wants = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    known = all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria)
    eos = end_tokens(criteria)
    is_known = known and criteria.max_length is not None and (eos is None or len(eos) <= most_eos)
    return is_known and not (config.do_sample or wants or processors)


def end_tokens(criteria: Any) -> Tensor | None:
    """The tokens that end a sequence, [E]."""
    return next((c.eos_token_id.flatten() for c in criteria if isinstance(c, EosTokenCriteria)), None)


def greedy(
    forward: Launches, input_ids: Tensor, criteria: Any, config: GenerationConfig, streamer: Any
) -> Any:
    """Decode with nothing between the launches but what streamer and end tokens ask for."""
    pad_token: Any = config._pad_token_tensor
    pad, start = int(pad_token) if pad_token is not None else 0, input_ids.shape[1]
    most = max(1, criteria.max_length - start)
    ends = end_tokens(criteria)
    eos = [] if ends is None else ends.tolist()
    forward.prefill(ends)
    for made in range(1, most + 1):
        if streamer is not None:
            streamer.put(_chosen(forward.decoder, pad))
        if made == most or (eos and _all_ended(forward.decoder, eos, made)):
            break
        forward.advance(pad)
    sequences = forward.decoder.append(pad)[:, : start + made].to(input_ids.device, copy=True)
    sequences = _cut(sequences, start, ends)
    if streamer is not None:
        streamer.end()
    forward.decoder.finish(start + made - sequences.shape[1])
    return sequences if not config.return_dict_in_generate else _output(sequences, forward.cache, None, None)


def _chosen(decoder: Any, pad: int) -> Tensor:
    """The tokens that the next step will append, for a streamer."""
    w, rows = decoder.workspace, decoder.rows
    return w.token[:rows].masked_fill(w.finished[:rows].bool(), pad).cpu()


def _all_ended(decoder: Any, eos: list[int], made: int) -> bool:
    """True if every sequence has met an end token; a GPU is not asked each time."""
    w, rows = decoder.workspace, decoder.rows
    if w.token.device.type != "cpu" and made % CHECK_EVERY:
        return False
    # lists, not tensors: on a CPU this is a read of memory, no operation
    ended = w.finished[:rows].tolist()
    return all(e or t in eos for e, t in zip(ended, w.token[:rows].tolist(), strict=True))


def _cut(sequences: Tensor, start: int, ends: Tensor | None) -> Tensor:
    """Without the columns that come after the last sequence has ended."""
    if ends is None:
        return sequences
    is_end = torch.isin(sequences[:, start:], ends.to(sequences.device))
    last = torch.where(is_end.any(1), is_end.int().argmax(1), sequences.shape[1] - start - 1)
    return sequences[:, : start + int(last.max()) + 1]


def decode(
    forward: Forward,
    input_ids: Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    streamer: Any,
) -> Any:
    """Greedy decoding or sampling with everything that transformers' own loop offers between two steps."""
    record = _Record(config)
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    unfinished = torch.ones(input_ids.shape[0], dtype=torch.long, device=input_ids.device)
    output = forward.prefill()
    while True:
        logits = output.to(copy=True, dtype=torch.float32, device=input_ids.device)
        scores = processors(input_ids, logits)
        record.add(scores, logits)
        token = _choose(scores, config.do_sample)
        if has_eos:
            token = token * unfinished + config._pad_token_tensor.to(token.device) * (1 - unfinished)
        input_ids = torch.cat([input_ids, token[:, None]], -1)
        unfinished = unfinished & ~criteria(input_ids, record.scores)
        if streamer is not None:
            streamer.put(token.cpu())
        if not bool(unfinished.any()):
            break
        output = forward.step(token)
    if streamer is not None:
        streamer.end()
    forward.finish()
    return record.result(input_ids, forward.cache)


def _choose(scores: Tensor, do_sample: bool) -> Tensor:
    if not do_sample:
        return scores.argmax(-1)
    return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)


class _Record:
    """The scores and logits that the caller wants back."""

    def __init__(self, config: GenerationConfig) -> None:
        self.wanted = bool(config.return_dict_in_generate)
        self.scores: tuple[Tensor, ...] | None = () if self.wanted and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if self.wanted and config.output_logits else None

    def add(self, scores: Tensor, logits: Tensor) -> None:
        self.scores = None if self.scores is None else (*self.scores, scores)
        self.logits = None if self.logits is None else (*self.logits, logits)

    def result(self, sequences: Tensor, cache: KVCache) -> Any:
        return _output(sequences, cache, self.scores, self.logits) if self.wanted else sequences


def _output(sequences: Tensor, cache: KVCache, scores: Any, logits: Any) -> GenerateDecoderOnlyOutput:
    parts: dict[str, Any] = {"scores": scores, "logits": logits, cache_key(): cache}
    return GenerateDecoderOnlyOutput(sequences=sequences, **parts)  # type: ignore[arg-type]
