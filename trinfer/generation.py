"""Generation: the length limit of every mode, the cache, and a lean greedy loop over it.

transformers looks its decoding methods up on the model's class, so the inner model gets a dynamic subclass of
its own class, with the same name and module, that overrides them.
"""

import inspect
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.utils import GenerateDecoderOnlyOutput

from trinfer import backend
from trinfer.cache import KVCache, bytes_per_token
from trinfer.compat import cache_argument, cache_key, kv_shape, tokens_held

# what a decode step of the lean loop knows how to carry on; a model that needs more takes transformers' loop
STEP_ARGUMENTS = {
    "attention_mask",
    "cache",
    "inputs_embeds",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
}
# how transformers carries a call on; a model with its own way takes transformers' loop
CARRIES_ON = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
# layer kinds whose state is keys and values of the whole sequence
CACHED_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class Limits:
    """Tokens a call may reach, and whether the cache is trinfer's own.

    `waits_for` is the device type that a model kept on the host must be moved to first; `has_warned` says
    that the caller was told of a smaller limit.
    """

    max_out_tokens: int
    min_out_tokens: int
    own_cache: bool
    waits_for: str = ""
    has_warned: bool = False


class Limited:
    """Mixed into the class of any model: refuses a forward whose tokens would pass the limit."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._trinfer_limits.waits_for:
            refuse_on_host(self, self._trinfer_limits.waits_for)
        given = dict(zip(self._trinfer_arguments, args, strict=False)) | kwargs
        held = tokens_held(cache_argument(given))
        for name, before in self._trinfer_tokens:
            tokens = given.get(name)
            if isinstance(tokens, Tensor) and tokens.dim() > 1:
                check_length(before * held + tokens.shape[1], 0, self._trinfer_limits.max_out_tokens)
        parent: Any = super()
        return parent.__call__(*args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # pickle and copy find a class by its name, which is the original's
        return _rebuild, (type(self)._trinfer_original, self._trinfer_limits), self.__dict__


class Generating(Limited):
    """Mixed into the class of a model that generates."""

    def _prepare_generated_length(self: Any, generation_config: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        config = parent._prepare_generated_length(generation_config=generation_config, **kwargs)
        inputs, prompt = kwargs["inputs_tensor"], kwargs["input_ids_length"]
        new = config.max_length - prompt
        if kwargs["model_input_name"] == "inputs_embeds" and not self.config.is_encoder_decoder:
            prompt = inputs.shape[1]
        # generate works on a copy of the caller's config, made for this call
        config._trinfer_limit = limit = limit_in_force(self, config, inputs.shape[0])
        check_length(prompt, new, limit)
        return config

    def _prepare_cache_for_generation(
        self: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        if takes_own_cache(self, generation_config, model_kwargs):
            cache = KVCache(generation_config._trinfer_limit, expected=max_cache_length + 1)
            model_kwargs[cache_key()] = cache
            return None
        parent: Any = super()
        return parent._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._trinfer_limits.own_cache:
            raise NotImplementedError(
                "generate_batch keeps keys and values in pages, which the attention kernels do not read; use "
                "generate, or replace_with_kernel_inject=False"
            )
        parent: Any = super()
        return parent.init_continuous_batching(*args, **kwargs)

    def _sample(
        self: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        if synced_gpus or not is_lean(self, generation_config, model_kwargs):
            parent: Any = super()
            return parent._sample(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        return greedy(
            self, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
        )


def attach(model: nn.Module, limits: Limits) -> None:
    """Give `model`, and nothing else, a subclass of its class that keeps `limits`."""
    original = type(model)
    mixin = Generating if isinstance(model, GenerationMixin) else Limited
    arguments = tuple(inspect.signature(model.forward).parameters)
    # which arguments hold tokens, and whether those come after the tokens of the cache
    names = ("decoder_input_ids", "decoder_inputs_embeds") if "decoder_input_ids" in arguments else ()
    encoder = tuple((name, not names) for name in ("input_ids", "inputs_embeds"))
    body = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_trinfer_original": original,
        "_trinfer_arguments": arguments,
        "_trinfer_tokens": (*encoder, *((name, True) for name in names)),
    }
    model.__class__ = type(original.__name__, (mixin, original), body)
    model._trinfer_limits = limits  # type: ignore[assignment]


def detach(model: nn.Module) -> None:
    """Give `model` its own class back."""
    if isinstance(model, Limited):
        del model._trinfer_limits
        model.__class__ = type(model)._trinfer_original  # type: ignore[attr-defined]


def refuse_on_host(model: nn.Module, device_type: str) -> None:
    """Refuse a forward of a model that keep_module_on_host left in host memory."""
    where = next((parameter.device.type for parameter in model.parameters()), device_type)
    if where != device_type:
        raise RuntimeError(
            f"the parameters are on {where} because of keep_module_on_host=True; call "
            f"engine.to({device_type!r}) first"
        )


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
    fitting = tokens_that_fit(limits, rows, per_token, backend.free_bytes(model.device))
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


def takes_own_cache(model: Any, config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
    """True where a `KVCache` stands for the cache that transformers would make."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or CACHED_KINDS
    return (
        model._trinfer_limits.own_cache
        and model_kwargs.get(cache_key()) is None
        and config.use_cache is not False
        and config.cache_implementation in (None, "dynamic")
        # an assistant is called again and again with the cache of its first, short call
        and not getattr(config, "is_assistant", False)
        and not model.config.is_encoder_decoder
        and model._supports_default_dynamic_cache()
        and set(kinds) <= CACHED_KINDS
    )


