"""Plan, apply and undo: what is swapped, what is kept and why, and that nothing else changes."""

import copy
import functools
import pickle
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

import trinfer
from tests.models import (
    DEVICE,
    ZOO,
    engine_of,
    inputs_of,
    left_padded,
    make,
    reference,
    result,
    token_ids,
)
from trinfer import backend
from trinfer.rewrite.apply import FORWARDS, apply, undo
from trinfer.rewrite.plan import collapse


def plan_of(model: nn.Module) -> trinfer.engine.Plan:
    return trinfer.make_plan(model, dtype="fp32", replace_with_kernel_inject=True)


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything that a swap may not leave behind, with tensors by value and address."""
    state = {
        name: (tensor.data_ptr(), tensor.clone())
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    attributes = {
        path: (type(module), module.training, {k for k in module.__dict__ if not k.startswith("_forward")})
        for path, module in model.named_modules()
    }
    chosen = model.config._attn_implementation if isinstance(model, PreTrainedModel) else None
    return {"state": state, "attributes": attributes, "attention": chosen}


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    after = fingerprint(model)
    assert after["attributes"] == before["attributes"]
    assert after["attention"] == before["attention"]
    assert after["state"].keys() == before["state"].keys()
    for name, (address, value) in before["state"].items():
        assert after["state"][name][0] == address, name
        assert torch.equal(after["state"][name][1], value), name


def paths_of(plan: Any, forward: str = "") -> list[str]:
    return [step.path for step in plan.swapped if forward in step.forward]


def why_kept(plan: Any, path: str) -> str:
    return next(entry.why for entry in plan.kept if entry.path == path)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_plan_is_the_same_on_meta_models_and_touches_nothing(name: str) -> None:
    model = make(name)
    before = fingerprint(model)
    plan = plan_of(model)
    assert_untouched(model, before)
    with torch.device("meta"):
        meta = type(model)(model.config).eval()
    assert plan_of(meta) == plan
    assert hash(plan) == hash(plan_of(model))


@pytest.mark.parametrize("name", sorted(ZOO))
def test_undo_restores_the_model(name: str) -> None:
    model = make(name)
    before = fingerprint(model)
    inputs = inputs_of(name, 1, 6)
    with torch.no_grad():
        logits = result(model(**inputs))
    plan = plan_of(model)
    apply(model, plan)
    assert all("forward" in model.get_submodule(path).__dict__ for path in paths_of(plan))
    undo(model, plan)
    assert_untouched(model, before)
    with torch.no_grad():
        assert torch.equal(result(model(**inputs)), logits)
    undo(model, plan)
    assert_untouched(model, before)


def test_failure_while_applying_rolls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    before = fingerprint(model)
    plan = plan_of(model)
    broken = replace(plan.swapped[-1], path="no.such.module")
    with pytest.raises(AttributeError):
        apply(model, replace(plan, steps=(*plan.steps, broken)))
    assert_untouched(model, before)
    monkeypatch.delitem(FORWARDS, "linear")
    with pytest.raises(KeyError):
        engine_of(model)
    assert_untouched(model, before)


def leaves(record: Any) -> Iterator[Any]:
    """What a record holds, and the records in it."""
    for value in vars(record).values():
        yield from leaves(value) if is_dataclass(value) else [value]


def test_records_hold_no_tensor() -> None:
    for name in ("llama", "bert", "qwen3"):
        for step in plan_of(make(name)).swapped:
            assert all(isinstance(v, str | int | float | bool | None) for v in leaves(step.record))
            with pytest.raises(AttributeError):
                step.record.anything = 1


def test_parameters_ties_and_keys_stay() -> None:
    model = make("llama_tied")
    keys, addresses = list(model.state_dict()), [p.data_ptr() for p in model.parameters()]
    engine = engine_of(model)
    assert list(engine.module.state_dict()) == keys
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_save_and_load(tmp_path: Path) -> None:
    model = make("llama_tied")
    expected = reference(model)
    engine = engine_of(model)
    engine.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM
    assert loaded.config._attn_implementation != "trinfer"
    ids = token_ids(2, 6)
    loaded.set_attn_implementation("eager")
    assert torch.equal(loaded(ids).logits, expected(ids).logits)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_stand_alone(copied: Any) -> None:
    engine = engine_of(make("llama"))
    ids, mask = left_padded([6, 3])
    before = engine(ids, attention_mask=mask).logits
    twin = copied(engine.module)
    assert type(twin).__name__ == "LlamaForCausalLM"
    for path in paths_of(engine.plan):
        assert twin.get_submodule(path).forward.args[0] is twin.get_submodule(path)
    with torch.no_grad():
        assert torch.equal(twin(ids, attention_mask=mask).logits, before)
        twin.model.norm.weight.mul_(2)
        assert not torch.equal(twin(ids, attention_mask=mask).logits, before)
    assert torch.equal(engine(ids, attention_mask=mask).logits, before)
    engine.destroy()
    options = {"do_sample": False, "max_new_tokens": 3, "attention_mask": mask}
    assert twin.generate(ids, **options).shape == (2, 9)


def test_models_of_one_config_object_stay_apart() -> None:
    first = make("llama")
    second = LlamaForCausalLM(first.config).eval()
    third = LlamaForCausalLM(first.config).eval()
    before = second.config._attn_implementation
    engine, other = engine_of(first), engine_of(third)
    assert second.config._attn_implementation == before
    assert engine.config._attn_implementation == other.config._attn_implementation == "trinfer"
    engine.destroy()
    assert first.config._attn_implementation == before
    assert other.config._attn_implementation == "trinfer"


def test_plan_prints_paths_changes_and_reasons() -> None:
    plan = plan_of(make("llama"))
    text = str(plan)
    for part in (
        "kernel injection · LlamaForCausalLM (llama) · 13 modules swapped",
        "model.layers.{0..1}.mlp",
    ):
        assert part in text
    for column in ("path", "was", "becomes", "why", "kept", "step: "):
        assert column in text
    assert "cos and sin are made once per forward, in torch" in text
    page = plan._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 2
    assert "<td" in page
    assert "&lt;b&gt;" in replace(plan, model="<b>")._repr_html_()


def test_collapse_joins_only_what_differs_by_one_number() -> None:
    rows = [(f"layers.{i}.mlp", ("A",)) for i in (0, 1, 2, 5, 7)] + [
        ("layers.3.mlp", ("B",)),
        ("head", ("A",)),
    ]
    assert collapse([*rows, ("9", ("A",)), ("", ("A",))]) == [
        ("layers.{0..2,5,7}.mlp", "A"),
        ("layers.3.mlp", "B"),
        ("head", "A"),
        ("9", "A"),
        ("(model)", "A"),
    ]


def test_pass_through_plan_swaps_nothing() -> None:
    plan = trinfer.make_plan(make("llama"), dtype="fp16", keep_module_on_host=True)
    assert plan.mode == "pass-through"
    assert not plan.swapped
    assert {(step.was, step.becomes) for step in plan.steps} == {
        ("float32", "float16"),
        ("host memory", "host memory"),
    }
    assert "met by definition on a CPU" in str(plan) or backend.kind() == "gpu"


class Net(nn.Module):
    """Nothing that trinfer knows."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


