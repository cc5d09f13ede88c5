"""What `init_inference` may be told: tables of good and bad inputs, merging, moved names, README tables."""

import copy
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pydantic import ValidationError
from torch import nn

from bench.readme_tables import README, with_tables
from trinfer.config import (
    DEPRECATED,
    DTYPES,
    UNBUILT,
    InferenceConfig,
    MoEConfig,
    TensorParallelConfig,
    check_combinations,
    refuse_unbuilt,
)

INJECT = {"replace_with_kernel_inject": True}


class Block(nn.Module):
    pass


class Mpu:
    """Two model-parallel ranks."""

    def get_model_parallel_world_size(self) -> int:
        return 2

    get_model_parallel_rank = get_model_parallel_group = get_model_parallel_world_size
    get_data_parallel_rank = get_data_parallel_group = get_data_parallel_world_size = get_model_parallel_rank


MPU = Mpu()
NVME = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "spill"}}


def accepted(config: Any = None, device: str = "cpu", **kwargs: Any) -> InferenceConfig:
    """The way of `init_inference` through the config room."""
    merged = InferenceConfig.merge(config, kwargs)
    check_combinations(merged, device)
    refuse_unbuilt(merged)
    return merged


# (config, keywords) -> {field: value}; these act
GOOD = [
    (
        None,
        {},
        {"dtype": torch.float16, "max_out_tokens": 1024, "min_out_tokens": 1, "tensor_parallel.tp_size": 1},
    ),
    ({"kernel_inject": True}, {}, {"replace_with_kernel_inject": True}),
    ({"max_tokens": 64, "min_tokens": 8}, {}, {"max_out_tokens": 64, "min_out_tokens": 8}),
    ({"max_out_tokens": "77"}, {}, {"max_out_tokens": 77}),
    ({}, {"dtype": "BF16"}, {"dtype": torch.bfloat16}),
    ({"dtype": "fp32"}, {**INJECT, "use_triton": True}, {"dtype": torch.float32, "use_triton": True}),
    ({"dtype": "fp16"}, {"dtype": torch.half}, {"dtype": torch.float16}),
    ({"tp": {"tp_size": 1}}, {"tensor_parallel": {"enabled": False}}, {"tensor_parallel.enabled": False}),
    ({"tp": {}}, {"tensor_parallel": {"tp_size": 1}}, {"tensor_parallel.tp_size": 1}),
    ({"tp": TensorParallelConfig(tp_size=1)}, {"tp": {"tp_size": 1}}, {"tensor_parallel.tp_size": 1}),
    ({"kernel_inject": True, "replace_with_kernel_inject": True}, {}, {"replace_with_kernel_inject": True}),
    ({"moe": False}, {"moe": {"enabled": False}}, {"moe.enabled": False}),
    ({"moe": {"num_experts": 8}}, {"moe": {"moe_experts": [8]}}, {"moe.moe_experts": [8]}),
    (
        {"injection_dict": {Block: "out"}},
        {"injection_policy": {Block: ("out",)}},
        {"injection_policy": {Block: ("out",)}},
    ),
    ({"quant": {"enabled": False}}, {}, {"quant.enabled": False}),
    ({"zero": {"stage": 0}}, {"zero": {}}, {"zero.stage": 0}),
    ({"keep_module_on_host": True}, {}, {"keep_module_on_host": True}),
    ({"args": {"rope_theta": 1.0}}, INJECT, {"config": {"rope_theta": 1.0}}),
    (
        {"config": {"rope_theta": 1.0}},
        {"args": {"rope_theta": 1.0}, **INJECT},
        {"config": {"rope_theta": 1.0}},
    ),
    ({"tm": True}, INJECT, {"triangular_masking": True}),
    ({"checkpoint": None, "mpu": None, "args": None, "base_dir": ""}, {}, {"checkpoint": None}),
    ({"ckpt_config": {"checkpoint_dir": None}}, {"checkpoint": None}, {"checkpoint": None}),
    (
        {"enable_cuda_graph": False, "triton_autotune": False, "return_tuple": True},
        {},
        {"return_tuple": True},
    ),
    ({"kv_cache": {"enabled": False}, "transposed_mode": False}, {}, {"kv_cache.enabled": False}),
]

