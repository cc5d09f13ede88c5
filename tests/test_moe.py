"""Mixtures of experts: every family against transformers' eager code, what the plan says, the moe option."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import trinfer
from tests.models import DEVICE, engine_of, left_padded, make, reference, token_ids
from tests.moe_models import MOE
from tests.test_architectures import LOGIT_BOUND, assert_same_logits
from tests.test_rewrite import assert_untouched, fingerprint, paths_of, plan_of, why_kept
from trinfer import ARCHITECTURES, backend
from trinfer.kernels import count_launches
from trinfer.rewrite import read_moe
from trinfer.rewrite.match import Found
from trinfer.rewrite.probe import Probes


def moe_model(name: str, **overrides: Any) -> PreTrainedModel:
    """A model of the zoo in which the buffers of routers are random as well."""
    model = make(name, **overrides)
    for path, buffer in model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape))
    return model


def stranger(name: str, **overrides: Any) -> PreTrainedModel:
    """The same under a model_type that no row has."""
    model = moe_model(name, **overrides)
    model.config.model_type = f"unknown_{model.config.model_type}"
    return model


def moe_paths(model: nn.Module) -> list[str]:
    return list(read_moe.experts_in(model))


@pytest.mark.parametrize("build", [moe_model, stranger], ids=["family", "stranger"])
@pytest.mark.parametrize("name", MOE)
def test_logits_match_transformers_and_undo_restores(name: str, build: Any) -> None:
    model = build(name)
    expected = reference(model)
    before = fingerprint(model)
    ids, mask = left_padded([12, 7])
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    engine = engine_of(model)
    # 3 tokens go to their experts unsorted, 120 are sorted
    for rows, tokens in ((1, 1), (1, 3), (2, 9), (3, 40)):
        x = token_ids(rows, tokens)
        assert_same_logits(engine(x).logits, expected(x).logits)
    assert_same_logits(
        engine(ids, attention_mask=mask).logits, expected(ids, attention_mask=mask).logits, mask.bool()
    )
    engine.destroy()
    assert_untouched(model, before)
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MOE)
def test_16_bits_are_no_further_off_than_transformers(name: str, dtype: torch.dtype) -> None:
    model = moe_model(name)
    exact = reference(model)
    theirs = reference(model).to(dtype)
    engine = engine_of(model, dtype)
    ids = token_ids(3, 20)
    with torch.no_grad():
        truth = exact(ids).logits
        errors = [(m(ids).logits.float() - truth).abs().amax(-1) for m in (engine, theirs)]
    # half of the positions: in some, rounding chooses between experts that are almost as good, for both of us
    ours, own = (float(error.median()) for error in errors)
    assert ours <= min(1.25 * own, LOGIT_BOUND[dtype])


@pytest.mark.parametrize("name", MOE)
def test_generate_matches_transformers(name: str) -> None:
    model = moe_model(name)
    expected = reference(model)
    engine = engine_of(model)
    ids, mask = left_padded([9, 5])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6}
    assert torch.equal(engine.generate(ids, **options), expected.generate(ids, **options))


@pytest.mark.parametrize("name", MOE)
def test_plan_names_rule_layout_and_what_stays(name: str) -> None:
    model = moe_model(name)
    plan = plan_of(model)
    experts = moe_paths(model)
    assert experts
    assert paths_of(plan, "experts") == experts
    assert len(paths_of(plan, "router")) == len(experts)
    steps = {step.path: step for step in plan.swapped}
    for path in experts:
        record = steps[path].record
        is_oss = name == "gpt_oss"
        assert (record.act, record.halves, record.transposed, bool(record.up_bias)) == (
            ("swiglu_clamped", "gate_up_rows", True, True) if is_oss else ("silu", "gate_up", False, False)
        )
    layers = {"qwen2_moe_dense": 1, "deepseek_v2": 1, "deepseek_v2_groups": 1, "deepseek_v3": 1}.get(name, 2)
    assert len(experts) == layers
    rules = {step.record for step in plan.swapped if step.forward == "router"}
    (rule,) = rules
    config = model.config
    assert rule.top_k == config.num_experts_per_tok
    expected = {
        "mixtral": ("softmax", True, 1.0, 1, False),
        "qwen3_moe_normed": ("softmax", True, 1.0, 1, False),
        "deepseek_v2": ("softmax", False, 1.5, 1, True),
        "deepseek_v2_groups": ("softmax", False, 1.5, 4, True),
        "deepseek_v3": ("sigmoid", True, 1.5, 4, True),
    }.get(name, ("softmax", config.to_dict().get("norm_topk_prob", False), 1.0, 1, False))
    if name == "gpt_oss":
        # softmax over the chosen ones is softmax over all, divided by the sum of the chosen
        expected = ("softmax", True, 1.0, 1, False)
    assert (rule.scoring, rule.renormalize, rule.scale, rule.num_groups, rule.is_wide) == expected
    assert (rule.kept_groups, rule.group_best) == {
        "deepseek_v2_groups": (2, 1),
        "deepseek_v3": (2, 2),
    }.get(name, (1, 2))


def test_a_gate_that_no_kernel_has_stays_between_the_products() -> None:
    model = moe_model("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.experts.limit = 0.5
    expected = reference(model)
    engine = engine_of(model)
    steps = {step.path: step for step in engine.plan.swapped}
    experts = steps["model.layers.0.mlp.experts"]
    assert experts.record.act == ""
    assert experts.becomes.endswith("its own gate in torch between")
    for tokens in (3, 40):
        ids = token_ids(2, tokens)
        assert_same_logits(engine(ids).logits, expected(ids).logits)


def test_plan_is_the_same_on_meta() -> None:
    for name in ("mixtral", "deepseek_v3", "gpt_oss"):
        model = moe_model(name)
        with torch.device("meta"):
            meta = type(model)(model.config).eval()
        assert plan_of(meta) == plan_of(model)


@pytest.mark.skipif(backend.kind() == "reference", reason="counts launches of kernels")
def test_launches_of_few_and_of_many_tokens() -> None:
    engine = engine_of(moe_model("mixtral"))
    moe = engine.module.model.layers[0].mlp
    for tokens, expected in (
        (1, {"router": 1, "grouped_gemv": 2}),
        (16, {"router": 1, "grouped_gemv": 2}),
        (
            64,
            {"matmul": 1, "routing": 1, "sort_by_expert": 1, "grouped_matmul": 2, "combine_experts": 1},
        ),
    ):
        x = torch.randn(1, tokens, 64, device=DEVICE)
        with count_launches() as launches, torch.no_grad():
            moe(x)
        assert launches == expected


def test_router_logits_on_request() -> None:
    model = moe_model("mixtral")
    expected = reference(model)
    engine = engine_of(model)
    ids = token_ids(2, 9)
    ours, theirs = (m(ids, output_router_logits=True) for m in (engine, expected))
    assert len(ours.router_logits) == len(theirs.router_logits) == 2
    for logits, truth in zip(ours.router_logits, theirs.router_logits, strict=True):
        assert torch.allclose(logits, truth, atol=1e-5)
    assert abs(float(ours.aux_loss.detach()) - float(theirs.aux_loss.detach())) < 1e-5


def found_in(model: nn.Module) -> dict[str, Found | str]:
    return dict(read_moe.readings(model, Probes(torch.float32, DEVICE)))


def test_routers_and_experts_that_are_otherwise_stay_with_a_reason() -> None:
    model = moe_model("mixtral")
    first, second = (layer.mlp for layer in model.model.layers)
    first.gate.__class__ = DoublingRouter
    second.experts.__class__ = DoublingExperts
    expected = reference(model)
    plan = plan_of(model)
    assert why_kept(plan, "model.layers.0.mlp.gate") == "chooses by a rule that the kernel does not have"
    assert "forward is defined in tests.test_moe" in why_kept(plan, "model.layers.1.mlp.experts")
    assert "experts that keep their own code" in why_kept(plan, "model.layers.1.mlp.gate")
    assert paths_of(plan, "experts") == ["model.layers.0.mlp.experts"]
    engine = engine_of(model)
    ids = token_ids(2, 9)
    assert_same_logits(engine(ids).logits, expected(ids).logits)


class DoublingRouter(type(moe_model("mixtral").model.layers[0].mlp.gate)):  # type: ignore[misc]
    """Gives every expert twice its weight."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        logits, weights, ids = super().forward(hidden_states)
        return logits, 2 * weights, ids


