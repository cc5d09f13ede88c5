"""The generic pass: models without a row, read from their code; what is refused, and why."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import trinfer
from tests.models import DEVICE, ZOO, engine_of, inputs_of, left_padded, make, reference, result, token_ids
from tests.test_architectures import assert_same_logits
from tests.test_rewrite import assert_untouched, fingerprint, paths_of, plan_of, why_kept
from tests.unseen import Gaze, Odd, OddConfig, odd_model
from trinfer.rewrite import generic
from trinfer.rewrite.apply import FORWARDS
from trinfer.rewrite.match import Found
from trinfer.rewrite.probe import Probes

# model types whose attention never asks transformers' interface, and those that ask it in some versions
NEVER = ("bloom", "falcon", "gpt_neo", "mpt", "megatron-bert")
SOMETIMES = ("codegen", "gptj", "t5")
GENERATIVE = [name for name, (_, kind, _) in ZOO.items() if kind == "CausalLM" and name != "bert_decoder"]


def stranger(name: str, **overrides: Any) -> PreTrainedModel:
    """A model of the zoo under a model_type that no row has."""
    model = make(name, **overrides)
    model.config.model_type = f"unknown_{model.config.model_type}"
    return model


def record_of(module: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    """What the generic pass reads of a module that stands in a model, a record or the reason for none."""
    model = nn.ModuleDict({"part": module.eval()})
    found = dict(generic.readings(model, Probes(dtype, DEVICE), frozenset())).get("part")
    return found.record if isinstance(found, Found) else found


class Lambda(nn.Module):
    """A module with some parameters whose forward is a function of them."""

    def __init__(self, function: Any, width: int = 24, **parameters: Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))
        self.width, self.function = width, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def test_an_unseen_architecture_is_rewritten() -> None:
    model = odd_model()
    expected = reference(model)
    before = fingerprint(model)
    ids, mask = left_padded([12, 7])
    logits = model(ids, attention_mask=mask).logits
    plan = plan_of(model)
    assert plan.attention == "eager"
    norms = [f"stages.{i}.{name}" for i in (0, 1) for name in ("before", "between", "behind")]
    assert sorted(paths_of(plan, "read_norm")) == sorted([*norms, "last"])
    assert paths_of(plan, "read_mlp") == ["stages.1.mlp"]
    assert paths_of(plan, "linear_act") == ["stages.0.widen", "stages.1.widen"]
    linears = {path for path, part in model.named_modules() if type(part) is nn.Linear}
    products = {*paths_of(plan, "linear"), *(f"stages.1.mlp.{name}" for name in ("both", "close"))}
    assert linears == products
    # only the strange activation stays in torch
    assert {entry.was for entry in plan.kept} == {"Odd", "Fold", "Strange"}
    assert "activation is none of the kernels'" in why_kept(plan, "stages.0.mlp")
    engine = engine_of(model)
    assert model.config._attn_implementation == "trinfer"
    assert_same_logits(
        engine(ids, attention_mask=mask).logits, expected(ids, attention_mask=mask).logits, mask.bool()
    )
    assert_same_logits(engine(ids).logits, expected(ids).logits)
    engine.destroy()
    assert_untouched(model, before)
    assert torch.equal(model(ids, attention_mask=mask).logits, logits)


@pytest.mark.parametrize("name", ["odd", "opt", "phi3", "t5", "modernbert"])
def test_kernels_do_the_multiply_adds_of_models_without_a_row(name: str) -> None:
    model = odd_model() if name == "odd" else stranger(name)
    expected = reference(model)
    engine = engine_of(model)
    inputs = {"input_ids": token_ids(2, 33)} if name == "odd" else inputs_of(name, 2, 33)
    # a kernel's first launch may measure in torch
    engine(**inputs)
    counts = []
    for called in (expected, engine):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            called(**inputs)
        counts.append(counter.get_total_flops())
    assert counts[0] > 0
    assert counts[1] <= 0.05 * counts[0] or (name == "t5" and engine.plan.attention is None)


def test_an_unseen_architecture_has_the_same_plan_on_meta() -> None:
    with torch.device("meta"):
        meta = Odd(OddConfig(attn_implementation="eager")).eval()
    before = {path: set(module.__dict__) for path, module in meta.named_modules()}
    assert plan_of(meta) == plan_of(odd_model())
    assert {path: set(module.__dict__) for path, module in meta.named_modules()} == before
    assert all(parameter.is_meta for parameter in meta.parameters())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-2), (torch.bfloat16, 8e-2)], ids=str)
def test_an_unseen_architecture_in_16_bits(dtype: torch.dtype, bound: float) -> None:
    model = odd_model()
    expected = reference(model)
    engine = engine_of(model, dtype)
    records_of = {step.path: step.record for step in engine.plan.swapped}
    # rounding before or after the weight is what the code says, and shows in 16 bits only
    assert records_of["stages.0.before"].cast == "float32"
    assert records_of["stages.0.between"].cast == "input"
    assert len(paths_of(engine.plan, "read_norm")) == 7
    ids = token_ids(2, 11)
    assert float((engine(ids).logits.float() - expected(ids).logits).detach().abs().max()) <= bound


@pytest.mark.parametrize("name", sorted(ZOO))
def test_families_under_a_name_without_row(name: str) -> None:
    model = stranger(name)
    expected = reference(model)
    engine = engine_of(model)
    inputs = inputs_of(name, 2, 9)
    assert_same_logits(result(engine(**inputs)), result(expected(**inputs)))
    if ZOO[name][1] in ("CausalLM", "MaskedLM"):
        ids, mask = left_padded([9, 5])
        ours, theirs = (m(ids, attention_mask=mask).logits for m in (engine, expected))
        assert_same_logits(ours, theirs, mask.bool())
    kept = {entry.path.rpartition(".")[2]: entry.why for entry in engine.plan.kept if entry.path}
    strange = {"mlp"} if "activation is none" in kept.get("mlp", "") else set()
    assert not {"mlp", "ffn", "input_layernorm", "norm", "DenseReluDense", "layer_norm"} & set(kept) - strange
    if ZOO[name][0] not in SOMETIMES:
        uses = getattr(model.config, "_attn_implementation", None) == "trinfer"
        assert uses == (ZOO[name][0] not in NEVER)


@pytest.mark.parametrize("name", GENERATIVE)
def test_families_under_a_name_without_row_generate(name: str) -> None:
    model = stranger(name)
    expected = reference(model)
    engine = engine_of(model)
    ids, mask = left_padded([9, 5])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6}
    assert torch.equal(engine.generate(ids, **options), expected.generate(ids, **options))


def test_attentions_with_softcap_and_with_position_bias_on_request() -> None:
    for name in ("gemma2", "t5"):
        model = stranger(name)
        expected = reference(model)
        engine = engine_of(model)
        ids, mask = left_padded([9, 5])
        options: dict[str, Any] = {"attention_mask": mask, "output_attentions": True}
        options |= {"decoder_input_ids": token_ids(2, 3)} if name == "t5" else {}
        ours, theirs = engine(ids, **options), expected(ids, **options)
        key = "encoder_attentions" if name == "t5" else "attentions"
        # older versions of transformers give no attentions of T5
        for weights, truth in zip(getattr(ours, key), getattr(theirs, key), strict=name != "t5"):
            rows = mask.bool()
            assert torch.allclose(weights.transpose(1, 2)[rows], truth.transpose(1, 2)[rows], atol=1e-5)


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class PlainNorm(nn.Module):
    """A norm without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (x.shape[-1],), eps=1e-4)


