"""The engine: what it refuses, what it hands on, pipelines, copies, timing, and how it ends."""

import copy
import functools
import json
import logging
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast, pipeline

import trinfer
from tests.models import ZOO, engine_of, inputs_of, make, reference, result, token_ids
from tests.test_rewrite import Net, assert_untouched, fingerprint
from trinfer import InferenceConfig, InferenceEngine, backend, generation

TEXTS = ["w5 w17 w33", "w8", "w61 w12 w90 w44 w7"]


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<mask>": 3} | {f"w{i}": i for i in range(4, 99)}
    model = Tokenizer(WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", mask_token="<mask>", padding_side="left"
    )


def test_forward_and_attributes() -> None:
    model = make("llama")
    expected = reference(model)
    engine_ = engine_of(model)
    assert isinstance(engine_, InferenceEngine)
    assert engine_.module is model
    assert engine_.config is model.config
    assert isinstance(engine_.inference_config, InferenceConfig)
    assert engine_.plan.mode == "kernel injection"
    ids = token_ids(2, 5)
    logits = engine_(ids).logits
    assert not logits.requires_grad
    assert torch.allclose(logits, expected(ids).logits, atol=1e-4)
    tuples, truth = engine_(ids, return_dict=False), expected(ids, return_dict=False)
    assert len(tuples) == len(truth)
    assert not engine_.training
    assert engine_.dtype == torch.float32
    assert engine_.device.type == backend.default_device().type
    assert repr(engine_).startswith("InferenceEngine(")


def test_state_dict_has_the_models_own_keys() -> None:
    model = make("llama_tied")
    truth = {name: value.clone() for name, value in model.state_dict().items()}
    engine_ = engine_of(model)
    state = engine_.state_dict()
    assert state.keys() == truth.keys()
    assert all(torch.equal(state[name], truth[name]) for name in truth)
    state = {name: value * 0 for name, value in truth.items()}
    engine_.load_state_dict(state)
    assert float(engine_(token_ids(1, 3)).logits.abs().max()) == 0


def test_generate_exists_exactly_when_the_model_has_one() -> None:
    assert hasattr(engine_of(make("llama")), "generate")
    assert not hasattr(engine_of(make("bert")), "generate")
    assert not hasattr(engine_of(Net(nn.Linear(4, 4))), "generate")


def test_attributes_are_set_where_the_model_reads_them() -> None:
    engine_ = engine_of(make("llama"))
    changed = copy.deepcopy(engine_.generation_config)
    changed.max_new_tokens = 3
    engine_.generation_config = changed
    assert engine_.module.generation_config is changed
    assert engine_.generate(token_ids(1, 4)).shape[1] == 7
    engine_.note = "mine"
    assert not hasattr(engine_.module, "note")


@pytest.mark.parametrize("name", sorted(ZOO))
def test_u057_pass_through_is_bit_identical(name: str) -> None:
    model = make(name)
    expected = copy.deepcopy(model)
    engine_ = trinfer.init_inference(model, replace_with_kernel_inject=False, dtype=torch.float32)
    assert engine_.plan.mode == "pass-through"
    inputs = inputs_of(name, 2, 7)
    with torch.no_grad():
        assert torch.equal(result(engine_(**inputs)), result(expected(**inputs)))
    if expected.can_generate():
        ids = inputs["input_ids"]
        ours, theirs = (m.generate(ids, max_new_tokens=3, do_sample=False) for m in (engine_, expected))
        assert torch.equal(ours, theirs)


def test_pass_through_keeps_the_tensors_when_the_dtype_fits() -> None:
    model = make("llama")
    before = fingerprint(model)
    engine_ = trinfer.init_inference(model, dtype="fp32")
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == {
        name: before["state"][name][0] for name, _ in model.named_parameters()
    }
    engine_.destroy()
    assert_untouched(model, before)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_conversion_keeps_rotary_frequencies(dtype: str) -> None:
    model = make("llama")
    engine_ = trinfer.init_inference(model, dtype=dtype)
    assert {p.dtype for p in engine_.parameters()} == {engine_.inference_config.dtype}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert engine_(token_ids(1, 4)).logits.dtype == engine_.inference_config.dtype


def test_default_dtype_is_float16() -> None:
    assert trinfer.init_inference(make("llama")).dtype == torch.float16


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_destroy_takes_everything_back(name: str) -> None:
    model = make(name).train()
    model.model.layers[0].eval() if name == "llama" else None
    before = fingerprint(model)
    engine_ = engine_of(model)
    assert "training mode" in str(engine_.plan)
    assert not any(module.training for module in model.modules())
    engine_.profile_model_time()
    engine_(token_ids(1, 4))
    engine_.destroy()
    engine_.destroy()
    assert_untouched(model, before)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert engine_(token_ids(1, 4)).logits.isfinite().all()
    assert engine_of(model).plan.swapped


def test_destroy_says_what_stays_converted(caplog: pytest.LogCaptureFixture) -> None:
    engine_ = engine_of(make("llama"), dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO):
        engine_.destroy()
    assert "the model keeps bfloat16" in caplog.text
    assert engine_.dtype == torch.bfloat16


