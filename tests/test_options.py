"""Options that change what a rewritten model computes, returns or looks like in memory."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import trinfer
from tests.models import engine_of, inputs_of, make, reference, result, token_ids
from trinfer.kernels import count_launches
from trinfer.tune import _run as run

# one of each kind: grouped heads, window, softcap, alibi, own masks, experts, latents
DECODERS = ("llama", "mistral_sw", "gemma2", "bloom", "falcon", "mixtral", "gpt_oss", "deepseek_v2", "phi")
ENCODERS = ("bert", "electra", "distilbert", "modernbert", "megatron_bert")


def both_ways(model: Any) -> Any:
    """The reference, with masks for both directions: transformers makes those by the configuration."""
    for part in model.modules():
        if "config" in part.__dict__:
            part.config.is_causal = False
    return model


def padding() -> Tensor:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    return mask


def fingerprint(model: Any) -> Any:
    causal = [(path, m.__dict__.get("is_causal")) for path, m in model.named_modules()]
    return causal, model.config.to_dict(), model.config._attn_implementation


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_without_triangular_masking_attends_both_ways(name: str) -> None:
    model = make(name)
    before, expected = fingerprint(model), both_ways(reference(model))
    engine = engine_of(model, triangular_masking=False)
    assert "triangular_masking=False" in str(engine.plan)
    ids = token_ids(2, 9)
    for mask in (None, padding().to(ids.device)):
        valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        ours, theirs = (m(input_ids=ids, attention_mask=mask).logits[valid] for m in (engine, expected))
        assert torch.allclose(ours, theirs, atol=1e-4)
    with pytest.raises(ValueError, match="generate cannot run: with triangular_masking=False"):
        engine.generate(ids, max_new_tokens=2)
    engine.destroy()
    assert fingerprint(model) == before


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_with_triangular_masking_sees_no_token_that_follows(name: str) -> None:
    model = make(name)
    before = fingerprint(model)
    engine = engine_of(model, tm=True)
    assert "triangular_masking=True" in str(engine.plan)
    inputs = inputs_of(name, 2, 9)
    mask = torch.ones_like(inputs["input_ids"])
    # a hole: its mask is 4-D
    mask[1, 2] = 0
    for given in (mask, torch.ones_like(mask)):
        whole = result(engine(**inputs, attention_mask=given))
        prefix = {key: value[:, :5] for key, value in inputs.items()}
        assert torch.allclose(whole[:, :5], result(engine(**prefix, attention_mask=given[:, :5])), atol=1e-5)
    engine.destroy()
    assert fingerprint(model) == before


def test_bert_with_triangular_masking_is_a_decoder_of_transformers() -> None:
    model = make("bert")
    config = copy.deepcopy(model.config)
    config.is_decoder = True
    decoder = type(model)(config).eval().to(model.device)
    decoder.load_state_dict(model.state_dict())
    inputs = inputs_of("bert", 2, 9)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 6:] = 0
    engine = engine_of(model, triangular_masking=True)
    ours, theirs = (m(**inputs, attention_mask=mask).logits for m in (engine, decoder))
    assert torch.allclose(ours[mask.bool()], theirs[mask.bool()], atol=1e-4)


@pytest.mark.parametrize("is_causal", [True, False])
def test_triangular_masking_as_the_architecture_has_it_changes_nothing(is_causal: bool) -> None:
    engine = engine_of(make("llama" if is_causal else "bert"), triangular_masking=is_causal)
    assert "triangular_masking" not in str(engine.plan)
    assert engine.plan.masking is None


def test_triangular_masking_goes_before_the_configuration() -> None:
    model = make("llama")
    expected, ids = reference(model), token_ids(2, 9)
    model.config.is_causal = False
    engine = engine_of(model, triangular_masking=True)
    # a hole: its mask is 4-D
    mask = padding().to(ids.device)
    mask[1, 4] = 0
    ours, theirs = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (engine, expected))
    assert torch.allclose(ours, theirs, atol=1e-4)
    engine.destroy()
    assert model.config.is_causal is False


def test_masking_that_args_ask_for_is_taken_back() -> None:
    model = make("llama", is_causal=True)
    expected, ids = both_ways(reference(model)), token_ids(2, 9)
    engine = engine_of(model, args={"is_causal": False})
    assert torch.allclose(engine(ids).logits, expected(ids).logits, atol=1e-4)
    engine.destroy()
    assert model.config.is_causal is True


def test_attention_of_the_user_that_says_nothing_of_causality_is_kept() -> None:
    class Own(nn.Module):
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
            return hidden_states, None

    model = make("llama")
    for layer in model.model.layers:
        layer.self_attn = Own()
    expected, ids = reference(model), token_ids(1, 5)
    assert torch.allclose(engine_of(model)(ids).logits, expected(ids).logits, atol=1e-4)


def test_what_turned_layers_record() -> None:
    model = make("bert")
    engine = engine_of(model, tm=True, enable_cuda_graph=True)
    inputs = inputs_of("bert", 2, 9)
    launched = engine_of(make("bert"), tm=True)(**inputs).logits
    assert all(torch.equal(engine(**inputs).logits, launched) for _ in range(3))
    assert "recorded by shape" in str(engine.plan)
    with pytest.raises(ValueError, match="enable_cuda_graph=True finds nothing to record"):
        engine_of(make("llama"), triangular_masking=False, enable_cuda_graph=True)


def test_a_turned_decoder_is_tuned_by_its_forward() -> None:
    engine = engine_of(make("llama"), triangular_masking=False)
    with count_launches() as launches:
        run(engine.module, 2, 1)
    assert launches["attention"] == 2 and not launches["lm_head"]


@pytest.mark.parametrize("name", ["mpt", "gptneo", "t5", "olmo"])
def test_triangular_masking_is_refused_where_it_cannot_hold(name: str) -> None:
    model = make(name)
    with pytest.raises(ValueError, match="triangular_masking=False.*leave triangular_masking out"):
        engine_of(model, triangular_masking=False)


def test_a_configuration_that_is_not_causal_is_followed() -> None:
    model = make("mistral_sw", is_causal=False)
    expected = reference(model)
    engine = engine_of(model)
    ids = token_ids(2, 9)
    assert torch.allclose(engine(ids).logits, expected(ids).logits, atol=1e-4)
    assert "config.is_causal=False" in str(engine.plan)


# where the layers are, and what they want beside hidden states
LAYERS = {"llama": "model.layers", "gpt2": "transformer.h", "bert": "bert.encoder.layer"}


@pytest.mark.parametrize("return_tuple", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_a_whole_layer_called_by_hand_gives_what_return_tuple_says(name: str, return_tuple: bool) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model, return_tuple=return_tuple)
    inputs = inputs_of(name, 2, 9)
    # inside the model it gives the form that the model's own code goes on with
    assert torch.allclose(engine(**inputs).logits, expected(**inputs).logits, atol=1e-4)
    x = torch.randn(2, 9, model.config.hidden_size, device=model.device)
    seen = torch.ones(9, 9, dtype=torch.bool, device=x.device).tril()
    call = {"attention_mask": torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, -1e9)[None, None]}
    if name == "llama":
        positions = torch.arange(9, device=x.device)[None]
        call["position_embeddings"] = expected.model.rotary_emb(x, positions)
    ours, theirs = (m.get_submodule(LAYERS[name])[0](x, **call) for m in (engine.module, expected))
    assert isinstance(ours, tuple) is return_tuple
    (ours,) = ours if return_tuple else (ours,)
    assert torch.allclose(ours, theirs[0] if isinstance(theirs, tuple) else theirs, atol=1e-4)


def test_a_layer_called_by_hand_while_a_model_failed_is_still_by_hand() -> None:
    model = make("llama")
    engine = engine_of(model)
    with pytest.raises(IndexError):
        engine(torch.full((1, 2), 10**6, device=model.device))
    x = torch.randn(1, 3, 72, device=model.device)
    turn = model.model.rotary_emb(x, torch.arange(3, device=x.device)[None])
    assert isinstance(model.model.layers[0](x, position_embeddings=turn), tuple)


class OwnLoop(LlamaForCausalLM):
    """A model whose own forward runs the layers, past that of the module which holds them."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        inner = self.model
        x = inner.embed_tokens(input_ids)
        turn = inner.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        mask = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, -1e9)[None, None]
        for layer in inner.layers:
            x = layer(x, attention_mask=mask, position_embeddings=turn)
        return CausalLMOutputWithPast(logits=self.lm_head(inner.norm(x)))


