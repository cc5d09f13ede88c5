"""Every option of trinfer: names, aliases, defaults, meaning. The table in the README is made from here."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer
from pydantic_core import PydanticCustomError
from torch import nn

from trinfer.config.section import Section, fold, option, shown

DTYPES = {
    torch.float16: ("fp16", "float16", "half", "torch.float16", "torch.half"),
    torch.float32: ("fp32", "float32", "float", "torch.float32", "torch.float"),
    torch.bfloat16: ("bf16", "bfloat16", "bfloat", "torch.bfloat16"),
    torch.int8: ("int8", "torch.int8"),
}

DEPRECATED: dict[str, str | None] = {
    "mp_size": "tensor_parallel.tp_size",
    "mpu": "tensor_parallel.mpu",
    "ep_size": "moe.ep_size",
    "ep_group": "moe.ep_group",
    "expert_group": "moe.ep_group",
    "ep_mp_group": "moe.ep_mp_group",
    "expert_mp_group": "moe.ep_mp_group",
    "moe_experts": "moe.moe_experts",
    "moe_type": "moe.type",
    "replace_method": None,
}

MPU_METHODS = tuple(
    f"get_{group}_parallel_{what}" for group in ("model", "data") for what in ("rank", "group", "world_size")
)


def _refuse(kind: str, value: Any, rest: str) -> PydanticCustomError:
    return PydanticCustomError(kind, "{text}", {"text": f"{shown(value)} {rest}"})


def _dtype(value: Any) -> torch.dtype:
    for dtype, spellings in DTYPES.items():
        if value is dtype or (isinstance(value, str) and value.lower() in spellings):
            return dtype
    allowed = "; ".join(" ".join(spellings) for spellings in DTYPES.values())
    raise _refuse(
        "dtype", value, f"is no dtype to run in; allowed: {allowed} (in any case), or the torch.dtype"
    )


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise _refuse("count", value, "is no number; allowed: an integer")
    return value


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _experts(value: Any) -> Any:
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


def _mpu(value: Any) -> Any:
    missing = [name for name in MPU_METHODS if value is not None and not callable(getattr(value, name, None))]
    if missing:
        raise _refuse("mpu", value, f"lacks the methods {', '.join(missing)}; pass an object that has them")
    return value


def _policy(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if not value:
        raise _refuse("injection_policy", value, "names no layer; allowed: {LayerClass: 'name'}, or None")
    return {_layer_class(key): _targets(names) for key, names in value.items()}


def _layer_class(key: Any) -> type[nn.Module]:
    if isinstance(key, type) and issubclass(key, nn.Module):
        return key
    raise _refuse("injection_policy", key, "is no layer class; allowed: a subclass of torch.nn.Module")


def _targets(names: Any) -> Any:
    if isinstance(names, str):
        return (names,)
    if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
        return tuple(names)
    if dataclasses.is_dataclass(names) and not isinstance(names, type):
        # an architecture row: the rewriting pass, which knows the rows, checks it
        return names
    raise _refuse("injection_policy", names, "reads no layer; allowed: names of linears, or an Arch(...)")


Dtype = Annotated[torch.dtype, BeforeValidator(_dtype), PlainSerializer(str, when_used="json")]
Count = Annotated[int, Field(ge=1), BeforeValidator(_no_flag)]
PathText = Annotated[str, BeforeValidator(_path_text)]
Experts = Annotated[list[Count], Field(min_length=1), BeforeValidator(_experts)]
Policy = Annotated[dict[type, Any], BeforeValidator(_policy)]


class TensorParallelConfig(Section):
    """How the model is cut over devices."""

    enabled: bool = option(True, "`False` switches tensor parallelism off")
    tp_size: Count = option(1, "number of devices the model is cut over")
    tp_grain_size: Count = option(64, "MLP and lm_head shards are multiples of this many rows")
    mpu: Annotated[Any, AfterValidator(_mpu)] = option(
        None, "object with `get_{model,data}_parallel_{rank,group,world_size}()`; it sets `tp_size`"
    )
    tp_group: Any = option(None, "process group to use as it is")


class MoEConfig(Section):
    """How mixture-of-experts layers are run."""

    takes_flag = True

    enabled: bool = option(True, "`False` leaves MoE layers as they are")
    ep_size: Count = option(1, "number of devices the experts are spread over")
    moe_experts: Experts = option(
        [1], "experts per MoE layer, must equal the model's; unset: read from the model", alias="num_experts"
    )
    type: Literal["standard", "residual"] = option(
        "standard", "`residual` adds a dense branch with a coefficient"
    )
    ep_group: Any = option(None, "expert-parallel process group", alias="expert_group")
    ep_mp_group: Any = option(None, "model-parallel process group of the experts", alias="expert_mp_group")


class ActivationQuantConfig(Section):
    """How activations are quantised: symmetric, 8 bits, one scale per token."""

    enabled: bool = option(True, "`False` quantises weights only")
    num_bits: Literal[8] = option(8, "bits of an activation")
    q_type: Literal["symmetric"] = option("symmetric", "symmetric about zero")
    q_groups: Annotated[Literal[1], BeforeValidator(_no_flag)] = option(1, "scales per token")


class GroupQuantConfig(Section):
    """Group-wise quantisation of one set of weights; `{}` stands for none."""

    num_bits: Literal[4, 8] = option(8, "bits of a weight")
    group_size: Count = option(64, "weights that share one scale")
    group_dim: Annotated[int, BeforeValidator(_no_flag)] = option(1, "dimension that groups run along")
    symmetric: bool = option(False, "symmetric about zero, or with an offset per group")


class WeightQuantConfig(Section):
    """How weights are quantised."""

    enabled: bool = option(True, "`False` keeps weights without a match in `post_init_quant` in 16 bits")
    num_bits: Literal[4, 8] = option(8, "bits of a weight")
    q_type: Literal["symmetric", "asymmetric"] = option("symmetric", "about zero, or with an offset")
    q_groups: Count = option(1, "scales per output row")
    quantized_initialization: GroupQuantConfig = option(
        {}, "keys `num_bits`, `group_size`, `group_dim`, `symmetric`: quantise while the weights are loaded"
    )
    post_init_quant: dict[str, GroupQuantConfig] = option(
        {}, "part of a module name -> the same keys; a match goes before the fields above"
    )


class QKVQuantConfig(Section):
    """Whether the q, k and v products are quantised."""

    enabled: bool = option(True, "`False` leaves the q, k and v products unquantised")


class QuantConfig(Section):
    """Quantisation; acts with `dtype="int8"` only."""

    enabled: bool = option(True, "`False` switches quantisation off")
    activation: ActivationQuantConfig = option({}, "activations, see below")
    weight: WeightQuantConfig = option({}, "weights, see below")
    qkv: QKVQuantConfig = option({}, "q, k and v products, see below")


class CheckpointConfig(Section):
    """Another place for three checkpoint fields."""

    checkpoint_dir: PathText | dict[str, Any] | None = option(None, "the same as `checkpoint`")
    save_mp_checkpoint_path: PathText | None = option(None, "the same as `save_mp_checkpoint_path`")
    base_dir: PathText | None = option(None, "the same as `base_dir`")


class OffloadParamConfig(Section):
    """Where ZeRO-Inference keeps the parameters."""

    device: Literal["none", "cpu", "nvme"] = option("none", "`cpu`: host memory; `nvme`: files")
    nvme_path: PathText | None = option(None, "folder for the parameter files")
    pin_memory: bool = option(False, "page-locked host memory")
    buffer_count: Count = option(5, "layers held on the device at a time")
    buffer_size: Count = option(100_000_000, "parameters that fit into one buffer")


class ZeroConfig(Section):
    """ZeRO-Inference: parameters streamed to the device layer by layer."""

    left_out = "any other ZeRO field is for training only"

    stage: Annotated[int, Field(ge=0, le=3), BeforeValidator(_no_flag)] = option(
        0, "0: off; 3: parameters are streamed"
    )
    offload_param: OffloadParamConfig | None = option(None, "where the parameters stay, see below")


class KVCacheConfig(Section):
    """How keys and values are kept."""

    enabled: bool = option(False, "`True` keeps int8 keys and values, one scale per token and head")


class InferenceConfig(Section):
    """Everything `init_inference` can be told. Frozen; what is not set keeps its default."""

    moved: ClassVar = DEPRECATED
    mirrored: ClassVar = {
        "checkpoint_config.checkpoint_dir": "checkpoint",
        "checkpoint_config.save_mp_checkpoint_path": "save_mp_checkpoint_path",
        "checkpoint_config.base_dir": "base_dir",
    }

    replace_with_kernel_inject: bool = option(
        False,
        "`True` swaps Triton kernels in wherever trinfer knows the place",
        alias="kernel_inject",
    )
    dtype: Dtype = option(
        torch.float16,
        "the model is converted to it: `fp16`, `fp32`, `bf16`, their other spellings, or a `torch.dtype`; "
        "`int8` quantises the weights",
    )
    tensor_parallel: TensorParallelConfig = option({}, "cut the model over devices, see below", alias="tp")
    enable_cuda_graph: bool = option(False, "record decoding once per shape and replay it")
    use_triton: bool = option(False, "`True`: a kernel that cannot run as Triton raises")
    triton_autotune: bool = option(False, "search launch configurations at construction, and keep them")
    zero: ZeroConfig = option({}, "ZeRO-Inference, see below")
    triangular_masking: bool = option(True, "causal mask; unset: the architecture's own rule", alias="tm")
    moe: MoEConfig = option({}, "mixture of experts, see below; `True` and `False` stand for `enabled`")
    keep_module_on_host: bool = option(False, "parameters stay in host memory until `engine.to(device)`")
    quant: QuantConfig = option({}, "quantisation with `dtype='int8'`, see below")
    checkpoint: PathText | dict[str, Any] | None = option(
        None,
        "weights to load: checkpoint JSON or dict, folder, `*.index.json`, `.safetensors`, `.gguf`",
    )
    base_dir: PathText = option("", "folder that relative checkpoint paths start from")
    set_empty_params: bool = option(False, "build fused layers without parameters; `checkpoint` brings them")
    save_mp_checkpoint_path: PathText | None = option(None, "folder to write the loaded model to")
    checkpoint_config: CheckpointConfig = option({}, "checkpoint fields, see below", alias="ckpt_config")
    return_tuple: bool = option(True, "a replaced whole layer called by hand gives `(hidden,)`")
    training_mp_size: Count = option(1, "model-parallel degree of the checkpoint that is loaded")
    injection_policy: Policy | None = option(
        None,
        "`{LayerClass: names of row-parallel linears}` or `{LayerClass: Arch(...)}`",
        alias="injection_dict",
    )
    injection_policy_tuple: tuple[str, ...] | None = option(None, "the names in `injection_policy`")
    config: dict[str, Any] | None = option(
        None,
        "overrides of the model's own config for the rewriting pass; as a keyword only `args`",
        alias="args",
    )
    max_out_tokens: Count = option(1024, "prompt and new tokens that the KV cache holds", alias="max_tokens")
    min_out_tokens: Count = option(1, "the cache may shrink to this when memory is short", alias="min_tokens")
    transposed_mode: bool = option(False, "lay out weights of replaced linears as `[in, out]`")
    kv_cache: KVCacheConfig = option({}, "how keys and values are kept, see below")

    @classmethod
    def merge(cls, config: Any = None, kwargs: Mapping[str, Any] | None = None) -> "InferenceConfig":
        """Join `config` (None, dict, path of a JSON file, InferenceConfig) with `kwargs`; neither is changed.

        Raises:
            FileNotFoundError: the JSON file is missing.
            pydantic.ValidationError: unknown keys, wrong types or values.
            ValueError: another type of `config`, a file without a JSON object, one field given two meanings.
        """
        if isinstance(config, InferenceConfig) and not kwargs:
            return config
        return cls.model_validate(fold(cls, {"config": _given(config), "keyword": dict(kwargs or {})}))


def _given(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, InferenceConfig):
        return config.explicit()
    if isinstance(config, dict):
        return config
    if isinstance(config, str | os.PathLike):
        return _from_file(Path(config))
    raise ValueError(
        f"config={shown(config)} is a {type(config).__name__}; allowed: a dict, the path of a JSON file, an "
        "InferenceConfig, or None; pass one of these, or the fields as keywords"
    )


def _from_file(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ValueError(
            f"config={str(path)!r} is a folder; allowed: the path of a JSON file; name the file in it"
        )
    try:
        given = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_said_once)
    except ValueError as error:
        raise ValueError(f"config file {path}: {error}; allowed: one JSON object; mend the file") from error
    if not isinstance(given, dict):
        kind = type(given).__name__
        raise ValueError(f"config file {path}, line 1: a {kind}; allowed: one JSON object; write {{...}}")
    return given


def _said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for key, value in pairs:
        if said.setdefault(key, value) != value:
            raise ValueError(
                f"Conflicting argument {key!r}: {said[key]!r} against {value!r} in the same object"
            )
    return said