def test_destroying_one_engine_leaves_the_other() -> None:
    first, second = engine_of(make("llama")), engine_of(make("bert"))
    ids = token_ids(1, 5)
    before = second(ids).logits
    first.destroy()
    assert torch.equal(second(ids).logits, before)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))], ids=["deepcopy", "pickle"]
)
def test_copies_of_an_engine_stand_alone(copied: Any) -> None:
    engine_ = engine_of(make("llama"))
    ids = token_ids(1, 5)
    truth = engine_(ids).logits
    tokens = engine_.generate(ids, max_new_tokens=4, do_sample=False)
    twin = copied(engine_)
    assert isinstance(twin, InferenceEngine)
    engine_.destroy()
    assert torch.equal(twin(ids).logits, truth)
    assert torch.equal(twin.generate(ids, max_new_tokens=4, do_sample=False), tokens)
    twin.destroy()
    assert torch.allclose(twin(ids).logits, truth, atol=1e-4)


def test_to_returns_the_engine() -> None:
    engine_ = engine_of(make("llama"))
    assert engine_.to("cpu") is engine_
    assert engine_.to(torch.bfloat16).dtype == torch.bfloat16


def test_model_kept_on_the_host_waits_for_its_device() -> None:
    engine_ = trinfer.init_inference(make("llama"), dtype="fp32", keep_module_on_host=True)
    if backend.kind() != "gpu":
        assert engine_(token_ids(1, 3)).logits.isfinite().all()
    elsewhere = "cpu" if backend.kind() == "gpu" else "cuda"
    engine_.module._trinfer_limits = replace(engine_.module._trinfer_limits, waits_for=elsewhere)
    for call in (engine_, functools.partial(engine_.generate, max_new_tokens=1)):
        with pytest.raises(RuntimeError, match=rf"keep_module_on_host=True; call engine.to\('{elsewhere}'\)"):
            call(input_ids=token_ids(1, 3))


def test_training_mode_is_refused() -> None:
    engine_ = engine_of(make("llama"))
    assert engine_.eval() is engine_
    with pytest.raises(ValueError, match=r"engine.destroy\(\)"):
        engine_.train()


def test_times_of_forwards() -> None:
    engine_ = engine_of(make("llama"))
    with pytest.raises(RuntimeError, match="profile_model_time"):
        engine_.model_times()
    engine_.profile_model_time()
    engine_.profile_model_time()
    engine_(token_ids(1, 3))
    engine_.generate(token_ids(1, 3), max_new_tokens=4, do_sample=False)
    times = engine_.model_times()
    assert len(times) == 5
    assert all(0 < ms < 60_000 for ms in times)
    assert engine_.model_times() == []


def bad_calls(tmp_path: Path) -> dict[str, tuple[Any, dict[str, Any], type[Exception], str]]:
    """model or None, options, error, part of its message."""
    listed, broken = tmp_path / "list.json", tmp_path / "broken.json"
    listed.write_text("[1]")
    broken.write_text('{"dtype": ')
    return {
        "unknown key": (None, {"kernel_injct": True}, ValueError, "replace_with_kernel_inject|kernel_inject"),
        "bad dtype": (None, {"dtype": "fp8"}, ValueError, "float16"),
        "conflict": (
            None,
            {"config": {"dtype": "fp16"}, "dtype": "fp32"},
            ValueError,
            "Conflicting argument",
        ),
        "missing file": (None, {"config": "/no/such/file.json"}, FileNotFoundError, "file.json"),
        "a list in the file": (None, {"config": listed}, ValueError, "list.json"),
        "broken file": (None, {"config": broken}, ValueError, "broken.json"),
        "config of another type": (None, {"config": 3}, ValueError, "config=3"),
        "not a module": ("gpt2", {}, TypeError, "model is a str; allowed: a torch.nn.Module"),
        "no devices": (None, {"tensor_parallel": {"tp_size": 0}}, ValueError, "tp_size"),
        "two devices": (None, {"tp": {"tp_size": 2}}, NotImplementedError, "tensor_parallel.tp_size=2"),
        "no tokens": (None, {"max_out_tokens": 0}, ValueError, "max_out_tokens"),
        "minimum above maximum": (
            None,
            {"min_out_tokens": 9, "max_out_tokens": 8},
            ValueError,
            "min_out_tokens",
        ),
        "graph without kernels": (None, {"enable_cuda_graph": True}, ValueError, "enable_cuda_graph"),
        "triton without kernels": (None, {"use_triton": True}, ValueError, "use_triton"),
        "quant without int8": (None, {"quant": {"enabled": True}}, ValueError, "int8"),
        "int8": (None, {"dtype": "int8"}, NotImplementedError, "dtype"),
        "two ways to rewrite": (
            None,
            {"injection_policy": {nn.Linear: ("x",)}, "replace_with_kernel_inject": True},
            ValueError,
            "injection_policy",
        ),
        "nothing to swap": (
            Net(nn.Conv1d(2, 2, 1)),
            {"replace_with_kernel_inject": True, "dtype": "fp32"},
            ValueError,
            "finds nothing to swap",
        ),
        "whole layer": (None, {"return_tuple": False}, ValueError, "return_tuple"),
    }


