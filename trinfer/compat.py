"""What differs between transformers versions, and the few private names trinfer touches there. Nowhere else.

Written against 5.17 and 5.24. The largest difference: 5.24.0 renamed `past_key_values` to `cache` in
forwards, outputs and generate; the old name still works there until 5.40, the new one does not exist before.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import sdpa_mask
from transformers.utils.output_capturing import _active_collector

# the name under which the attention function and the mask function are registered, always both: with an
# attention function alone transformers passes mask=None and padded rows are silently wrong
ATTENTION_NAME = "trinfer"


@functools.cache
def cache_key() -> str:
    """The keyword under which forwards take and return their cache."""
    names = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in names else "past_key_values"


def cache_argument(kwargs: dict[str, Any]) -> Cache | None:
    """The self-attention cache among the keywords of an attention module, whatever this version calls it."""
    found = next((kwargs[key] for key in ("cache", "past_key_values", "layer_past") if key in kwargs), None)
    return found.self_attention_cache if isinstance(found, EncoderDecoderCache) else found


def rotary_argument(
    module: Any, position_embeddings: tuple[Tensor, Tensor] | None, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The rotary table of this forward; GPT-J and CodeGen of 5.17 keep theirs inside the attention module."""
    if position_embeddings is not None:
        return position_embeddings
    table = module.embed_positions[kwargs["position_ids"]].to(module.out_proj.weight.dtype)
    sin, cos = table.chunk(2, -1)
    return sin, cos


def gives_tuple(layer: nn.Module) -> bool:
    """True if a layer returns its states in a tuple though it is of a family that gives tensors.

    GPT-J and CodeGen did so up to 5.17, when their layers took positions instead of a rotary table.
    """
    takes = inspect.signature(layer.forward).parameters
    return type(layer).__name__ in ("GPTJBlock", "CodeGenBlock") and "position_embeddings" not in takes


def collects_attentions() -> bool:
    """True while a forward of the whole model collects attention probabilities.

    GPT-2 takes `output_attentions` out of the call before its layers see it: then only the collector knows.
    """
    collected = _active_collector.get() or {}
    return "attentions" in collected or "cross_attentions" in collected


def wants_attentions(module: Any, kwargs: dict[str, Any]) -> bool:
    """True if this call of an attention module has to give its probabilities."""
    config = getattr(module, "config", None)
    asked = kwargs.get("output_attentions", getattr(config, "output_attentions", False))
    return bool(asked) or collects_attentions()


def kernel_window(sliding_window: int | None, is_causal: bool) -> int | None:
    """transformers' window, which its own bound does not belong to, as that of the kernels."""
    return sliding_window if sliding_window is None or is_causal else sliding_window - 1


def uses_interface(model: nn.Module) -> bool:
    """True if the model's own code asks transformers' attention interface for its attention."""
    return isinstance(model, PreTrainedModel) and model._can_set_attn_implementation()


def tokens_held(cache: Any) -> int:
    """Tokens in a cache; 0 for none, and for the states of models without attention, which count none."""
    counts = getattr(cache, "get_seq_length", None)
    if counts is None:
        return 0
    try:
        return int(counts())
    except ValueError:
        return 0


def register_attention(attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Make both functions known to transformers under `ATTENTION_NAME`; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, mask)


def attention_implementation(model: nn.Module) -> str | None:
    """The attention that `model` uses now, or None if it is not a transformers model."""
    return model.config._attn_implementation or "eager" if isinstance(model, PreTrainedModel) else None


def own_config(model: nn.Module) -> None:
    """Give `model` a configuration of its own: models built from one config object share it otherwise."""
    memo: dict[int, Any] = {}
    copy.deepcopy(model.config, memo)
    for module in model.modules():
        config = module.__dict__.get("config")
        if id(config) in memo:
            module.config = memo[id(config)]


def attention_modules(model: nn.Module) -> tuple[list[str], list[str]]:
    """Paths of the modules that ask transformers' interface for their attention, and of those that compute
    it themselves from a mask.

    Read from the names their forwards use, which works where there is no source to search either.
    """
    asking, own = [], []
    for path, module in model.named_modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        names = () if code is None else code.co_names
        known = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
        if any(isinstance(known.get(name), AttentionInterface) for name in names):
            asking.append(path)
        elif {"softmax", "scaled_dot_product_attention"} & set(names) and _attends(module, code):
            own.append(path)
    return asking, own