# (config, keywords) -> {field: value}; understood, but not built yet
LATER = [
    ({"tp": {"tp_size": 4}}, {"dtype": "fp16"}, {"tensor_parallel.tp_size": 4}),
    ({}, {"mpu": MPU}, {"tensor_parallel.mpu": MPU}),
    ({"moe": MoEConfig(ep_size=2)}, {"moe_type": "residual"}, {"moe.ep_size": 2, "moe.type": "residual"}),
    ({"dtype": "torch.int8"}, {"quant": {"weight": {"num_bits": 4}}}, {"quant.weight.num_bits": 4}),
    ({"ckpt_config": {"checkpoint_dir": "a"}}, {"checkpoint": Path("a")}, {"checkpoint": "a"}),
    ({"zero": NVME}, {}, {"zero.offload_param.device": "nvme", "zero.offload_param.buffer_count": 5}),
]

# (config, keywords, exception, words that must appear)
BAD = [
    # a value that pydantic refuses, with the path of the field
    (None, {"max_out_tokens": 0}, ValidationError, ["max_out_tokens", "0", "greater than or equal to 1"]),
    (None, {"min_tokens": -1}, ValidationError, ["min_out_tokens", "-1"]),
    (None, {"max_out_tokens": 7.5}, ValidationError, ["max_out_tokens", "7.5"]),
    (None, {"max_out_tokens": True}, ValidationError, ["max_out_tokens", "True", "an integer"]),
    (
        None,
        {"max_out_tokens": "auto"},
        ValidationError,
        ["max_out_tokens='auto'", "leave max_out_tokens out"],
    ),
    (None, {"dtype": "auto"}, ValidationError, ["dtype='auto'"]),
    (None, {"tp": {"tp_size": "auto"}}, ValidationError, ["tensor_parallel.tp_size='auto'"]),
    (None, {"tp": {"tp_size": 0}}, ValidationError, ["tensor_parallel.tp_size", "0"]),
    (None, {"mp_size": 0}, ValidationError, ["tensor_parallel.tp_size", "0"]),
    (None, {"mpu": 3}, ValidationError, ["tensor_parallel.mpu", "get_model_parallel_rank"]),
    (None, {"enable_cuda_graph": "perhaps"}, ValidationError, ["enable_cuda_graph", "perhaps"]),
    (None, {"moe_type": "dense"}, ValidationError, ["moe.type", "standard", "residual"]),
    (None, {"moe": {"num_experts": []}}, ValidationError, ["moe.moe_experts"]),
    (None, {"quant": True}, ValidationError, ["quant", "True", "weight"]),
    (
        None,
        {"dtype": "int8", "quant": {"weight": {"num_bits": 3}}},
        ValidationError,
        ["quant.weight.num_bits", "3"],
    ),
    (None, {"quant": {"activation": {"num_bits": 4}}}, ValidationError, ["quant.activation.num_bits", "8"]),
    (None, {"zero": {"stage": 4}}, ValidationError, ["zero.stage", "4"]),
    (None, {"checkpoint": ["a"]}, ValidationError, ["checkpoint"]),
    (
        None,
        {"injection_policy": {"Block": "out"}},
        ValidationError,
        ["injection_policy", "'Block'", "torch.nn.Module"],
    ),
    (None, {"injection_policy": {Block: 3}}, ValidationError, ["injection_policy", "3", "names of linears"]),
    (None, {"injection_policy": {}}, ValidationError, ["injection_policy", "names no layer"]),
    (
        None,
        {"replace_method": "module"},
        ValidationError,
        ["replace_method='module'", "leave replace_method out"],
    ),
    # unknown keys
    (None, {"tp_size": 2}, ValidationError, ["tp_size=2", "tensor_parallel.tp_size"]),
    (None, {"zero": {"overlap_comm": True}}, ValidationError, ["zero.overlap_comm=True", "training only"]),
    (
        {"zero": {"offload_param": {"path": "x"}}},
        {},
        ValidationError,
        ["zero.offload_param.path", "nvme_path"],
    ),
    (
        {"quant": {"weight": {"post_init_quant": {"fc1": {"bits": 4}}}}},
        {},
        ValidationError,
        ["quant.weight.post_init_quant.fc1.bits", "num_bits"],
    ),
    (
        {"kernel_injct": True, "zero": {"stge": 3}},
        {},
        ValidationError,
        ["kernel_injct=True", "zero.stge=3", "zero.stage"],
    ),
    ({1: 2}, {}, ValidationError, ["1=2"]),
    # the config itself
    ([], {}, ValueError, ["config=[]", "list", "JSON file"]),
    (16, {}, ValueError, ["config=16", "int"]),
    # one field given twice
    (
        {"tp": {"tp_size": 2}},
        {"tp": {"tp_size": 4}},
        ValueError,
        ["'tensor_parallel.tp_size'", "2", "4", "tp.tp_size"],
    ),
    (
        None,
        {"checkpoint": "a", "ckpt_config": {"checkpoint_dir": "b"}},
        ValueError,
        ["Conflicting", "'a'", "'b'"],
    ),
    (None, {"moe": {"num_experts": 4, "moe_experts": 5}}, ValueError, ["'moe.moe_experts'", "4", "5"]),
    ({"tp": 2}, {"mp_size": 4}, ValidationError, ["tensor_parallel", "2 is no dict"]),
    # combinations
    (None, {"min_out_tokens": 9, "max_out_tokens": 8}, ValueError, ["min_out_tokens=9", "max_out_tokens=8"]),
    (None, {"use_triton": True}, ValueError, ["use_triton=True", "replace_with_kernel_inject=True"]),
    (
        None,
        {"triton_autotune": True},
        ValueError,
        ["triton_autotune=True", "replace_with_kernel_inject=True"],
    ),
    (
        None,
        {"triton_autotune": True, "keep_module_on_host": True, **INJECT, "device": "cuda"},
        ValueError,
        ["triton_autotune=True", "keep_module_on_host=True", "trinfer warmup"],
    ),
    (None, {"quant": {"weight": {"num_bits": 8}}}, ValueError, ["quant", "dtype", "int8"]),
    (None, {"dtype": "int8", "quant": {"enabled": False}}, ValueError, ["int8", "quant.enabled=False"]),
    (
        {"dtype": "int8", "checkpoint": "m.GGUF"},
        {"quant": {"weight": {"num_bits": 8}}},
        ValueError,
        ["quant.weight", "m.GGUF", "as they are stored"],
    ),
    (
        {"tp": {"enabled": False, "tp_size": 2}},
        {},
        ValueError,
        ["tensor_parallel.enabled=False", "tp_size=2"],
    ),
    ({"tp": {"mpu": MPU, "tp_size": 4}}, {}, ValueError, ["tensor_parallel.tp_size=4", "mpu"]),
    (None, {"zero": {"stage": 1}}, ValueError, ["zero.stage=1", "training only"]),
    (None, {"zero": {"stage": 2}}, ValueError, ["zero.stage=2", "training only"]),
    (None, {"zero": {"stage": 3}}, ValueError, ["zero.stage=3", "offload_param"]),
    (None, {"zero": {"offload_param": {"device": "nvme"}}}, ValueError, ["zero.stage=0", "zero.stage=3"]),
    ({"zero": {"stage": 3, "offload_param": {"device": "nvme"}}}, {}, ValueError, ["nvme_path=None", "both"]),
    (
        {"zero": {"stage": 3, "offload_param": {"device": "cpu"}}},
        {},
        ValueError,
        ["device='cpu'", "host memory"],
    ),
    (None, {"set_empty_params": True}, ValueError, ["set_empty_params=True", "replaced layer"]),
    (None, {**INJECT, "set_empty_params": True}, ValueError, ["set_empty_params=True", "checkpoint"]),
    (None, {"return_tuple": False}, ValueError, ["return_tuple=False", "whole layer"]),
    (None, {"tm": True}, ValueError, ["triangular_masking=True", "replace_with_kernel_inject=False"]),
    (None, {"transposed_mode": True}, ValueError, ["transposed_mode=True", "injection_policy=None"]),
    (None, {"args": {"model_type": "llama"}}, ValueError, ["config=", "args", "injection_policy=None"]),
    (None, {"training_mp_size": 1}, ValueError, ["training_mp_size=1", "checkpoint"]),
    (None, {"base_dir": "weights"}, ValueError, ["base_dir='weights'", "checkpoint"]),
    (
        None,
        {"injection_policy_tuple": ("out",)},
        ValueError,
        ["injection_policy_tuple=('out',)", "injection_policy"],
    ),
    # every broken rule, a line each
    (None, {"use_triton": True, "zero": {"stage": 1}}, ValueError, ["use_triton=True", "zero.stage=1", "\n"]),
    # a combination that cannot be is said before what is not built yet
    (None, {"use_triton": True, "checkpoint": "a"}, ValueError, ["use_triton=True"]),
    # not built yet, all at once
    (
        None,
        {"checkpoint": "a", "save_mp_checkpoint_path": "b"},
        NotImplementedError,
        ["checkpoint='a'", "save_mp_checkpoint_path"],
    ),
]