def test_bad_calls_are_refused_and_leave_the_model_untouched(tmp_path: Path) -> None:
    for name, (given, options, error, message) in bad_calls(tmp_path).items():
        model = make("llama") if given is None else given
        before = fingerprint(model) if isinstance(model, nn.Module) else None
        with pytest.raises(error, match=message):
            trinfer.init_inference(model, **options)
            pytest.fail(f"{name} was accepted")
        if before is not None:
            assert_untouched(model, before)


def test_pipeline_object_gets_the_hint() -> None:
    pipe = pipeline("text-generation", model=make("llama"), tokenizer=tokenizer())
    with pytest.raises(TypeError, match=r"pipe.model = trinfer.init_inference\(pipe.model\)"):
        trinfer.init_inference(pipe)


def test_a_second_engine_on_the_same_model_is_refused() -> None:
    engine_ = engine_of(make("llama"))
    for taken in (engine_, engine_.module):
        with pytest.raises(ValueError, match=r"belongs to an engine already; call engine.destroy\(\)"):
            engine_of(taken)


def test_meta_models_are_refused_by_name() -> None:
    real = make("llama")
    with torch.device("meta"):
        model = type(real)(real.config)
    with pytest.raises(ValueError, match=r"meta device: model.embed_tokens.weight, .* and \d+ more"):
        engine_of(model)


def test_failure_after_the_plan_takes_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama").train()
    before = fingerprint(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(generation, "attach", fail)
    with pytest.raises(RuntimeError, match="out of luck") as caught:
        engine_of(model)
    assert not hasattr(caught.value, "__notes__")
    assert_untouched(model, before)
    with pytest.raises(RuntimeError, match="out of luck") as caught:
        engine_of(model, dtype=torch.bfloat16)
    assert "its dtype stays" in caught.value.__notes__[0]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert "forward" not in model.lm_head.__dict__


def test_kernel_injection_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_triton", lambda: False)
    model = make("llama")
    before = fingerprint(model)
    with pytest.raises(ValueError, match=r"needs Triton .* pip install triton"):
        engine_of(model)
    assert_untouched(model, before)
    assert trinfer.init_inference(model, dtype="fp32").plan.mode == "pass-through"


WITHOUT_TRITON = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
sys.meta_path.insert(0, Blocked())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "triton" else found(name, *rest)
import torch, trinfer
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                     num_attention_heads=2))
engine = trinfer.init_inference(model, dtype="fp32")
assert engine.generate(torch.tensor([[3, 4]]), max_new_tokens=2, eos_token_id=None).shape == (1, 4)
try:
    trinfer.init_inference(LlamaForCausalLM(model.config), dtype="fp32", kernel_inject=True)
except ValueError as refusal:
    assert "pip install triton" in str(refusal), refusal
else:
    raise AssertionError("kernel injection without triton was not refused")
"""


def test_pass_through_works_without_triton() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_import_and_pass_through_load_no_kernel() -> None:
    code = "import sys, trinfer; print(sorted(m for m in sys.modules if m.startswith('trinfer.kernels')))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout.replace("'", '"')) == []


def run_pipeline(pipe: Any, **options: Any) -> Any:
    return pipe(TEXTS, max_new_tokens=4, do_sample=False, **options)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_u075_pipelines_give_the_same_text(batch_size: int, caplog: pytest.LogCaptureFixture) -> None:
    model = make("llama")
    truth = run_pipeline(
        pipeline("text-generation", model=reference(model), tokenizer=tokenizer()), batch_size=batch_size
    )
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer())
    pipe.model = engine_of(model)
    assert run_pipeline(pipe, batch_size=batch_size) == truth
    transformers.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        built = pipeline("text-generation", model=pipe.model, tokenizer=tokenizer())
    transformers.logging.disable_propagation()
    assert "not supported" not in caplog.text
    assert run_pipeline(built, batch_size=batch_size) == truth
    assert pipe(TEXTS[0], max_new_tokens=4, do_sample=False) == truth[0]


def test_u075_pipeline_of_an_encoder() -> None:
    model = make("bert")
    truth = pipeline("fill-mask", model=reference(model), tokenizer=tokenizer())("w5 <mask> w9")
    ours = pipeline("fill-mask", model=engine_of(model), tokenizer=tokenizer())("w5 <mask> w9")
    assert [entry["token"] for entry in ours] == [entry["token"] for entry in truth]


def test_u075_attributes_that_tools_read() -> None:
    model = make("llama")
    engine_ = engine_of(model)
    assert engine_.config.model_type == "llama"
    assert engine_.device == model.device
    assert engine_.generation_config is model.generation_config
    assert engine_.can_generate()
    assert engine_.get_input_embeddings() is model.model.embed_tokens
    assert engine_.main_input_name == "input_ids"
    prepared = engine_.prepare_inputs_for_generation(token_ids(1, 3), attention_mask=None)
    assert prepared["input_ids"].shape == (1, 3)
    with pytest.raises(AttributeError, match="no_such_thing"):
        engine_.no_such_thing  # noqa: B018