def test_constants_of_norms_are_read() -> None:
    ones, zeros = torch.ones(24), torch.zeros(24)
    for eps in (1e-5, 1e-6, 2e-3):
        found = record_of(Lambda(lambda m, x, eps=eps: rms(x, eps) * m.w, w=ones))
        assert (found.kind, found.eps, found.offset, found.weight) == ("rms", eps, 0.0, "w")
    found = record_of(Lambda(lambda m, x: rms(x, 1e-5) * (1 + m.w), w=zeros))
    assert found.offset == 1.0

    def layer(m: Any, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return rms(x, 1e-5) * m.b + m.a

    found = record_of(Lambda(layer, a=zeros, b=ones))
    assert (found.kind, found.weight, found.bias, found.eps) == ("layer", "b", "a", 1e-5)
    found = record_of(Lambda(lambda m, x: nn.functional.layer_norm(x, (24,), m.w + 1, m.b), w=zeros, b=zeros))
    assert (found.kind, found.offset, found.eps) == ("layer", 1.0, 1e-5)
    found = record_of(PlainNorm())
    assert (found.kind, found.weight, found.bias, found.eps) == ("layer", "", "", 1e-4)
    assert record_of(nn.RMSNorm(24)).eps == torch.finfo(torch.float32).eps
    assert record_of(nn.RMSNorm(24, eps=1e-4)).eps == 1e-4


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: 1.01 * rms(x, 1e-6) * m.w, "none of the kernels' normalisations"),
        (lambda m, x: x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-3) * m.w, "none of the kernels'"),
        (lambda m, x: x * m.w, "none of the kernels' normalisations"),
        (lambda m, x: (rms(x, 1e-6) * m.w, x), "gives a tuple"),
        (lambda m, x: (rms(x, 1e-6) * m.w).double(), "gives torch.float64"),
        (lambda m, x: rms(x, 1e-6)[..., :3] * m.w, "fails on random numbers"),
    ],
)
def test_what_is_no_norm_stays(function: Any, reason: str) -> None:
    assert reason in record_of(Lambda(function, w=torch.ones(24)))