# for every field in UNBUILT, keywords that pass every rule and ask for it on a GPU
ASKING: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "int8"},
    "tensor_parallel.tp_size": {"tp": {"tp_size": 2}},
    "tensor_parallel.tp_grain_size": {"tp": {"tp_grain_size": 32}},
    "tensor_parallel.mpu": {"tp": {"mpu": MPU}},
    "tensor_parallel.tp_group": {"tp": {"tp_group": object()}},
    "zero.stage": {"zero": NVME},
    "zero.offload_param": {"zero": NVME},
    "moe.ep_size": {"moe": {"ep_size": 2}},
    "moe.ep_group": {"moe": {"ep_group": object()}},
    "moe.ep_mp_group": {"moe": {"ep_mp_group": object()}},
    "quant": {"quant": {}, "dtype": "int8"},
    "checkpoint": {"checkpoint": {"type": "ds_model"}},
    "base_dir": {"base_dir": "a", "checkpoint": "b"},
    "set_empty_params": {"set_empty_params": True, "checkpoint": "a", **INJECT},
    "save_mp_checkpoint_path": {"save_mp_checkpoint_path": "a"},
    "checkpoint_config": {"ckpt_config": {"save_mp_checkpoint_path": "a"}},
    "training_mp_size": {"training_mp_size": 2, "checkpoint": "a"},
    "kv_cache.enabled": {"kv_cache": {"enabled": True}},
}