class DoublingExperts(type(moe_model("mixtral").model.layers[0].mlp.experts)):  # type: ignore[misc]
    """Gives twice what its experts give."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


def test_experts_after_a_norm_or_over_devices_stay() -> None:
    for attribute, reason in (
        ("has_post_expert_norm", "a norm after"),
        ("_is_expert_parallel", "over devices"),
    ):
        model = moe_model("mixtral")
        setattr(model.model.layers[0].mlp.experts, attribute, True)
        assert reason in str(found_in(model)["model.layers.0.mlp.experts"])


def test_a_gate_with_its_halves_the_other_way_round_is_read() -> None:
    model = moe_model("mixtral")
    experts = model.model.layers[0].mlp.experts

    def swapped(self: Any, gate_up: Tensor) -> Tensor:
        up, gate = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    experts._apply_gate = swapped.__get__(experts)
    found = found_in(model)["model.layers.0.mlp.experts"]
    # transformers' eager code of these experts does not ask _apply_gate, so the two disagree
    assert isinstance(found, str)
    assert "gives something else" in found


@pytest.mark.parametrize(
    ("name", "moe", "words"),
    [
        (
            "llama",
            True,
            ["moe={'enabled': True}", "LlamaForCausalLM has no", "leave moe out"],
        ),
        ("llama", {"num_experts": 8}, ["moe={'moe_experts': [8]}", "has no mixture-of-experts layers"]),
        ("mixtral", {"num_experts": 8}, ["moe.moe_experts=[8]", "have 4 experts"]),
        ("mixtral", {"moe_experts": [4, 8]}, ["moe.moe_experts=[4, 8]", "have 4 experts"]),
        ("mixtral", {"type": "residual"}, ["moe.type='residual'", "dense branch and a coefficient"]),
    ],
)
@pytest.mark.parametrize("inject", [True, False])
def test_moe_option_that_does_not_fit_raises(name: str, moe: Any, words: list[str], inject: bool) -> None:
    model = make("llama") if name == "llama" else moe_model(name)
    before = fingerprint(model)
    with pytest.raises(ValueError) as caught:
        trinfer.init_inference(model, dtype="fp32", replace_with_kernel_inject=inject, moe=moe)
    assert not [word for word in words if word not in str(caught.value)]
    assert_untouched(model, before)


@pytest.mark.parametrize("moe", [True, {}, {"num_experts": 4}, {"moe_experts": [4, 4]}])
def test_moe_option_that_fits_changes_nothing(moe: Any) -> None:
    model = moe_model("mixtral")
    plain = plan_of(model)
    assert trinfer.make_plan(model, dtype="fp32", replace_with_kernel_inject=True, moe=moe) == plain


@pytest.mark.parametrize("build", [moe_model, stranger], ids=["family", "stranger"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_moe_false_leaves_the_layers_as_they_are(name: str, build: Any) -> None:
    model = build(name)
    expected = reference(model)
    engine = engine_of(model, moe=False)
    assert not [path for path in paths_of(engine.plan) if ".mlp" in path]
    assert why_kept(engine.plan, "model.layers.0.mlp") == "moe.enabled=False"
    assert not any("_trinfer" in part.__dict__ for part in model.model.layers[1].mlp.modules())
    ids = token_ids(2, 9)
    assert_same_logits(engine(ids).logits, expected(ids).logits)


class ResidualBlock(nn.Module):
    """Experts and a dense branch, each with the share that a linear gives it."""

    experts_first = False

    def __init__(self, sparse: nn.Module, width: int) -> None:
        super().__init__()
        self.gate, self.experts = sparse.gate, sparse.experts
        self.dense = nn.Sequential(nn.Linear(width, 40), nn.GELU(), nn.Linear(40, width))
        self.shares = nn.Linear(width, 2)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.flatten(0, -2)
        _, weights, ids = self.gate(x)
        first, second = self.dense(x), self.experts(x, ids, weights)
        if self.experts_first:
            first, second = second, first
        shares = self.shares(x).softmax(-1)
        return (first * shares[:, :1] + second * shares[:, 1:]).view(hidden_states.shape)


class ExpertsFirst(ResidualBlock):
    """The shares the other way round."""

    experts_first = True


RESIDUAL = replace(ARCHITECTURES["mixtral"], dense_branch="mlp.dense", coefficient="mlp.shares")


def residual_model(kind: type[ResidualBlock] = ResidualBlock) -> PreTrainedModel:
    model = make("mixtral")
    for layer in model.model.layers:
        layer.mlp = kind(layer.mlp, 64).eval().to(DEVICE)
    return model


@pytest.mark.parametrize("kind", [ResidualBlock, ExpertsFirst])
@pytest.mark.parametrize("way", ["policy", "row"])
def test_residual_layers_run_in_the_kernels(
    kind: type[ResidualBlock], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = residual_model(kind)
    expected = reference(model)
    before = fingerprint(model)
    options: dict[str, Any] = {"dtype": "fp32", "moe": {"type": "residual", "num_experts": 4}}
    if way == "row":
        monkeypatch.setitem(ARCHITECTURES, "mixtral", RESIDUAL)
        options |= {"replace_with_kernel_inject": True}
    else:
        options |= {"injection_policy": {type(model.model.layers[0]): RESIDUAL}}
    engine = trinfer.init_inference(model, **options)
    steps = {step.path: step for step in engine.plan.swapped}
    assert steps["model.layers.1.mlp"].record.dense_first == (kind is ResidualBlock)
    assert steps["model.layers.1.mlp.experts"].forward == "experts"
    assert steps["model.layers.1.mlp.gate"].forward == "router"
    for tokens in (3, 40):
        ids = token_ids(2, tokens)
        assert_same_logits(engine(ids).logits, expected(ids).logits)
    engine.destroy()
    assert_untouched(model, before)


def test_residual_layers_without_their_type_keep_the_models_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "mixtral", RESIDUAL)
    model = residual_model()
    expected = reference(model)
    engine = engine_of(model)
    assert not paths_of(engine.plan, "residual_moe")
    assert len(paths_of(engine.plan, "experts")) == 2
    ids = token_ids(2, 9)
    assert_same_logits(engine(ids).logits, expected(ids).logits)


def test_residual_layers_that_compute_something_else_stay() -> None:
    model = residual_model()
    for layer in model.model.layers:
        layer.mlp.shares = nn.Linear(64, 3).to(DEVICE)
    policy = {type(model.model.layers[0]): RESIDUAL}
    plan = trinfer.make_plan(model, dtype="fp32", injection_policy=policy, moe={"type": "residual"})
    assert "shares is no plain Linear with two outputs" in why_kept(plan, "model.layers.0.mlp")