class Mlp(nn.Module):
    """Linears and a function of what they give."""

    def __init__(self, function: Any, **linears: nn.Module) -> None:
        super().__init__()
        for name, linear in linears.items():
            self.add_module(name, linear)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@pytest.mark.parametrize(
    ("between", "ups", "read", "act", "halves"),
    [
        (nn.functional.gelu, ("a",), ("a",), "gelu", ""),
        (lambda a, b: a * torch.sigmoid(a) * b, ("a", "b"), ("a", "b"), "silu", ""),
        (lambda a, b: a * torch.clamp(b, min=0), ("a", "b"), ("b", "a"), "relu", ""),
        (lambda f: chunked(f), ("f",), ("f",), "gelu_tanh", "gate_up"),
        (lambda f: glu(f[..., 40:], f[..., :40]), ("f",), ("f",), "gelu_tanh", "up_gate"),
        (lambda f: glu(f[..., ::2], f[..., 1::2]), ("f",), ("f",), "gelu_tanh", "gate_up_rows"),
        (lambda f: glu(f[..., 1::2], f[..., ::2]), ("f",), ("f",), "gelu_tanh", "up_gate_rows"),
    ],
)
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_forms_of_mlps_are_read(
    between: Any, ups: tuple[str, ...], read: tuple[str, ...], act: str, halves: str, kind: Any
) -> None:
    torch.manual_seed(0)
    sizes = {"a": (24, 40), "b": (24, 40), "f": (24, 80), "down": (40, 24)}
    linears = {name: linear_of(kind, *sizes[name]) for name in (*ups, "down")}
    part = Mlp(lambda m, x: m.down(between(*(getattr(m, name)(x) for name in ups))), **linears).to(DEVICE)
    found = record_of(part)
    assert (found.ups, found.down, found.act, found.halves) == (read, "down", act, halves)
    assert found.transposed == (kind is Conv1D)
    x = torch.randn(3, 24, device=DEVICE)
    expected = part(x)
    engine = engine_of(Whole(part))
    assert [step.forward for step in engine.plan.swapped] == ["read_mlp"]
    assert torch.allclose(engine(x), expected, atol=1e-5)


def linear_of(kind: Any, inputs: int, outputs: int) -> nn.Module:
    made = nn.Linear(inputs, outputs) if kind is nn.Linear else Conv1D(outputs, inputs)
    nn.init.normal_(made.weight, std=inputs**-0.5)
    nn.init.normal_(made.bias)
    return made


