"""The dynamic subclass that takes over generation.

transformers looks its decoding methods up on the model's class, so the inner model gets a subclass of its own
class, with the same name and module, that overrides them.
"""

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin

from trinfer.cache import KVCache, Store
from trinfer.compat import cache_argument, cache_key, tokens_held
from trinfer.generation.limits import Limits, check_length, limit_in_force
from trinfer.generation.loop import Launches, ModelForward, decode, greedy, is_plain
from trinfer.generation.prompt import prompt_of

# what a decode step of trinfer's loop knows how to carry on; a model that needs more takes transformers' loop
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
# models whose own way differs for a static cache only, which trinfer's loop is never given: up to 5.17
AS_USUAL = {"BloomForCausalLM"}
# models whose own way is to forget the cache where a rotary table that depends on the length changes
STARTS_ANEW = {"Phi3ForCausalLM"}
# layer kinds whose state is keys and values of the whole sequence
CACHED_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}


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
        if self._trinfer_limits.why_not:
            raise ValueError(f"generate cannot run: {self._trinfer_limits.why_not}")
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
            rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
            cache = self._trinfer_store.lend(rows, generation_config._trinfer_limit)
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
        prompt = prompt_of(self, input_ids, generation_config, stopping_criteria, model_kwargs)
        if prompt is None:
            forward = ModelForward(self, input_ids, generation_config, model_kwargs)
            return decode(
                forward, input_ids, logits_processor, stopping_criteria, generation_config, streamer
            )
        if self._trinfer_limits.waits_for:
            refuse_on_host(self, self._trinfer_limits.waits_for)
        launches = Launches(self, self._trinfer_decoder, model_kwargs[cache_key()], prompt)
        most_eos = self._trinfer_decoder.max_eos
        if is_plain(logits_processor, stopping_criteria, generation_config, most_eos):
            return greedy(launches, input_ids, stopping_criteria, generation_config, streamer)
        return decode(launches, input_ids, logits_processor, stopping_criteria, generation_config, streamer)


def attach(model: nn.Module, limits: Limits, decoder: Any = None) -> None:
    """Give `model`, and nothing else, a subclass of its class that keeps `limits`.

    `decoder`, a `step.Decoder`, runs the steps of the calls that it can take.
    """
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
    model._trinfer_decoder = decoder
    model._trinfer_store = Store() if decoder is None else decoder.store  # type: ignore[assignment]


def detach(model: nn.Module) -> None:
    """Give `model` its own class back."""
    if isinstance(model, Limited):
        del model._trinfer_limits, model._trinfer_decoder, model._trinfer_store
        model.__class__ = type(model)._trinfer_original  # type: ignore[attr-defined]


def refuse_on_host(model: nn.Module, device_type: str) -> None:
    """Refuse a forward of a model that keep_module_on_host left in host memory."""
    where = next((parameter.device.type for parameter in model.parameters()), device_type)
    if where != device_type:
        raise RuntimeError(
            f"the parameters are on {where} because of keep_module_on_host=True; call "
            f"engine.to({device_type!r}) first"
        )


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
    """True where trinfer's loop gives what transformers' own gives; that loop takes all other calls."""
    used = {name for name, value in model_kwargs.items() if value is not None}
    positions = model_kwargs.get("position_ids")
    return (
        isinstance(model_kwargs.get(cache_key()), KVCache)
        and not (config.output_attentions or config.output_hidden_states)
        and not getattr(config, "is_assistant", False)
        and used <= STEP_ARGUMENTS
        and (positions is None or positions.dim() == 2)
        and carries_on_as_usual(model)
    )


def carries_on_as_usual(model: Any) -> bool:
    """True if nothing but transformers' own code, or what does the same, prepares the next step of a call."""
    if all(getattr(type(model), name) is getattr(GenerationMixin, name) for name in CARRIES_ON):
        return True
    decoder, name = model._trinfer_decoder, type(model)._trinfer_original.__name__
    if name in AS_USUAL:
        return True
    return name in STARTS_ANEW and decoder is not None and not decoder.is_length_dependent(model)


def _rebuild(original: type[nn.Module], limits: Limits) -> nn.Module:
    model = original.__new__(original)
    attach(model, limits)
    if limits.own_cache:
        # a copy may arrive in a process that has not told transformers of the attention; kernels need triton
        from trinfer.rewrite.apply import register

        register()
    return model
