"""Every row against transformers' eager attention: logits, masks of every kind, reports about them."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING

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
from tests.moe_models import all_experts
from tests.remote import InternLMAttention, OlderAttention, internlm
from tests.reports import REPORTS, models
from trinfer import ARCHITECTURES, Arch

WITH_ROW = [name for name, (model_type, _, _) in ZOO.items() if model_type in ARCHITECTURES]
# largest difference of logits from the float32 reference; logits of the zoo are of order 1
LOGIT_BOUND = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def assert_same_logits(
    actual: Tensor, expected: Tensor, real: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Logits agree at real positions within the bound of `dtype`, and nothing anywhere is non-finite."""
    assert bool(actual.isfinite().all())
    if real is not None:
        actual, expected = actual[real], expected[real]
    actual, expected = actual.detach(), expected.detach()
    difference = float((actual.float() - expected).abs().max())
    assert difference <= LOGIT_BOUND[dtype], f"logits differ by {difference:.2e}"
    top = expected.topk(2).values
    clear = top[..., 0] - top[..., 1] > 2 * LOGIT_BOUND[dtype]
    assert bool((actual.argmax(-1) == expected.argmax(-1))[clear].all())


@pytest.mark.parametrize("dtype", LOGIT_BOUND, ids=str)
@pytest.mark.parametrize("name", WITH_ROW)
def test_logits_match_transformers(name: str, dtype: torch.dtype) -> None:
    # 16 bits choose between experts that are almost as good, in transformers as here, and no bound holds: a
    # flip costs 0.04 of the logits where the median error is 0.001. Where all are chosen, none can flip
    model = make(name, **(all_experts(name) if dtype != torch.float32 else {}))
    expected = reference(model)
    engine = engine_of(model, dtype)
    for rows, tokens in ((1, 1), (2, 7), (3, 33)):
        inputs = inputs_of(name, rows, tokens)
        assert_same_logits(result(engine(**inputs)), result(expected(**inputs)), dtype=dtype)