def chunked(fused: Tensor) -> Tensor:
    gate, up = fused.chunk(2, dim=-1)
    return glu(gate, up)


def glu(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.gelu(gate, approximate="tanh") * up


class Whole(nn.Module):
    """A model around one part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.part(*args, **kwargs)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: m.down(torch.relu(m.up(x)) * 1.01), "none of the kernels'"),
        (lambda m, x: m.down(torch.relu(m.up(x)) * x.mean()), "more than an activation lies between"),
        (lambda m, x: m.down(torch.relu(m.up(x))) * 2, "do not follow one another"),
        (lambda m, x: m.down(torch.relu(m.up(x))) + m.down(torch.relu(x)), "calls a linear more than once"),
        (lambda m, x: m.down(torch.relu(m.up(x))) if x.sum() > 0 else x, "cannot be traced"),
        (lambda m, x: m.down(torch.relu(m.up(x.softmax(-1)))), "do not follow one another"),
    ],
)
def test_what_is_no_mlp_keeps_its_own_code_and_swaps_its_linears(function: Any, reason: str) -> None:
    torch.manual_seed(0)
    part = Mlp(function, up=nn.Linear(24, 24), down=nn.Linear(24, 24)).to(DEVICE)
    assert reason in record_of(part)
    x = torch.randn(3, 24, device=DEVICE)
    expected = part(x)
    engine = engine_of(Whole(part))
    assert [step.forward for step in engine.plan.swapped] == ["linear", "linear"]
    assert torch.allclose(engine(x), expected, atol=1e-5)


class Extra(nn.Module):
    """An MLP that takes more than the plain call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, hidden_states: Tensor, factor: float | None = None) -> Tensor:
        y = self.down(torch.relu(self.up(hidden_states)))
        return y if factor is None else factor * y


def test_calls_that_say_more_go_to_the_modules_own_code() -> None:
    torch.manual_seed(0)
    part = Extra().to(DEVICE)
    x = torch.randn(3, 24, device=DEVICE)
    expected = [part(x), part(x, None), part(x, 3.0), part(x, factor=3.0)]
    engine = engine_of(Whole(part))
    assert [step.forward for step in engine.plan.swapped] == ["read_mlp"]
    found = [engine(x), engine(x, None), engine(x, 3.0), engine(x, factor=3.0)]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert torch.allclose(engine(hidden_states=x), expected[0], atol=1e-5)


class Packed(nn.Linear):
    """A linear of a quantising library: its numbers are codes."""

    def __init__(self) -> None:
        super().__init__(24, 24)
        self.weight = nn.Parameter(torch.randint(-127, 127, (24, 24), dtype=torch.int8), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight.to(input.dtype) * 0.01, self.bias)


class Doubling(nn.Linear):
    """An adapter that changes what a linear gives."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Named(nn.Linear):
    """A linear with another name and its own code, which computes the same."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + self.bias


def test_linears_of_other_libraries() -> None:
    torch.manual_seed(0)
    parts = {
        "packed": Packed(),
        "double": Doubling(24, 24),
        "named": Named(24, 24),
        "plain": nn.Linear(24, 24),
    }
    model = nn.Sequential(*parts.values()).to(DEVICE)
    x = torch.randn(3, 24, device=DEVICE)
    expected = model(x)
    engine = engine_of(model)
    assert paths_of(engine.plan) == ["2", "3"]
    assert why_kept(engine.plan, "0") == "weight is torch.int8, not a floating point type of the kernels"
    assert "gives something else" in why_kept(engine.plan, "1")
    assert torch.allclose(engine(x), expected, atol=1e-4)


