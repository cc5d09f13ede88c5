"""A zoo of tiny random models, one per architecture or variant that users reported faults about."""

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

import trinfer
from tests.moe_models import MOE
from trinfer import backend
from trinfer.compat import cache_key

VOCABULARY = 99
DEVICE = backend.default_device()

_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
_ENCODER = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
_LLAMA = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
}

_GROUPED = _SMALL | {"num_hidden_layers": 2, "max_position_embeddings": 128}
_FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_BART = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
}
_T5 = {
    # its usual weights are so large that `shake` would take HF itself 4e-4 away from float64
    "initializer_factor": 0.25,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}

# name -> (model_type, kind, config)
ZOO: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("gpt2", "CausalLM", {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "gptneo": (
        "gpt_neo",
        "CausalLM",
        {
            "max_position_embeddings": 64,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
    ),
    "gptj": (
        "gptj",
        "CausalLM",
        {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    ),
    "neox": (
        "gpt_neox",
        "CausalLM",
        {
            "max_position_embeddings": 64,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 96,
            "rotary_pct": 0.25,
        },
    ),
    "opt": (
        "opt",
        "CausalLM",
        {
            "max_position_embeddings": 64,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
        },
    ),
    "bloom": ("bloom", "CausalLM", {"hidden_size": 96, "n_layer": 2, "n_head": 6}),
    "mpt": ("mpt", "CausalLM", {"d_model": 96, "n_heads": 6, "n_layers": 2, "max_seq_len": 64}),
    "falcon": (
        "falcon",
        "CausalLM",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
        },
    ),
    "llama": ("llama", "CausalLM", _LLAMA),
    "llama80": (
        "llama",
        "CausalLM",
        _LLAMA | {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 80},
    ),
    "llama_tied": ("llama", "CausalLM", _LLAMA | {"tie_word_embeddings": True}),
    "llama_biased": ("llama", "CausalLM", _LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "mistral_sw": ("mistral", "CausalLM", _SMALL | {"num_hidden_layers": 2, "sliding_window": 4}),
    "qwen2": ("qwen2", "CausalLM", _SMALL | {"num_hidden_layers": 2}),
    "gemma2": (
        "gemma2",
        "CausalLM",
        _SMALL
        | {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": 4, "attn_logit_softcapping": 50.0},
    ),
    "phi": (
        "phi",
        "CausalLM",
        {
            "hidden_size": 160,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "intermediate_size": 100,
            "partial_rotary_factor": 0.4,
        },
    ),
    "internlm3": ("internlm3", "CausalLM", _GROUPED | {"head_dim": 16}),
    "mistral": ("mistral", "CausalLM", _GROUPED),
    "qwen3": ("qwen3", "CausalLM", _GROUPED | {"head_dim": 24}),
    "qwen2_sw": (
        "qwen2",
        "CausalLM",
        _GROUPED | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "smollm3": (
        "smollm3",
        "CausalLM",
        _GROUPED | {"no_rope_layer_interval": 2, "pad_token_id": 0},
    ),
    "granite": (
        "granite",
        "CausalLM",
        _GROUPED
        | {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
    "olmo2": ("olmo2", "CausalLM", _GROUPED),
    "gemma": ("gemma", "CausalLM", _GROUPED | {"head_dim": 24}),
    "gemma3_text": (
        "gemma3_text",
        "CausalLM",
        _GROUPED
        | {
            "head_dim": 16,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("phi3", "CausalLM", _GROUPED | {"pad_token_id": 0}),
    "phi3_sw": ("phi3", "CausalLM", _GROUPED | {"pad_token_id": 0, "sliding_window": 4}),
    "phi_normed": ("phi", "CausalLM", _GROUPED | {"qk_layernorm": True}),
    "glm4": ("glm4", "CausalLM", _GROUPED | {"head_dim": 16, "attention_bias": True, "pad_token_id": 0}),
    "cohere": ("cohere", "CausalLM", _GROUPED | {"logit_scale": 1.5}),
    "cohere_normed": ("cohere", "CausalLM", _GROUPED | {"logit_scale": 1.5, "use_qk_norm": True}),
    "starcoder2": ("starcoder2", "CausalLM", _GROUPED | {"sliding_window": 4}),
    "stablelm": ("stablelm", "CausalLM", _GROUPED),
    "stablelm_parallel": (
        "stablelm",
        "CausalLM",
        _GROUPED | {"use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "stablelm_normed": ("stablelm", "CausalLM", _GROUPED | {"qk_layernorm": True}),
    "nemotron": ("nemotron", "CausalLM", _GROUPED),
    "persimmon": ("persimmon", "CausalLM", _GROUPED | {"num_key_value_heads": 4}),
    "neox_sequential": (
        "gpt_neox",
        "CausalLM",
        _GROUPED | {"use_parallel_residual": False, "rotary_pct": 0.5},
    ),
    "bigcode": ("gpt_bigcode", "CausalLM", {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "bigcode_mha": (
        "gpt_bigcode",
        "CausalLM",
        {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "multi_query": False},
    ),
    "codegen": (
        "codegen",
        "CausalLM",
        {"n_positions": 64, "n_ctx": 64, "n_embd": 64, "n_layer": 2, "n_head": 8, "rotary_dim": 4},
    ),
    "opt_pre": (
        "opt",
        "CausalLM",
        {
            "max_position_embeddings": 64,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 64,
        },
    ),
    "bloom_post": (
        "bloom",
        "CausalLM",
        {
            "hidden_size": 96,
            "n_layer": 2,
            "n_head": 6,
            "apply_residual_connection_post_layernorm": True,
        },
    ),
    "falcon_old": ("falcon", "CausalLM", _FALCON),
    "falcon_mha": ("falcon", "CausalLM", _FALCON | {"multi_query": False, "parallel_attn": False}),
    "falcon_alibi": (
        "falcon",
        "CausalLM",
        _FALCON | {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    ),
    "falcon_one_norm": (
        "falcon",
        "CausalLM",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "xlm_roberta": ("xlm-roberta", "MaskedLM", _ENCODER),
    "electra": ("electra", "MaskedLM", _ENCODER | {"embedding_size": 32}),
    "megatron_bert": ("megatron-bert", "MaskedLM", _ENCODER),
    "megatron_bert_decoder": ("megatron-bert", "CausalLM", _ENCODER | {"is_decoder": True}),
    "distilbert": ("distilbert", "MaskedLM", {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4}),
    "modernbert": (
        "modernbert",
        "MaskedLM",
        _ENCODER | {"local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0},
    ),
    "clip_text": ("clip_text_model", "", _ENCODER | {"eos_token_id": 2, "initializer_factor": 0.25}),
    "clip_vision": (
        "clip_vision_model",
        "",
        _ENCODER | {"image_size": 16, "patch_size": 8, "initializer_factor": 0.25},
    ),
    # has no row
    "olmo": ("olmo", "CausalLM", _GROUPED | {"pad_token_id": 0}),
    "bart": ("bart", "Seq2SeqLM", _BART),
    "bert": ("bert", "MaskedLM", _ENCODER),
    "bert_decoder": ("bert", "CausalLM", _ENCODER | {"is_decoder": True}),
    "roberta": ("roberta", "MaskedLM", _ENCODER),
    "t5": ("t5", "Seq2SeqLM", _T5),
    "t5_gated": ("t5", "Seq2SeqLM", _T5 | {"feed_forward_proj": "gated-gelu"}),
}

ZOO |= MOE

if cache_key() != "cache":
    # transformers 5.17 gives this decoder the mask of an encoder, and does not know that model
    del ZOO["megatron_bert_decoder"], ZOO["internlm3"]


def make(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of the zoo in eval mode, its weights so large that a wrong head or norm shows in logits."""
    model_type, kind, config = ZOO[name]
    torch.manual_seed(seed)
    vocabulary = {} if name == "clip_vision" else {"vocab_size": VOCABULARY}
    made = AutoConfig.for_model(model_type, **(vocabulary | config | overrides))
    model = getattr(transformers, f"AutoModelFor{kind}" if kind else "AutoModel").from_config(made).eval()
    shake(model)
    model.to(DEVICE)
    if model.can_generate():
        model.generation_config.pad_token_id = 0
        # random models end at random; the tests of eos set it
        model.generation_config.eos_token_id = None
    return model


def shake(model: nn.Module) -> None:
    """Move every parameter off the values that initialisation shares: unit norms, zero biases."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and bool(parameter.min() < parameter.max()):
                parameter.mul_(4)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))


def reference(model: PreTrainedModel) -> PreTrainedModel:
    """An untouched copy that runs transformers' own eager attention."""
    copied = copy.deepcopy(model)
    if copied._can_set_attn_implementation():
        copied.set_attn_implementation("eager")
    return copied


def engine_of(
    model: nn.Module, dtype: torch.dtype = torch.float32, **options: Any
) -> trinfer.InferenceEngine:
    """An engine with kernels."""
    return trinfer.init_inference(model, dtype=dtype, replace_with_kernel_inject=True, **options)


def token_ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    """Random ids that are no special token of the zoo."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (rows, tokens), generator=generator).to(DEVICE)


def inputs_of(name: str, rows: int, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """What a model of the zoo is called with, by keyword."""
    if name == "clip_vision":
        return {"pixel_values": torch.randn(rows, 3, 16, 16, device=DEVICE)}
    ids = token_ids(rows, tokens, seed)
    more = {"decoder_input_ids": ids[:, : 1 + tokens // 2]} if ZOO[name][1] == "Seq2SeqLM" else {}
    return {"input_ids": ids} | more


def result(output: Any) -> Tensor:
    """The logits of a model with a head, the hidden states of one without."""
    return output.logits if "logits" in output else output.last_hidden_state


def left_padded(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Random rows of `lengths`, padded on the left with 0, and their mask."""
    longest = max(lengths)
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths], device=DEVICE)
    return token_ids(len(lengths), longest) * mask, mask