@pytest.mark.parametrize(("config", "kwargs", "expected"), GOOD)
def test_good_input_gives_values(config: Any, kwargs: dict[str, Any], expected: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        merged = accepted(config, **kwargs)
    assert {path: merged.at(path) for path in expected} == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("config", "kwargs", "expected"), LATER)
def test_input_for_later_is_understood_then_refused(config: Any, kwargs: dict, expected: dict) -> None:
    merged = InferenceConfig.merge(config, kwargs)
    assert {path: merged.at(path) for path in expected} == expected
    check_combinations(merged, "cuda")
    with pytest.raises(NotImplementedError, match="not built yet"):
        refuse_unbuilt(merged)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("config", "kwargs", "exception", "words"), BAD)
def test_bad_input_names_field_value_and_remedy(
    config: Any, kwargs: dict[str, Any], exception: type[Exception], words: list[str]
) -> None:
    with pytest.raises(exception) as caught:
        accepted(config, **kwargs)
    assert type(caught.value) is exception
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def test_every_unbuilt_field_has_a_row() -> None:
    assert set(ASKING) == set(UNBUILT)


@pytest.mark.parametrize("path", ASKING)
def test_unbuilt_field_raises_naming_itself(path: str) -> None:
    with pytest.raises(NotImplementedError) as caught:
        accepted(device="cuda", **ASKING[path])
    assert f"{path}=" in str(caught.value)
    assert f"leave {path} out" in str(caught.value)