def leaves_window_to_mask(model: nn.Module, asking: list[str]) -> list[str]:
    """Those of the asking modules that belong to a model with windows and name none to the interface."""
    config = getattr(model, "config", None)
    if not getattr(config, "sliding_window", None):
        return []
    kinds = dict(enumerate(getattr(config, "layer_types", None) or []))
    found = []
    for path in asking:
        module = model.get_submodule(path)
        code = inspect.unwrap(type(module).forward).__code__
        named = {*code.co_names, *(n for const in code.co_consts if isinstance(const, tuple) for n in const)}
        kind = kinds.get(getattr(module, "layer_idx", -1), "sliding_attention")
        is_told = "sliding_window" in named or hasattr(module, "sliding_window")
        if kind == "sliding_attention" and not is_told:
            found.append(path)
    return found


def _attends(module: nn.Module, code: Any) -> bool:
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return "attention" in type(module).__name__.lower() or any("mask" in name for name in arguments)


def parts_attention(model: nn.Module) -> set[str]:
    """The attention implementations that the transformers models inside `model` use now."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return {part.config._attn_implementation or "eager" for part in parts}


def set_attention(model: Any, name: str) -> None:
    """Choose the attention of this model only, and read the choice back.

    `set_attn_implementation` merely logs a warning where it finds no source of the model's class (a class
    defined in a notebook), so the private field behind it is set there.

    Raises:
        RuntimeError: the model did not take the name.
    """
    with_source = model._can_set_attn_implementation()
    for part in (part for part in model.modules() if isinstance(part, PreTrainedModel)):
        if with_source and part is model:
            part.set_attn_implementation(name)
        elif part.config._attn_implementation != name:
            part.config._attn_implementation = name
    kept = {part.config._attn_implementation for part in model.modules() if isinstance(part, PreTrainedModel)}
    if kept != {name}:
        raise RuntimeError(f"{type(model).__name__} was given attention {name!r} but uses {sorted(kept)}")


def set_causal(model: nn.Module, modules: tuple[str, ...], is_causal: bool, configured: bool | None) -> None:
    """Say to attention modules and to the configuration, by which masks are made, whether they are causal.

    `configured` None leaves the configuration without a word about it.
    """
    for path in modules:
        model.get_submodule(path).is_causal = is_causal  # type: ignore[assignment]
    for part in model.modules():
        config = part.__dict__.get("config")
        if config is not None and configured is not None:
            config.is_causal = configured
        elif config is not None and "is_causal" in vars(config):
            del config.is_causal


def is_plain_mask(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    config: Any,
    local_size: int | None,
    use_vmap: bool,
    allow_is_causal_skip: bool,
    allow_is_bidirectional_skip: bool,
) -> bool:
    """True if a mask is the architecture's own pattern plus padding: start and end per row say it all.

    Not plain: packed sequences, overlays of the model (they clear the skip flags or set `use_vmap`), chunks,
    and causal patterns whose last query does not sit at the last key (static caches, prefix tuning).
    """
    if use_vmap or not (allow_is_causal_skip or allow_is_bidirectional_skip):
        return False
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        return False
    if allow_is_bidirectional_skip and local_size is None:
        return True
    return isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length


def full_mask(**kwargs: Any) -> Tensor:
    """The mask as bool [B, 1, M, N], True where a query may attend; built by transformers."""
    never_skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(**(kwargs | never_skip))
    assert mask is not None
    return mask


def kv_shape(config: Any) -> tuple[int, int, int] | None:
    """Layers, key/value heads and head_dim that a decoder with this config caches; None without attention."""
    text = config.get_text_config(decoder=True)
    layers, num_heads, width = (
        getattr(text, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if not (isinstance(layers, int) and isinstance(num_heads, int) and isinstance(width, int)):
        return None
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    return layers, num_kv_heads, getattr(text, "head_dim", None) or width // num_heads


def is_known_code(module: nn.Module) -> bool:
    """True if the forward of a module is torch's or transformers' own code."""
    return type(module).forward.__module__.split(".")[0] in ("torch", "transformers")


def has_user_hooks(model: nn.Module) -> bool:
    """True if a module below `model` has hooks other than those by which transformers collects outputs."""
    hooks = [
        hook
        for module in model.modules()
        if module is not model
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    return any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks)


def dtype_name(dtype: torch.dtype) -> str:
    """`float16` for torch.float16."""
    return str(dtype).removeprefix("torch.")