def is_lean(model: Any, config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
    """True where `greedy` gives what transformers' own loop gives; that loop takes all other calls."""
    used = {name for name, value in model_kwargs.items() if value is not None}
    positions = model_kwargs.get("position_ids")
    return (
        isinstance(model_kwargs.get(cache_key()), KVCache)
        and not config.do_sample
        and not (config.output_attentions or config.output_hidden_states)
        and not getattr(config, "is_assistant", False)
        and used <= STEP_ARGUMENTS
        and (positions is None or positions.dim() == 2)
        and all(getattr(type(model), name) is getattr(GenerationMixin, name) for name in CARRIES_ON)
    )


def greedy(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> Any:
    """Greedy decoding: prefill by transformers, then one forward of one token per row until all are done."""
    outputs = model._prefill(input_ids, config, model_kwargs, is_first_iteration=True)
    step, record = _Step(model, model_kwargs, input_ids), _Record(config)
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    unfinished = torch.ones(input_ids.shape[0], dtype=torch.long, device=input_ids.device)
    while True:
        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
        scores = logits_processor(input_ids, logits)
        record.add(scores, logits)
        token = scores.argmax(-1)
        if has_eos:
            token = token * unfinished + config._pad_token_tensor.to(token.device) * (1 - unfinished)
        input_ids = torch.cat([input_ids, token[:, None]], -1)
        unfinished = unfinished & ~stopping_criteria(input_ids, record.scores)
        if streamer is not None:
            streamer.put(token.cpu())
        if not bool(unfinished.any()):
            break
        outputs = step(token[:, None])
    if streamer is not None:
        streamer.end()
    return record.result(input_ids, step)


class _Record:
    """The scores and logits that the caller wants back."""

    def __init__(self, config: GenerationConfig) -> None:
        self.wanted = bool(config.return_dict_in_generate)
        self.scores: tuple[Tensor, ...] | None = () if self.wanted and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if self.wanted and config.output_logits else None

    def add(self, scores: Tensor, logits: Tensor) -> None:
        self.scores = None if self.scores is None else (*self.scores, scores)
        self.logits = None if self.logits is None else (*self.logits, logits)

    def result(self, sequences: Tensor, step: "_Step") -> Any:
        if not self.wanted:
            return sequences
        parts: dict[str, Any] = {"scores": self.scores, "logits": self.logits, step.key: step.cache}
        return GenerateDecoderOnlyOutput(sequences=sequences, **parts)  # type: ignore[arg-type]


class _Step:
    """The forward of one token per row, with positions and padding mask carried from step to step."""

    def __init__(self, model: Any, model_kwargs: dict[str, Any], input_ids: Tensor) -> None:
        self.model, self.key = model, cache_key()
        self.cache = model_kwargs[self.key]
        self.mask: Tensor | None = model_kwargs.get("attention_mask")
        self.positions: Tensor | None = None
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return
        given = model_kwargs.get("position_ids")
        if given is not None:
            self.positions = given[:, -1:] + 1
        elif self.mask is not None:
            self.positions = self.mask.long().sum(-1, keepdim=True)
        else:
            self.positions = input_ids.new_full((1, 1), self.cache.get_seq_length())

    def __call__(self, tokens: Tensor) -> Any:
        inputs = {"input_ids": tokens, self.key: self.cache, "use_cache": True, "return_dict": True}
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], -1)
            inputs["attention_mask"] = self.mask
        if self.positions is not None:
            inputs["position_ids"] = self.positions
            self.positions = self.positions + 1
        device = self.model.device
        return self.model(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()})


def _rebuild(original: type[nn.Module], limits: Limits) -> nn.Module:
    model = original.__new__(original)
    attach(model, limits)
    if limits.own_cache:
        # a copy may arrive in a process that has not told transformers of the attention; kernels need triton
        from trinfer.rewrite.apply import register

        register()
    return model