@pytest.mark.parametrize(
    "path", [path for path in UNBUILT if UNBUILT[path].allowed not in ("unset", "fp16, fp32, bf16")]
)
def test_unbuilt_field_takes_what_it_says_is_allowed(path: str) -> None:
    value = eval(UNBUILT[path].allowed)
    *section, name = path.split(".")
    accepted({section[0]: {name: value}} if section else {name: value})


def test_fields_of_the_config_file_by_path(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"kernel_inject": True, "dtype": "fp32", "tp": {"tp_size": 1}}))
    for path in (file, str(file)):
        merged = accepted(path, dtype=torch.float32, max_tokens=9)
        assert (merged.replace_with_kernel_inject, merged.dtype, merged.max_out_tokens) == (
            True,
            torch.float32,
            9,
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", ["line 1", "list", "JSON object"]),
        ('{\n"dtype": }', ["line 2"]),
        ('{"dtype": "fp16", "dtype": "fp32"}', ["Conflicting argument 'dtype'"]),
        ("", ["line 1"]),
    ],
)
def test_bad_config_file_is_named_with_its_line(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        InferenceConfig.merge(file, {})
    assert not [word for word in [str(file), *words] if word not in str(caught.value)], str(caught.value)


def test_missing_config_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        InferenceConfig.merge(tmp_path / "nowhere.json", {})
    with pytest.raises(ValueError, match="is a folder"):
        InferenceConfig.merge(tmp_path, {})


def test_config_instance_is_used_as_it_is_and_merges_what_it_had_set() -> None:
    config = InferenceConfig(dtype="bf16")
    assert InferenceConfig.merge(config, {}) is config
    # max_out_tokens is at its default there, not set: no conflict
    merged = InferenceConfig.merge(config, {"max_out_tokens": 5, "dtype": "bfloat16"})
    assert (merged.dtype, merged.max_out_tokens, config.max_out_tokens) == (torch.bfloat16, 5, 1024)
    with pytest.raises(ValueError, match="Conflicting argument 'dtype'"):
        InferenceConfig.merge(config, {"dtype": "fp32"})


def test_config_is_frozen_at_every_depth() -> None:
    config = InferenceConfig()
    for section, name, value in (
        (config, "dtype", torch.float32),
        (config, "anything", 1),
        (config.tensor_parallel, "tp_size", 2),
        (config.quant.weight, "num_bits", 4),
    ):
        with pytest.raises(ValidationError):
            setattr(section, name, value)


def test_caller_keeps_its_objects() -> None:
    given = {"moe": {"num_experts": [4]}, "args": {"deep": {"list": [1, 2]}}, "tp": {"tp_size": 1}}
    kwargs = {"moe_experts": [4], "checkpoint": {"checkpoints": ["a"]}}
    before = copy.deepcopy((given, kwargs))
    with pytest.warns(DeprecationWarning):
        merged = InferenceConfig.merge(given, kwargs)
    assert (given, kwargs) == before
    # and what the caller does later does not reach the config
    given["args"]["deep"]["list"].append(3)
    kwargs["checkpoint"]["checkpoints"].append("b")
    given["moe"]["num_experts"].append(5)
    assert merged.config == {"deep": {"list": [1, 2]}}
    assert merged.checkpoint == {"checkpoints": ["a"]}
    assert merged.moe.moe_experts == [4]


def test_objects_that_must_stay_themselves_are_not_copied() -> None:
    group = object()
    merged = InferenceConfig.merge({"tp": {"tp_group": group, "mpu": MPU}}, {})
    assert merged.tensor_parallel.tp_group is group
    assert merged.tensor_parallel.mpu is MPU


def test_two_configs_share_no_default() -> None:
    one, other = InferenceConfig(), InferenceConfig()
    assert one.moe.moe_experts is not other.moe.moe_experts


def test_config_survives_json_pickle_and_deepcopy() -> None:
    config = InferenceConfig.merge({"dtype": "bf16", "tp": {"tp_size": 2}, "quant": {"enabled": False}}, {})
    text = config.model_dump_json(exclude_unset=True)
    assert json.loads(text)["tensor_parallel"] == {"tp_size": 2}
    for again in (
        InferenceConfig.merge(json.loads(text), {}),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
    ):
        assert again == config
        assert again.model_fields_set == config.model_fields_set


@pytest.mark.parametrize(
    ("config", "path", "value", "nearest"),
    [
        ({"kernel_injct": True}, "kernel_injct", "True", "kernel_inject"),
        ({"tensor_parallel": {"tpsize": 2}}, "tensor_parallel.tpsize", "2", "tensor_parallel.tp_size"),
        ({"quant": {"weight": {"bits": 8}}}, "quant.weight.bits", "8", "quant.weight.num_bits"),
        ({"tp": 2}, "tensor_parallel", "2", "tp_size"),
    ],
)
def test_u052_unknown_key_gives_path_value_and_nearest(
    config: dict, path: str, value: str, nearest: str
) -> None:
    for build in (lambda: InferenceConfig.merge(config, {}), lambda: InferenceConfig(**config)):
        with pytest.raises(ValidationError) as caught:
            build()
        (error,) = caught.value.errors()
        assert ".".join(error["loc"]) == path
        assert value in error["msg"]
        assert nearest in error["msg"]


def test_u053_equal_meanings_merge() -> None:
    given = {"dtype": "fp16", "kernel_inject": True}
    before = dict(given)
    merged = InferenceConfig.merge(given, {"dtype": torch.half, "replace_with_kernel_inject": True})
    assert (merged.dtype, merged.replace_with_kernel_inject) == (torch.float16, True)
    assert given == before


@pytest.mark.parametrize(
    ("config", "kwargs", "words"),
    [
        ({"dtype": "fp16"}, {"dtype": torch.float32}, ["'dtype'", "dtype='fp16'", "dtype=torch.float32"]),
        (
            {"kernel_inject": True},
            {"replace_with_kernel_inject": False},
            ["'replace_with_kernel_inject'", "kernel_inject=True", "replace_with_kernel_inject=False"],
        ),
        ({"kernel_inject": True, "replace_with_kernel_inject": False}, {}, ["'replace_with_kernel_inject'"]),
        ({"max_tokens": 5}, {"max_out_tokens": 6}, ["'max_out_tokens'", "max_tokens=5", "max_out_tokens=6"]),
    ],
)
def test_u053_different_meanings_conflict(config: dict, kwargs: dict, words: list[str]) -> None:
    before = copy.deepcopy(config)
    with pytest.raises(ValueError, match="Conflicting argument") as caught:
        InferenceConfig.merge(config, kwargs)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)
    assert config == before


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.int8])
def test_u055_dtype_spellings(dtype: torch.dtype) -> None:
    for spelling in (dtype, *DTYPES[dtype], *(name.upper() for name in DTYPES[dtype])):
        assert accepted(dtype=spelling).dtype is dtype


