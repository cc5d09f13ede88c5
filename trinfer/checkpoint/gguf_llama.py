"""A Llama model and its tokenizer from one GGUF file."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trinfer.checkpoint.gguf import GgufFile, GgufTensor, broken, read_gguf

# names after the layer's prefix: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# name of the pre-tokenizer: does it cut numbers into digits before the byte-level cut?
PRE_TOKENIZERS = {"smollm": True, "gpt-2": False}
CONTROL_TOKEN, USER_TOKEN = 3, 4


def load_gguf(
    path: str | Path, dtype: torch.dtype = torch.float32
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Build the model and the tokenizer of a Llama GGUF file; blocks are expanded to `dtype`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a broken file, or an architecture, block type, rope or tokenizer that cannot be read.
    """
    file = read_gguf(path)
    model, tokenizer = meta_llama(file, dtype), llama_tokenizer(file)
    names = _parameter_names(file, model)
    weights = {names[name]: _weight(tensor, model.config, dtype) for name, tensor in file.tensors.items()}
    # not strict: a tied head has no tensor of its own
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    # rotary frequencies are no part of a state dict, so they would stay on the meta device
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    return model.eval(), tokenizer


def meta_llama(file: GgufFile, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model of the file on the meta device, in eval mode: its structure without weights."""
    config = llama_config(file)
    with torch.device("meta"):
        return LlamaForCausalLM._from_config(config, dtype=dtype).eval()


def llama_config(file: GgufFile) -> LlamaConfig:
    """What the file's metadata says about the model, in the words of transformers."""
    _allow(file, "general.architecture", file.metadata.get("general.architecture"), ["llama"])
    _allow(file, "llama.rope.scaling.type", file.metadata.get("llama.rope.scaling.type", "none"), ["none"])
    width, heads = _size(file, "embedding_length"), _size(file, "attention.head_count")
    head_dim = _size(file, "attention.key_length", width // heads)
    _allow(file, "llama.rope.dimension_count", _size(file, "rope.dimension_count", head_dim), [head_dim])
    return LlamaConfig(
        vocab_size=len(file.require("tokenizer.ggml.tokens", list)),
        hidden_size=width,
        intermediate_size=_size(file, "feed_forward_length"),
        num_hidden_layers=_size(file, "block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_size(file, "attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=_size(file, "context_length"),
        rms_norm_eps=_decimal(file.require("llama.attention.layer_norm_rms_epsilon", float)),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": _decimal(file.metadata.get("llama.rope.freq_base", 10000.0)),
        },
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
    )


def _allow(file: GgufFile, what: str, value: object, allowed: list[Any]) -> None:
    if value not in allowed:
        raise ValueError(
            f"{what} is {value!r} in {file.path}, which cannot be read from GGUF; "
            f"allowed: {', '.join(map(repr, allowed))}; load the model's Hugging Face folder instead"
        )


def _size(file: GgufFile, name: str, default: int | None = None) -> int:
    key = f"llama.{name}"
    if key not in file.metadata and default is not None:
        return default
    size: int = file.require(key, int)
    if size < 1:
        raise broken(file.path, f"{key} is {size}")
    return size


def _decimal(value: float) -> float:
    # 1e-5 stored as float32 comes back as 9.999999747378752e-06; its shortest decimal is 1e-5 again
    return float(str(np.float32(value)))


def _parameter_names(file: GgufFile, model: LlamaForCausalLM) -> dict[str, str]:
    """Tensor name -> parameter name, or all mismatches of the file and its metadata in one error."""
    names = {name: _parameter_name(name) for name in file.tensors}
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    wrong = [f"{name} is missing" for name in expected.keys() - names.values()]
    for name, parameter in names.items():
        shape = file.tensors[name].shape
        if parameter not in expected:
            wrong.append(f"{name} is not expected")
        elif shape != expected[parameter]:
            wrong.append(f"{name} has shape {shape}, expected {expected[parameter]}")
    if wrong:
        raise ValueError(
            f"tensors of {file.path} do not fit a Llama model of its metadata: {'; '.join(sorted(wrong))}; "
            "allowed: one tensor per parameter; load the model's Hugging Face folder instead"
        )
    return names


def _parameter_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    block, _, rest = stem.removeprefix("blk.").partition(".")
    if stem in MODEL_NAMES:
        return f"{MODEL_NAMES[stem]}.weight"
    return f"model.layers.{block}.{LAYER_NAMES.get(rest, rest)}.weight"


def _weight(tensor: GgufTensor, config: LlamaConfig, dtype: torch.dtype) -> torch.Tensor:
    weight = torch.from_numpy(tensor.expand())
    if tensor.name.endswith("attn_q.weight"):
        weight = _to_halves(weight, config.num_attention_heads)
    elif tensor.name.endswith("attn_k.weight"):
        weight = _to_halves(weight, config.num_key_value_heads or config.num_attention_heads)
    return weight.to(dtype)


def _to_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    # llama.cpp rotates the rows (2i, 2i + 1) of a head together, transformers the rows (i, i + D/2)
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def llama_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer that the file's metadata describes, chat template included."""
    tokens = _texts(file, "tokenizer.ggml.tokens")
    special = _special_tokens(file, tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=_bpe(file, tokens, special.get("bos_token")),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        model_max_length=_size(file, "context_length"),
        # a decoder continues the right end of its prompt
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **special,
    )


def _bpe(file: GgufFile, tokens: list[str], bos: str | None) -> Tokenizer:
    _allow(file, "tokenizer.ggml.model", file.metadata.get("tokenizer.ggml.model"), ["gpt2"])
    pre = file.metadata.get("tokenizer.ggml.pre", "gpt-2")
    _allow(file, "tokenizer.ggml.pre", pre, list(PRE_TOKENIZERS))
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=_merges(file, tokens))
    )
    digits = [pre_tokenizers.Digits(individual_digits=True)] if PRE_TOKENIZERS[pre] else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, file.metadata.get("tokenizer.ggml.token_type", []), strict=False):
        if kind == CONTROL_TOKEN:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER_TOKEN:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    if bos is not None and file.metadata.get("tokenizer.ggml.add_bos_token", False):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokens.index(bos))]
        )
    return tokenizer


def _texts(file: GgufFile, key: str) -> list[str]:
    texts: list[str] = file.require(key, list)
    if not all(isinstance(text, str) for text in texts):
        raise broken(file.path, f"{key} holds something other than text")
    return texts


def _merges(file: GgufFile, tokens: list[str]) -> list[tuple[str, str]]:
    known, merges = set(tokens), []
    for merge in _texts(file, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not known.issuperset((left, right, left + right)):
            raise broken(file.path, f"its tokenizer merges {merge!r}, no tokens")
        merges.append((left, right))
    return merges


def _special_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, key in keys.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            if not 0 <= token_id < len(tokens):
                raise broken(file.path, f"its {key}_token_id is {token_id} of {len(tokens)} tokens")
            special[name] = tokens[token_id]
    if "eos_token" in special:
        special.setdefault("pad_token", special["eos_token"])
    return special
