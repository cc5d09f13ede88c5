"""Which fields exclude each other, and which ask for something that is not built yet."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trinfer.config.fields import InferenceConfig
from trinfer.config.section import shown


class Rule(NamedTuple):
    """Fields that exclude each other: when the rule is broken, what is allowed, what to do."""

    fields: tuple[str, ...]
    broken: Callable[[InferenceConfig, str], bool]
    allowed: str
    remedy: str


class Unbuilt(NamedTuple):
    """A field that can ask for something to come: what is allowed so far, whether a value asks for more."""

    allowed: str
    asks: Callable[[Any], bool]


def _swaps(config: InferenceConfig) -> bool:
    return config.replace_with_kernel_inject or config.injection_policy is not None


def _offload(config: InferenceConfig) -> str:
    offload = config.zero.offload_param
    return offload.device if offload else "none"


def _in_host_memory(config: InferenceConfig) -> bool:
    return _offload(config) == "cpu" or bool(config.at("zero.offload_param.pin_memory"))


def _mpu_disagrees(config: InferenceConfig) -> bool:
    tp = config.tensor_parallel
    if tp.mpu is None or not config.is_set("tensor_parallel.tp_size"):
        return False
    return tp.mpu.get_model_parallel_world_size() != tp.tp_size


def _policy_names(config: InferenceConfig) -> tuple[str, ...]:
    targets = (config.injection_policy or {}).values()
    return tuple(name for names in targets if isinstance(names, tuple) for name in names)


def _is_gguf(config: InferenceConfig) -> bool:
    return isinstance(config.checkpoint, str) and config.checkpoint.lower().endswith(".gguf")


RULES = (
    Rule(
        ("enable_cuda_graph", "tensor_parallel.tp_size"),
        lambda c, device: c.enable_cuda_graph and c.tensor_parallel.tp_size > 1,
        "enable_cuda_graph is not supported with more than one device",
        "set tensor_parallel.tp_size=1 or enable_cuda_graph=False",
    ),
    Rule(
        ("enable_cuda_graph", "replace_with_kernel_inject", "return_tuple"),
        lambda c, device: c.enable_cuda_graph and c.replace_with_kernel_inject and not c.return_tuple,
        "enable_cuda_graph is not supported with kernel injection and return_tuple=False",
        "leave return_tuple out or set enable_cuda_graph=False",
    ),
    Rule(
        ("enable_cuda_graph", "replace_with_kernel_inject", "injection_policy"),
        lambda c, device: c.enable_cuda_graph and device == "cpu" and not _swaps(c),
        "enable_cuda_graph is not supported on a CPU without kernels of trinfer: there is nothing to record",
        "set replace_with_kernel_inject=True or enable_cuda_graph=False",
    ),
    Rule(
        ("injection_policy", "replace_with_kernel_inject"),
        lambda c, device: c.replace_with_kernel_inject and c.injection_policy is not None,
        "only one of the two says how the model is rewritten",
        "leave out injection_policy, or set replace_with_kernel_inject=False",
    ),
    Rule(
        ("injection_policy_tuple", "injection_policy"),
        lambda c, device: c.injection_policy_tuple not in (None, _policy_names(c)),
        "injection_policy_tuple must be the names in injection_policy",
        "leave injection_policy_tuple out",
    ),
    Rule(
        ("use_triton", "replace_with_kernel_inject", "injection_policy"),
        lambda c, device: c.use_triton and not _swaps(c),
        "use_triton=True needs kernels in the model: nothing would use it",
        "set replace_with_kernel_inject=True, or leave use_triton out",
    ),
    Rule(
        ("triton_autotune", "replace_with_kernel_inject", "injection_policy"),
        lambda c, device: c.triton_autotune and not _swaps(c),
        "triton_autotune=True needs kernels in the model: there is none to tune",
        "set replace_with_kernel_inject=True, or leave triton_autotune out",
    ),
    Rule(
        ("triton_autotune", "keep_module_on_host"),
        lambda c, device: c.triton_autotune and c.keep_module_on_host and device != "cpu",
        "a model that is kept on the host cannot be launched on the device to tune it",
        "leave keep_module_on_host out, or run trinfer warmup before",
    ),
    Rule(
        ("quant", "dtype"),
        lambda c, device: c.is_set("quant") and c.quant.enabled and c.dtype != torch.int8,
        "quant acts with dtype='int8' only",
        "set dtype='int8', or leave quant out",
    ),
    Rule(
        ("dtype", "quant.enabled"),
        lambda c, device: c.dtype == torch.int8 and not c.quant.enabled,
        "dtype='int8' means quantised weights",
        "leave quant.enabled out, or set another dtype",
    ),
    Rule(
        ("checkpoint", "dtype", "quant.weight"),
        lambda c, device: _is_gguf(c) and c.dtype == torch.int8 and c.is_set("quant.weight"),
        "the blocks of a .gguf file run as they are stored",
        "leave quant.weight out, or set another dtype",
    ),
    Rule(
        ("min_out_tokens", "max_out_tokens"),
        lambda c, device: c.min_out_tokens > c.max_out_tokens,
        "min_out_tokens must not be larger than max_out_tokens",
        "raise max_out_tokens or lower min_out_tokens",
    ),
    Rule(
        ("tensor_parallel.enabled", "tensor_parallel.tp_size"),
        lambda c, device: not c.tensor_parallel.enabled and c.tensor_parallel.tp_size > 1,
        "tensor_parallel.enabled=False allows only tp_size=1",
        "leave tensor_parallel.enabled out, or set tensor_parallel.tp_size=1",
    ),
    Rule(
        ("tensor_parallel.tp_size", "tensor_parallel.mpu"),
        lambda c, device: _mpu_disagrees(c),
        "tensor_parallel.mpu has another model-parallel world size",
        "leave tensor_parallel.tp_size out",
    ),
    Rule(
        ("zero.stage",),
        lambda c, device: c.zero.stage in (1, 2),
        "zero.stage 1 and 2 are for training only; allowed: 0 (off) or 3",
        "set zero.stage=3 with zero.offload_param, or leave zero out",
    ),
    Rule(
        ("zero.stage", "zero.offload_param"),
        lambda c, device: c.zero.stage == 3 and _offload(c) == "none",
        "zero.stage=3 needs a place for the parameters",
        "add zero.offload_param={'device': 'cpu'} or {'device': 'nvme', 'nvme_path': ...}",
    ),
    Rule(
        ("zero.offload_param", "zero.stage"),
        lambda c, device: c.zero.stage == 0 and c.zero.offload_param is not None,
        "zero.offload_param acts with zero.stage=3 only",
        "set zero.stage=3, or leave zero.offload_param out",
    ),
    Rule(
        ("zero.offload_param.device", "zero.offload_param.nvme_path"),
        lambda c, device: (_offload(c) == "nvme") != (c.at("zero.offload_param.nvme_path") is not None),
        "zero.offload_param.nvme_path goes with device='nvme', and only with it",
        "give both or neither",
    ),
    Rule(
        ("zero.offload_param.device", "zero.offload_param.pin_memory"),
        lambda c, device: (
            device == "cpu" and (_offload(c) == "cpu" or bool(c.at("zero.offload_param.pin_memory")))
        ),
        "on a CPU the parameters are in host memory already; allowed: device='nvme' without pin_memory",
        "use zero.offload_param={'device': 'nvme', 'nvme_path': ...}, or leave zero out",
    ),
    Rule(
        ("set_empty_params", "replace_with_kernel_inject", "injection_policy"),
        lambda c, device: c.set_empty_params and not _swaps(c),
        "set_empty_params=True needs a replaced layer",
        "set replace_with_kernel_inject=True, or leave set_empty_params out",
    ),
    Rule(
        ("set_empty_params", "checkpoint"),
        lambda c, device: c.set_empty_params and c.checkpoint is None,
        "set_empty_params=True needs a checkpoint that brings the parameters",
        "give checkpoint, or leave set_empty_params out",
    ),
    Rule(
        ("return_tuple", "replace_with_kernel_inject"),
        lambda c, device: not c.return_tuple and not c.replace_with_kernel_inject,
        "only a whole layer that was replaced can do that",
        "set replace_with_kernel_inject=True, or leave return_tuple out",
    ),
    Rule(
        ("triangular_masking", "replace_with_kernel_inject"),
        lambda c, device: c.is_set("triangular_masking") and not c.replace_with_kernel_inject,
        "triangular_masking is what the attention of kernel injection does; the model's own stays as it is",
        "set replace_with_kernel_inject=True, or leave triangular_masking out",
    ),
    Rule(
        ("config", "replace_with_kernel_inject", "injection_policy"),
        lambda c, device: bool(c.config) and not _swaps(c),
        "config/args says what the rewriting of the model sees, and nothing is rewritten",
        "set replace_with_kernel_inject=True, or leave config/args out",
    ),
    Rule(
        ("transposed_mode", "replace_with_kernel_inject", "injection_policy"),
        lambda c, device: c.transposed_mode and not _swaps(c),
        "transposed_mode lays out the weights of replaced linears, and none is replaced",
        "set replace_with_kernel_inject=True, or leave transposed_mode out",
    ),
    Rule(
        ("training_mp_size", "checkpoint"),
        lambda c, device: c.is_set("training_mp_size") and c.checkpoint is None,
        "training_mp_size describes a model-parallel checkpoint",
        "give checkpoint, or leave training_mp_size out",
    ),
    Rule(
        ("base_dir", "checkpoint"),
        lambda c, device: bool(c.base_dir) and c.checkpoint is None,
        "base_dir is where the paths of a checkpoint start",
        "give checkpoint, or leave base_dir out",
    ),
)


def _given(value: Any) -> bool:
    return value is not None


UNBUILT = {
    "dtype": Unbuilt("fp16, fp32, bf16", lambda dtype: dtype == torch.int8),
    "tensor_parallel.tp_size": Unbuilt("1", lambda size: size > 1),
    "tensor_parallel.tp_grain_size": Unbuilt("64", lambda size: size != 64),
    "tensor_parallel.mpu": Unbuilt("None", _given),
    "tensor_parallel.tp_group": Unbuilt("None", _given),
    "zero.stage": Unbuilt("0", bool),
    "zero.offload_param": Unbuilt("None", _given),
    "moe.ep_size": Unbuilt("1", lambda size: size > 1),
    "moe.ep_group": Unbuilt("None", _given),
    "moe.ep_mp_group": Unbuilt("None", _given),
    "quant": Unbuilt("{'enabled': False}", lambda quant: quant.enabled),
    "checkpoint": Unbuilt("None", _given),
    "base_dir": Unbuilt("''", bool),
    "set_empty_params": Unbuilt("False", bool),
    "save_mp_checkpoint_path": Unbuilt("None", _given),
    "checkpoint_config": Unbuilt("{}", lambda section: any(value is not None for _, value in section)),
    "training_mp_size": Unbuilt("unset", lambda value: True),
    "kv_cache.enabled": Unbuilt("False", bool),
}


def check_combinations(config: InferenceConfig, device_type: str) -> None:
    """Refuse fields that exclude each other on a device of `device_type` ("cpu", "cuda").

    Raises:
        ValueError: every broken rule, one a line, with the fields, their values and what to do.
    """
    broken = [rule for rule in RULES if rule.broken(config, device_type)]
    if broken:
        raise ValueError(
            "\n".join(f"{_values(config, rule.fields)}: {rule.allowed}; {rule.remedy}" for rule in broken)
        )


def refuse_unbuilt(config: InferenceConfig) -> None:
    """Refuse fields that were set to ask for something to come; call it after `check_combinations`.

    Raises:
        NotImplementedError: every such field with its value, one a line.
    """
    asked = [path for path, entry in UNBUILT.items() if config.is_set(path) and entry.asks(config.at(path))]
    if asked:
        lines = (f"{_values(config, (path,))} is not built yet; {_so_far(path)}" for path in asked)
        raise NotImplementedError("\n".join(lines))


def _so_far(path: str) -> str:
    return f"allowed so far: {UNBUILT[path].allowed}; leave {path} out"


def _values(config: InferenceConfig, paths: tuple[str, ...]) -> str:
    return ", ".join(f"{path}={shown(_said(config.at(path)))}" for path in paths)


def _said(value: Any) -> Any:
    return value.model_dump(exclude_unset=True) if hasattr(value, "model_dump") else value