@pytest.mark.parametrize("value", ["float64", "int4", None, 16, torch.float64, "", "double", True, [], {}])
def test_u055_other_dtypes_are_refused_with_the_spellings(value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        accepted(dtype=value)
    allowed = [name for spellings in DTYPES.values() for name in spellings]
    assert not [word for word in [repr(value), *allowed] if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "device", "words"),
    [
        (
            {"enable_cuda_graph": True, "return_tuple": False, **INJECT},
            "cuda",
            ["enable_cuda_graph", "return_tuple"],
        ),
        (
            {"enable_cuda_graph": True, "tp": {"tp_size": 2}},
            "cuda",
            ["enable_cuda_graph", "tensor_parallel.tp_size=2"],
        ),
        (
            {"injection_policy": {Block: "out"}, **INJECT},
            "cuda",
            ["injection_policy", "replace_with_kernel_inject"],
        ),
        ({"enable_cuda_graph": True}, "cpu", ["enable_cuda_graph", "replace_with_kernel_inject"]),
        ({"dtype": "int8", "quant": {"enabled": False}}, "cpu", ["dtype", "quant.enabled"]),
        ({"quant": {"enabled": True}, "dtype": "fp16"}, "cpu", ["quant", "dtype"]),
    ],
)
def test_u061_forbidden_combination_lists_both_options(kwargs: dict, device: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        accepted(device=device, **kwargs)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_u061_message_for_cuda_graph() -> None:
    with pytest.raises(ValueError, match="enable_cuda_graph is not supported"):
        accepted(device="cuda", enable_cuda_graph=True, return_tuple=False, **INJECT)


@pytest.mark.parametrize("old", [old for old, new in DEPRECATED.items() if new])
def test_u064_old_name_moves_with_one_warning(old: str) -> None:
    new = str(DEPRECATED[old])
    value = {"mpu": MPU, "moe_type": "residual", "moe_experts": [4]}.get(old, 2)
    for build in (
        lambda: InferenceConfig.merge({old: value}, {old: value}),
        lambda: InferenceConfig(**{old: value}),
    ):
        with pytest.warns(DeprecationWarning, match=f"^{old} is deprecated; use {new}$") as caught:
            config = build()
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert config.at(new) == value
        assert config.is_set(new)


def test_u064_replace_method_goes_nowhere() -> None:
    with pytest.warns(DeprecationWarning, match="replace_method is deprecated") as caught:
        assert accepted(replace_method="auto") == InferenceConfig()
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_u064_old_and_new_name_together() -> None:
    assert accepted(mp_size=1, tensor_parallel={"tp_size": 1}).tensor_parallel.tp_size == 1
    for build in (
        lambda: InferenceConfig.merge({"mp_size": 2}, {"tensor_parallel": {"tp_size": 4}}),
        lambda: InferenceConfig(mp_size=2, tensor_parallel={"tp_size": 4}),
    ):
        with pytest.raises(ValueError, match="Conflicting argument 'tensor_parallel.tp_size'") as caught:
            build()
        assert "mp_size=2" in str(caught.value)
        assert "tensor_parallel.tp_size=4" in str(caught.value)


def test_u064_moe_as_flag_and_as_dict() -> None:
    assert InferenceConfig(moe=True).moe.enabled is True
    assert InferenceConfig(moe=False).moe.enabled is False
    assert InferenceConfig(moe={"num_experts": [4]}).moe.moe_experts == [4]
    assert InferenceConfig(moe={"num_experts": 8}).moe.moe_experts == [8]


def test_every_field_says_what_it_means() -> None:
    silent = [
        f"{section.__name__}.{name}"
        for section in (
            InferenceConfig,
            *filter(None, map(InferenceConfig.inner, InferenceConfig.model_fields)),
        )
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert not silent


def test_readme_tables_are_those_of_the_config() -> None:
    text = README.read_text()
    assert "With transformers 5." in text
    is_of_another = f"With transformers {transformers.__version__}:" not in text
    left = ("architecture",) if is_of_another else ()
    assert text == with_tables(text, *left), "run: python bench/readme_tables.py"