@pytest.mark.parametrize("name", [name for name in WITH_ROW if name != "clip_vision"])
def test_logits_of_padded_rows_match_transformers(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    ids, mask = left_padded([13, 7])
    inputs = inputs_of(name, 2, 13) | {"input_ids": ids, "attention_mask": mask}
    # the rows of a decoder are not those of the padded encoder
    real = None if "decoder_input_ids" in inputs else mask.bool()
    assert_same_logits(result(engine(**inputs)), result(expected(**inputs)), real)


WAYS = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in WITH_ROW if ZOO[name][1] in ("CausalLM", "Seq2SeqLM")])
def test_generated_tokens_match_transformers(name: str, way: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    ids, mask = left_padded([9, 5])
    drawn = []
    for each in (engine, expected):
        torch.manual_seed(5)
        drawn.append(each.generate(ids, attention_mask=mask, max_new_tokens=12, **WAYS[way]))
    assert torch.equal(*drawn)


# what runs in torch between the kernels, by the end of its reason
GLUE = (
    "adds the residuals in torch",
    "adds its tables in torch",
    "cos and sin are made once per forward, in torch",
    "hands hidden states from part to part in torch",
    "hands hidden states from its router to its experts in torch",
)
# what a row cannot name or a kernel not compute: classes that stay
STAYS = {
    "bart": {"BartScaledWordEmbedding", "BartLearnedPositionalEmbedding"},
    "cohere_normed": {"CohereAttention", "CohereLayerNorm"},
    "deepseek_v2": {"DeepseekV2Attention"},
    "deepseek_v2_groups": {"DeepseekV2Attention"},
    "deepseek_v3": {"DeepseekV3Attention"},
    "gemma": {"GemmaTextScaledWordEmbedding"},
    "gemma2": {"Gemma2TextScaledWordEmbedding"},
    "gemma3_text": {"Gemma3TextScaledWordEmbedding"},
    "olmoe_clipped": {"OlmoeAttention"},
    "opt": {"OPTLearnedPositionalEmbedding"},
    "opt_pre": {"OPTLearnedPositionalEmbedding"},
    "qwen2_moe_sw": {"Qwen2MoeAttention"},
    "stablelm_normed": {"StableLmAttention"},
    "t5": {"T5Attention"},
    "t5_gated": {"T5Attention"},
}


@pytest.mark.parametrize("name", WITH_ROW)
def test_every_part_of_a_layer_is_swapped(name: str) -> None:
    plan = trinfer.make_plan(make(name), dtype="fp32", replace_with_kernel_inject=True)
    assert {entry.was for entry in plan.kept if not entry.why.endswith(GLUE)} == STAYS.get(name, set())
    assert not [entry.why for entry in plan.kept if "has no" in entry.why]
    assert plan.architecture == ZOO[name][0]


@pytest.mark.parametrize("name", sorted(set(ZOO) - set(WITH_ROW)))
def test_models_without_a_row_are_swapped_in_part_and_right(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    ids = token_ids(2, 9)
    assert_same_logits(engine(ids).logits, expected(ids).logits)
    assert engine.plan.swapped
    assert any("no row for model_type" in entry.why for entry in engine.plan.kept)


def test_every_row_has_a_model() -> None:
    without = set(ARCHITECTURES) - {model_type for model_type, _, _ in ZOO.values()}
    assert without - {"internlm"} <= set(ARCHITECTURES) - set(CONFIG_MAPPING)


def test_report_table_is_up_to_date() -> None:
    for number, report in REPORTS.items():
        rows = {name: ZOO[name][0] in ARCHITECTURES for name in (*report.models, *report.pending)}
        assert all(rows[name] for name in report.models), f"{number} runs on a model without a row: {rows}"
        waiting = [name for name in report.pending if rows[name]]
        assert not waiting, f"{number}: {waiting} have a row now; move them from pending to models"


def test_arch_refuses_unknown_flags() -> None:
    row = ARCHITECTURES["llama"].__dict__
    with pytest.raises(ValueError, match=r"Arch.rotary='spiral'.*'none', 'half', 'interleaved'"):
        Arch(**(row | {"rotary": "spiral"}))


@pytest.mark.parametrize(
    "act",
    ["gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu"],
)
def test_activations_of_transformers(act: str) -> None:
    model = make("llama", hidden_act=act)
    expected = reference(model)
    engine = engine_of(model)
    assert sum("MLP" in entry.was for entry in engine.plan.swapped) == 2
    ids = token_ids(2, 9)
    assert_same_logits(engine(ids).logits, expected(ids).logits)


@models("U001")
def test_u001_masks_of_every_type_mean_the_same(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    ids = token_ids(1, 6)
    padded = torch.cat([ids, ids.new_zeros(1, 10)], -1)
    mask = torch.tensor([[1] * 6 + [0] * 10], device=DEVICE)
    alone = expected(ids).logits
    for dtype in (torch.bool, torch.int64, torch.int32, torch.float32):
        assert_same_logits(engine(padded, attention_mask=mask.to(dtype)).logits[:, :6], alone)
    no_mask, all_ones = engine(ids).logits, engine(ids, attention_mask=torch.ones_like(ids)).logits
    assert torch.equal(no_mask, all_ones)


@models("U005")
def test_u005_blanked_row_is_finite_and_changes_no_other(name: str) -> None:
    engine = engine_of(make(name))
    ids = token_ids(2, 8)
    causal = torch.ones(8, 8, dtype=torch.bool, device=DEVICE).tril().expand(2, 1, 8, 8)
    blanked = causal.clone()
    blanked[0, :, 5] = False
    open_row, blank_row = (engine(ids, attention_mask=mask).logits for mask in (causal, blanked))
    assert bool(blank_row.isfinite().all())
    # causality: positions before the blanked one, and the other sequence, cannot see it
    assert torch.equal(blank_row[0, :5], open_row[0, :5])
    assert torch.equal(blank_row[1], open_row[1])


@models("U009")
def test_u009_kernels_receive_the_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from trinfer.layers import attention as layer

    seen = []
    kernel = layer.attention

    def spy(*args: object, **kwargs: object) -> Tensor:
        seen.append(kwargs["kv_range"])
        return kernel(*args, **kwargs)

    engine = engine_of(make(name))
    monkeypatch.setattr(layer, "attention", spy)
    ids, mask = left_padded([9, 5])
    masked = engine(ids, attention_mask=mask).logits
    assert [bounds.tolist() for bounds in seen] == [[[0, 9], [4, 9]]] * 2
    assert float((engine(ids).logits - masked)[1, 4:].abs().max()) > 1e-2


@models("U016")
def test_u016_odd_head_dim(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    ids = token_ids(2, 6)
    assert_same_logits(engine(ids).logits, expected(ids).logits)
    options = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True}
    ours, theirs = engine.generate(ids, **options), expected.generate(ids, **options)
    for step, truth in zip(ours.logits, theirs.logits, strict=True):
        assert_same_logits(step, truth)


@models("U022")
def test_u022_likelihoods_and_not_only_tokens(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    ids = token_ids(2, 40)
    ours, theirs = engine(ids).logits.detach(), expected(ids).logits.detach()
    assert_same_logits(ours, theirs)
    loss, targets = torch.nn.functional.cross_entropy, ids[:, 1:].flatten()
    ours_nll, theirs_nll = (loss(x[:, :-1].flatten(0, 1), targets) for x in (ours, theirs))
    assert abs(float(ours_nll - theirs_nll)) < 1e-3


@models("U024")
def test_u024_positions_far_from_the_first(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    ids, positions = token_ids(1, 9), torch.arange(40, 49, device=DEVICE)[None]
    assert_same_logits(
        engine(ids, position_ids=positions).logits, expected(ids, position_ids=positions).logits
    )


@models("U029")
def test_u029_a_forward_changes_none_of_its_inputs(name: str) -> None:
    engine = engine_of(make(name))
    embeddings = engine.module.get_input_embeddings()(token_ids(2, 7)).detach()
    before = embeddings.clone()
    first = engine(inputs_embeds=embeddings, output_hidden_states=True)
    assert torch.equal(embeddings, before)
    kept = [states.clone() for states in first.hidden_states]
    second = engine(inputs_embeds=embeddings, output_hidden_states=True)
    # the states of the first forward are still what they were, and the second gives the same
    assert all(map(torch.equal, first.hidden_states, kept))
    assert all(map(torch.equal, second.hidden_states, kept))


@models("U033")
def test_u033_neighbours_do_not_leak_and_batches_round_alike(name: str) -> None:
    engine = engine_of(make(name))
    ids, others = token_ids(4, 11, seed=1), token_ids(4, 11, seed=2)
    others[0] = ids[0]
    together, beside_others = engine(ids).logits, engine(others).logits
    assert torch.equal(together[0], beside_others[0])
    alone = engine(ids[:1]).logits[0]
    assert float((alone - together[0]).abs().max()) <= 1e-5
    assert torch.equal(alone.argmax(-1), together[0].argmax(-1))


@models("U070")
def test_u070_attention_and_mask_function_go_together(name: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    chosen = model.config._attn_implementation
    assert chosen == "trinfer"
    assert chosen in AttentionInterface._global_mapping
    assert chosen in AttentionMaskInterface._global_mapping
    ids, mask = left_padded([12, 7, 3])
    assert_same_logits(
        engine(ids, attention_mask=mask).logits, expected(ids, attention_mask=mask).logits, mask.bool()
    )


def holes() -> Tensor:
    mask = torch.ones(2, 10, dtype=torch.long, device=DEVICE)
    mask[0, 3:5] = 0
    mask[1, :2] = 0
    mask[1, 7] = 0
    return mask


@pytest.mark.parametrize("name", ["llama", "bert", "bert_decoder", "gptneo", "mistral_sw"])
def test_mask_with_holes_takes_the_bias_path(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    ids, mask = token_ids(2, 10), holes()
    real = mask.bool()
    assert_same_logits(
        engine(ids, attention_mask=mask).logits, expected(ids, attention_mask=mask).logits, real
    )


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_four_dimensional_masks(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    ids = token_ids(2, 10)
    allowed = (torch.rand(2, 1, 10, 10) < 0.5) | torch.eye(10, dtype=torch.bool)
    allowed = allowed.to(DEVICE)
    additive = torch.zeros(allowed.shape, device=DEVICE).masked_fill(~allowed, torch.finfo(torch.float32).min)
    truth = expected(ids, attention_mask=additive).logits
    for mask in (additive, allowed, allowed.int()):
        assert_same_logits(engine(ids, attention_mask=mask).logits, truth)


def test_packed_sequences_do_not_see_each_other() -> None:
    model = make("llama")
    expected = reference(model)
    engine = engine_of(model)
    ids = token_ids(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]], device=DEVICE)
    options = {"position_ids": positions, "use_cache": False}
    assert_same_logits(engine(ids, **options).logits, expected(ids, **options).logits)
    assert_same_logits(engine(ids, **options).logits[:, 4:], expected(ids[:, 4:]).logits)


def test_content_of_padding_changes_nothing() -> None:
    engine = engine_of(make("llama"))
    ids, mask = left_padded([9, 5])
    other = torch.where(mask.bool(), ids, 77)
    first, second = (engine(x, attention_mask=mask).logits for x in (ids, other))
    assert torch.equal(first[mask.bool()], second[mask.bool()])


def test_neighbours_change_nothing() -> None:
    engine = engine_of(make("llama"))
    ids = token_ids(3, 9)
    other = torch.cat([ids[:1], token_ids(2, 9, seed=7)])
    assert torch.equal(engine(ids).logits[0], engine(other).logits[0])


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_attentions_and_hidden_states_on_request(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    ids, mask = left_padded([8, 5])
    options = {"attention_mask": mask, "output_attentions": True, "output_hidden_states": True}
    ours, theirs = engine(ids, **options), expected(ids, **options)
    assert len(ours.attentions) == 2
    assert len(ours.hidden_states) == 3
    for weights, truth in zip(ours.attentions, theirs.attentions, strict=True):
        rows = mask.bool()
        assert torch.allclose(weights.transpose(1, 2)[rows], truth.transpose(1, 2)[rows], atol=1e-5)
    for states, truth in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert torch.allclose(states[mask.bool()], truth[mask.bool()], atol=1e-4)


@pytest.mark.parametrize("attention", [InternLMAttention, OlderAttention])
def test_remote_code_is_matched_by_the_names_of_its_row(attention: type[InternLMAttention]) -> None:
    model = internlm(attention)
    expected = copy.deepcopy(model)
    engine = engine_of(model)
    stays = {entry.path: entry.why for entry in engine.plan.kept if "self_attn" in entry.path}
    assert set(stays.values()) == (
        {"makes its rotary table itself"} if attention is OlderAttention else set()
    )
    swapped = {step.path for step in engine.plan.swapped}
    assert {"model.layers.0.mlp", "model.layers.1.input_layernorm", "model.norm", "lm_head"} <= swapped
    assert ("model.layers.0.self_attn" in swapped) == (attention is InternLMAttention)
    ids, mask = left_padded([9, 5])
    ours, theirs = (m(ids, attention_mask=mask).logits for m in (engine, expected))
    assert_same_logits(ours, theirs, mask.bool())
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 8}
    assert torch.equal(engine.generate(ids, **options), expected.generate(ids, **options))


@pytest.mark.parametrize("name", WITH_ROW)
def test_kernels_do_the_multiply_adds(name: str, record_property: Callable[[str, object], None]) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    inputs = inputs_of(name, 2, 33)
    # a kernel's first launch may measure in torch
    engine(**inputs)
    counts = []
    for called in (expected, engine):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            called(**inputs)
        counts.append(counter.get_total_flops())
    share = 1 - counts[1] / counts[0]
    record_property("measured", f"{name}: kernels do {share:.1%} of {counts[0] // 2:,} multiply-adds")
    assert counts[0] > 0
    assert share >= 0.95


SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
}


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_scaled_rotary_embeddings_beyond_the_original_length(rope_type: str) -> None:
    length = 32 if rope_type in ("linear", "dynamic") else 128
    scaling = {"rope_type": rope_type, "rope_theta": 10000.0} | SCALINGS[rope_type]
    model = make("llama", max_position_embeddings=length, rope_parameters=scaling)
    expected = reference(model)
    engine = engine_of(model)
    plain = engine_of(make("llama"))
    for tokens in (20, 128):
        ids = token_ids(2, tokens)
        ours = engine(ids).logits
        assert_same_logits(ours, expected(ids).logits)
    assert float((ours - plain(ids).logits).abs().max()) > 1e-2
    ids, mask = left_padded([40, 21])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
    assert torch.equal(engine.generate(ids, **options), expected.generate(ids, **options))