class Adapted(nn.Module):
    """A linear with a low-rank adapter beside it, as PEFT wraps them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.base_layer(x) + 2 * self.up(self.down(x))

    def merged(self) -> nn.Linear:
        with torch.no_grad():
            self.base_layer.weight += 2 * self.up.weight @ self.down.weight
        return self.base_layer


def test_adapters_run_beside_the_kernels_and_merged_ones_leave_no_trace() -> None:
    model = make("llama")
    torch.manual_seed(1)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj).to(DEVICE)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj).to(DEVICE)
    ids = token_ids(2, 9)
    expected = reference(model)(ids).logits
    engine = engine_of(model)
    assert torch.allclose(engine(ids).logits, expected, atol=1e-4)
    assert why_kept(engine.plan, "model.layers.0.self_attn").startswith("q_proj is a Adapted of tests")
    # what is inside and beside the adapters runs through kernels
    assert {"model.layers.0.self_attn.q_proj.up", "model.layers.0.mlp.up_proj"} <= {*paths_of(engine.plan)}
    engine.destroy()
    for layer in model.model.layers:
        layer.self_attn.q_proj = layer.self_attn.q_proj.merged()
        layer.mlp.down_proj = layer.mlp.down_proj.merged()
    merged = engine_of(model)
    assert merged.plan.step.startswith("kernels")
    assert torch.allclose(merged(ids).logits, expected, atol=1e-4)


def test_hooks_and_forwards_of_instances_keep_a_part() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return Extra()

    watched, patched = made(), made()
    watched.up.register_forward_hook(lambda *_: None)
    patched.forward = lambda hidden_states: hidden_states
    assert record_of(watched) == "up has forward hooks, which a fused forward would not run"
    assert "on the instance" in record_of(patched)


def test_loose_activations_that_others_see_stay() -> None:
    model = odd_model()
    model.stages[0].curve.register_forward_hook(lambda *_: None)
    model.stages[1].widen.register_forward_pre_hook(lambda *_: None)
    assert paths_of(plan_of(odd_model()), "linear_act") == ["stages.0.widen", "stages.1.widen"]
    assert not paths_of(plan_of(model), "linear_act")
    # one activation module in two layers: switching it off for one would switch it off for both
    model = odd_model()
    model.stages[1].curve = model.stages[0].curve
    expected = reference(model)
    engine = engine_of(model)
    assert not paths_of(engine.plan, "linear_act")
    ids = token_ids(2, 6)
    assert_same_logits(engine(ids).logits, expected(ids).logits)


class OwnAttention(Gaze):
    """Attention that reads the mask itself."""

    def forward(self, signal: Tensor, veil: Tensor | None) -> Tensor:
        return signal.softmax(-1)


def test_attention_of_its_own_beside_the_interface_keeps_both() -> None:
    model = odd_model()

    model.stages[1].gaze.__class__ = OwnAttention
    plan = plan_of(model)
    assert plan.attention is None
    assert "computes attention itself" in why_kept(plan, "stages.1.gaze")
    assert "other modules compute attention themselves" in why_kept(plan, "stages.0.gaze")
    assert "stages.0.gaze.look" in paths_of(plan, "linear")


def test_windows_that_only_masks_hold_keep_the_attention() -> None:
    model = odd_model()
    model.config.sliding_window = 4
    plan = plan_of(model)
    assert plan.attention is None
    assert "stages.0.gaze does not tell the interface of its window" in why_kept(plan, "stages.1.gaze")


def test_probing_leaves_no_trace_in_the_model() -> None:
    model = stranger("llama")
    before = fingerprint(model)
    seeds = torch.get_rng_state()
    plan_of(model)
    assert_untouched(model, before)
    assert torch.equal(torch.get_rng_state(), seeds)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_forward_that_is_one_percent_off_is_not_accepted(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("read_norm", "read_mlp"):
        right = FORWARDS[name]
        monkeypatch.setitem(FORWARDS, name, lambda *args, right=right: 1.01 * right(*args))
    plan = trinfer.make_plan(stranger("llama"), dtype=dtype, replace_with_kernel_inject=True)
    assert not [step.path for step in plan.swapped if step.forward.startswith("read_")]
    assert "gives something else" in why_kept(plan, "model.layers.0.mlp")
    assert "gives something else" in why_kept(plan, "model.norm")