def test_layers_inside_of_any_forward_of_the_model_give_what_its_code_expects() -> None:
    own, ids = make("llama"), token_ids(2, 9)
    model = OwnLoop(own.config).eval().to(own.device)
    model.load_state_dict(own.state_dict())
    expected = reference(model)(ids).logits
    assert torch.allclose(engine_of(model)(ids).logits, expected, atol=1e-4)
    # past __call__, and into a part
    engine = engine_of(own)
    assert torch.allclose(engine.module.forward(ids).logits, expected, atol=1e-4)
    states = engine.module.model.forward(ids).last_hidden_state
    assert torch.allclose(engine.module.lm_head(states), expected, atol=1e-4)
    assert "input_ids" in inspect.signature(engine.module.forward).parameters


def test_a_layer_called_by_hand_after_an_interrupt_is_still_by_hand() -> None:
    model = make("llama")
    engine_of(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.norm.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(token_ids(1, 3))
    handle.remove()
    x = torch.randn(1, 3, 72, device=model.device)
    turn = model.model.rotary_emb(x, torch.arange(3, device=x.device)[None])
    assert isinstance(model.model.layers[0](x, position_embeddings=turn), tuple)


def test_return_tuple_is_refused_where_no_whole_layer_is_replaced() -> None:
    with pytest.raises(ValueError, match="return_tuple=False: no whole layer of MixtralForCausalLM"):
        engine_of(make("mixtral"), return_tuple=False)


@pytest.mark.parametrize("name", ["llama_tied", "neox", "phi3", "bert", "t5_gated", "mixtral", "codegen"])
def test_transposed_mode_moves_weights_and_changes_no_result(name: str) -> None:
    model = make(name)
    expected, before = reference(model), {key: value.clone() for key, value in model.state_dict().items()}
    engine = engine_of(model, transposed_mode=True)
    inputs = inputs_of(name, 2, 9)
    assert torch.allclose(result(engine(**inputs)), result(expected(**inputs)), atol=1e-4)
    weights = [model.get_submodule(path).weight for path in engine.plan.transposed]
    assert len(weights) > 7
    assert all(weight.stride() == (1, len(weight)) for weight in weights)
    assert all(torch.equal(value, before[key]) for key, value in engine.state_dict().items())
    if model.can_generate() and name != "t5_gated":
        ours, theirs = (m.generate(inputs["input_ids"], max_new_tokens=6) for m in (engine, expected))
        assert torch.equal(ours, theirs)
    engine.destroy()
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_transposed_mode_leaves_tied_weights_and_says_so() -> None:
    model = make("llama_tied")
    plan = engine_of(model, transposed_mode=True).plan
    assert "lm_head" not in plan.transposed
    assert any(kept.path == "lm_head.weight" and "transposed_mode" in kept.why for kept in plan.kept)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.is_contiguous()


def test_transposed_mode_is_refused_where_weights_read_together_are_shared() -> None:
    model = make("llama")
    model.model.layers[1].self_attn.q_proj.weight = model.model.layers[0].self_attn.q_proj.weight
    with pytest.raises(ValueError, match="another module has the weight of model.layers.0.self_attn.q_proj"):
        engine_of(model, transposed_mode=True)


def test_transposed_mode_is_refused_where_every_weight_lies_so_already() -> None:
    with pytest.raises(ValueError, match="transposed_mode=True finds no linear in GPT2LMHeadModel"):
        engine_of(make("gpt2"), transposed_mode=True)


def test_args_choose_the_row_of_a_model_that_calls_itself_otherwise() -> None:
    model = make("llama")
    expected = reference(model)
    model.config.model_type = "in_house"
    with_args = engine_of(model, args={"model_type": "llama"})
    assert with_args.plan.architecture == "llama"
    assert with_args.plan.step.startswith("kernels")
    assert model.config.model_type == "in_house"
    ids = token_ids(1, 5)
    ours, theirs = (m.generate(ids, max_new_tokens=5, do_sample=False) for m in (with_args, expected))
    assert torch.equal(ours, theirs)


def test_args_choose_the_variant_of_a_row() -> None:
    model = make("neox")
    plan = trinfer.make_plan(model, dtype="fp32", kernel_inject=True, args={"use_parallel_residual": False})
    assert "5 launches a token" in str(plan)
    assert "4 launches a token" in str(trinfer.make_plan(model, dtype="fp32", kernel_inject=True))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"modeltype": "llama"}, r"modeltype \(did you mean model_type\?\), which LlamaConfig does not have"),
        ({"model_type": "in_house"}, "model_type='in_house' names no row; allowed: bart"),
        ({"vocab_size": 7}, "nothing in the rewriting of this model reads vocab_size"),
    ],
)
def test_args_that_would_change_nothing_are_refused(args: dict[str, Any], message: str) -> None:
    model = make("llama")
    with pytest.raises(ValueError, match=message):
        engine_of(model, args=args)
    assert "forward" not in model.model.layers[0].__dict__
