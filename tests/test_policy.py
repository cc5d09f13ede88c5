"""injection_policy: layers that the caller names, by linears or by a row, in models of any kind."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import trinfer
from tests.models import DEVICE, engine_of, left_padded, make, reference
from tests.test_architectures import assert_same_logits
from tests.test_generic import OwnAttention
from tests.test_rewrite import assert_untouched, fingerprint, paths_of, why_kept
from tests.unseen import Stage, odd_model
from trinfer import ARCHITECTURES, Arch

BERT_LINEARS = {
    f"bert.encoder.layer.{i}.{name}"
    for i in (0, 1)
    for name in (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    )
}


def with_policy(model: nn.Module, policy: dict[Any, Any], **options: Any) -> trinfer.InferenceEngine:
    return trinfer.init_inference(model, dtype="fp32", injection_policy=policy, **options)


@pytest.mark.parametrize("names", [("attention.output.dense", "output.dense"), "output.dense", ["dense"]])
def test_named_linears_are_row_parallel_and_the_others_column_parallel(names: Any) -> None:
    model = make("bert")
    expected = reference(model)
    before = fingerprint(model)
    ids, mask = left_padded([9, 5])
    engine = with_policy(model, {BertLayer: names})
    assert engine.plan.mode == "user policy"
    assert set(paths_of(engine.plan)) == BERT_LINEARS
    assert all(step.forward == "linear" for step in engine.plan.swapped)
    rows = {step.path for step in engine.plan.swapped if "row-parallel" in step.why}
    ends = (names,) if isinstance(names, str) else tuple(names)
    assert rows == {path for path in BERT_LINEARS if path.endswith(ends)}
    assert all("column-parallel" in s.why for s in engine.plan.swapped if s.path not in rows)
    assert_same_logits(
        engine(ids, attention_mask=mask).logits, expected(ids, attention_mask=mask).logits, mask.bool()
    )
    engine.destroy()
    assert_untouched(model, before)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_rows_read_the_layers_of_a_class(name: str) -> None:
    model = make(name)
    expected = reference(model)
    before = fingerprint(model)
    ids, mask = left_padded([9, 5])
    kind = {"llama": LlamaDecoderLayer, "bert": BertLayer}[name]
    engine = with_policy(model, {kind: ARCHITECTURES[name]})
    forwards = {step.forward for step in engine.plan.swapped}
    parts = {
        "llama": {"rms_norm", "decoder_attention", "mlp"},
        "bert": {"encoder_attention", "dense_add_norm", "dense_act"},
    }
    assert forwards == parts[name]
    assert_same_logits(
        engine(ids, attention_mask=mask).logits, expected(ids, attention_mask=mask).logits, mask.bool()
    )
    engine.destroy()
    assert_untouched(model, before)


class Squares(nn.Module):
    """An MLP with names of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.bend, self.back = nn.Linear(width, 60), nn.SiLU(), nn.Linear(60, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.bend(self.into(x)))


class Room(nn.Module):
    """A layer with names of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.calm, self.work = nn.LayerNorm(width), Squares(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.work(self.calm(x))


class House(nn.Module):
    """A model of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms = nn.ModuleList(Room(24) for _ in range(2))
        self.door = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        for room in self.rooms:
            x = room(x)
        return self.door(x)


def room_row(**changes: Any) -> Arch:
    names = {
        "mlp_norm": "calm",
        "norm": "layer",
        "norm_eps": "eps",
        "mlp": "work",
        "up": "work.into",
        "down": "work.back",
        "activation": "work.bend",
    }
    places = {"backbone": "", "embedding": "", "layers": "rooms", "attention": "", "out": ""}
    sizes = {"head_dim": "", "num_heads": "", "num_kv_heads": ""}
    return Arch(model_type="room", **(places | sizes | names | changes))


def house() -> House:
    torch.manual_seed(0)
    return House().eval().to(DEVICE)


def test_a_row_of_the_caller_reads_a_layer_nobody_knows() -> None:
    model = house()
    x = torch.randn(2, 5, 24, device=DEVICE)
    expected = model(x)
    engine = with_policy(model, {Room: room_row()})
    assert [(step.path, step.forward) for step in engine.plan.swapped] == [
        ("rooms.0.calm", "layer_norm"),
        ("rooms.0.work", "mlp"),
        ("rooms.1.calm", "layer_norm"),
        ("rooms.1.work", "mlp"),
    ]
    assert torch.allclose(engine(x), expected, atol=1e-5)
    # what the policy does not name stays
    assert "forward" not in model.door.__dict__


def test_a_row_that_is_wrong_is_noticed() -> None:
    model = house()
    for room in model.rooms:
        room.work.__class__ = DoubledSquares
    plan = trinfer.make_plan(model, dtype="fp32", injection_policy={Room: room_row()})
    assert "gives something else" in why_kept(plan, "rooms.0.work")
    # its products are swapped all the same
    assert "rooms.0.work.into" in paths_of(plan, "linear")
    with pytest.raises(ValueError, match=r"no part of the layer is what row 'room' says: .*change the names"):
        with_policy(house(), {Room: room_row(mlp="play", mlp_norm="rest")})


class DoubledSquares(Squares):
    """Looks the same and computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_attention_that_is_called_otherwise_is_no_part_of_a_row() -> None:
    model = odd_model()
    row = room_row(
        mlp="",
        up="",
        activation="",
        down="narrow",
        mlp_norm="before",
        norm="rms",
        norm_eps="tiny",
        attention="gaze",
        qkv="gaze.look",
        out="gaze.blink",
        head_dim="config.width",
        num_heads="eyes",
        num_kv_heads="eyes",
        sm_scale=0.25,
    )
    model.config.width = 12
    with pytest.raises(ValueError, match="Stage: no part of .* is not called as the row's attention is"):
        trinfer.make_plan(model, dtype="fp32", injection_policy={Stage: row})


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({OwnAttention: "x"}, ["injection_policy names OwnAttention", "it has BertLayer"]),
        ({BertLayer: ("output.dense", "c_proj")}, ["BertLayer names c_proj", "attention.self.query"]),
        ({BertLayer: trinfer.MoEConfig()}, ["injection_policy"]),
        ({BertLayer: ARCHITECTURES["llama"]}, ["no part of the layer is what row 'llama' says"]),
    ],
)
def test_policies_that_do_not_fit_raise(policy: Any, words: list[str]) -> None:
    model = make("bert")
    before = fingerprint(model)
    with pytest.raises(ValueError) as caught:
        with_policy(model, policy)
    assert not [word for word in words if word not in str(caught.value)]
    assert_untouched(model, before)


def test_generation_under_a_policy() -> None:
    model = make("llama")
    expected = reference(model)
    engine = with_policy(model, {LlamaDecoderLayer: ARCHITECTURES["llama"]})
    ids, mask = left_padded([9, 5])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6}
    assert torch.equal(engine.generate(ids, **options), expected.generate(ids, **options))


def test_policy_and_kernel_injection_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="only one of the two says how the model is rewritten"):
        engine_of(make("bert"), injection_policy={BertLayer: "output.dense"})