class RenamedLlama(LlamaForCausalLM):
    """As a model with remote code names it."""


class DoubledMLP(LlamaMLP):
    """Looks like a LlamaMLP and computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class HalfLinear(nn.Linear):
    """A subclass as quantisers and adapters make it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


def test_u059_nothing_to_swap_raises_and_says_what_was_looked_for() -> None:
    model = Net(nn.Conv1d(3, 4, 1))
    before = fingerprint(model)
    with pytest.raises(
        ValueError, match=r"finds nothing to swap in Net; .*bart, bert, .*llama.*nn.Linear.*Conv1d \(no"
    ):
        engine_of(model)
    assert_untouched(model, before)


@pytest.mark.parametrize("name", ["net", "t5", "renamed"])
def test_u059_partly_known_models_are_swapped_and_the_rest_has_reasons(name: str) -> None:
    model = {
        "net": lambda: Net(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))).eval().to(DEVICE),
        "t5": lambda: make("t5"),
        "renamed": lambda: RenamedLlama(make("llama").config).eval(),
    }[name]()
    plan = plan_of(model)
    assert plan.swapped
    assert all(entry.why for entry in plan.kept)
    if name == "net":
        x = torch.randn(3, 6, device=DEVICE)
        truth = model(x).detach()
        assert torch.allclose(engine_of(model)(x), truth, atol=1e-5)
        assert why_kept(plan, "child.1") == "no kernel for this class"
    if name == "renamed":
        assert plan.architecture == "llama"
        assert len(paths_of(plan, "mlp")) == 2


def test_changed_parts_are_kept_with_their_reason_and_stay_right() -> None:
    model = make("llama")
    layers = model.model.layers
    layers[0].mlp.__class__ = DoubledMLP
    layers[0].self_attn.k_proj.__class__ = HalfLinear
    layers[1].self_attn.forward = functools.partial(type(layers[1].self_attn).forward, layers[1].self_attn)
    expected = reference(model)
    # after the deep copy, whose partial would be bound to the copy
    calls: list[int] = []
    layers[1].mlp.up_proj.register_forward_hook(lambda *_: calls.append(1))
    plan = plan_of(model)
    assert "its forward is defined in tests.test_rewrite" in why_kept(plan, "model.layers.0.mlp")
    assert (
        why_kept(plan, "model.layers.0.self_attn")
        == "k_proj is a HalfLinear of tests.test_rewrite, not a plain Linear"
    )
    assert "on the instance" in why_kept(plan, "model.layers.1.self_attn")
    assert "up_proj has forward hooks" in why_kept(plan, "model.layers.1.mlp")
    assert "model.layers.1.mlp.up_proj" in paths_of(plan, "linear")
    assert "model.layers.0.self_attn.q_proj" in paths_of(plan, "linear")
    engine = engine_of(model)
    ids, mask = left_padded([8, 5])
    ours, theirs = (m(ids, attention_mask=mask).logits.detach() for m in (engine, expected))
    assert float((ours - theirs)[mask.bool()].abs().max()) <= 1e-4
    assert calls


def test_parts_the_row_does_not_name_keep_the_module() -> None:
    model = make("llama")
    model.model.layers[0].self_attn.q_norm = nn.LayerNorm(8)
    model.model.layers[1].mlp.scale = nn.Parameter(torch.ones(1))
    plan = plan_of(model)
    assert why_kept(plan, "model.layers.0.self_attn") == "has q_norm, which the row does not name"
    assert why_kept(plan, "model.layers.1.mlp") == "has scale, which the row does not name"


def test_activation_without_a_kernel_keeps_the_mlp() -> None:
    plan = plan_of(make("llama", hidden_act="mish"))
    assert why_kept(plan, "model.layers.0.mlp") == "no kernel for its activation MishActivation"
    assert "model.layers.0.mlp.gate_proj" in paths_of(plan, "linear")
