"""A zoo of tiny random models, one per architecture or variant that users reported faults about."""

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

import trinfer
from trinfer import backend

VOCABULARY = 99
DEVICE = backend.default_device()

_SMALL = {"hidden_size": 64, "intermediate_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2}
_ENCODER = {"hidden_size": 48, "intermediate_size": 100, "num_attention_heads": 3, "num_hidden_layers": 2}
_LLAMA = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
}

# name -> (model_type, kind, config)
ZOO: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("gpt2", "CausalLM", {"n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 3}),
    "gptneo": (
        "gpt_neo",
        "CausalLM",
        {
            "max_position_embeddings": 64,
            "hidden_size": 48,
            "num_layers": 2,
            "num_heads": 3,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
    ),
    "gptj": (
        "gptj",
        "CausalLM",
        {"n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 3, "rotary_dim": 8},
    ),
    "neox": (
        "gpt_neox",
        "CausalLM",
        {
            "max_position_embeddings": 64,
            "hidden_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "intermediate_size": 100,
            "rotary_pct": 0.25,
        },
    ),
    "opt": (
        "opt",
        "CausalLM",
        {
            "max_position_embeddings": 64,
            "hidden_size": 48,
            "ffn_dim": 100,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
        },
    ),
    "bloom": ("bloom", "CausalLM", {"hidden_size": 48, "n_layer": 2, "n_head": 6}),
    "mpt": ("mpt", "CausalLM", {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64}),
    "falcon": (
        "falcon",
        "CausalLM",
        {
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
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
    "bert": ("bert", "MaskedLM", _ENCODER),
    "bert_decoder": ("bert", "CausalLM", _ENCODER | {"is_decoder": True}),
    "roberta": ("roberta", "MaskedLM", _ENCODER),
    "t5": (
        "t5",
        "Seq2SeqLM",
        {
            "d_model": 48,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 3,
            "decoder_start_token_id": 0,
        },
    ),
}


def make(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of the zoo in eval mode, its weights so large that a wrong head or norm shows in logits."""
    model_type, kind, config = ZOO[name]
    torch.manual_seed(seed)
    made = AutoConfig.for_model(model_type, vocab_size=VOCABULARY, **(config | overrides))
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(made).eval()
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
            if parameter.dim() > 1:
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


def left_padded(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Random rows of `lengths`, padded on the left with 0, and their mask."""
    longest = max(lengths)
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths], device=DEVICE)
    return token_ids(len(lengths), longest) * mask, mask
