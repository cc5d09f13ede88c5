"""GGUF files for tests: a writer of the format, and a tiny Llama with a tokenizer to write."""

import struct
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trinfer.checkpoint.gguf import BLOCK_TYPES

KINDS = {block_type.name: kind for kind, block_type in BLOCK_TYPES.items()}
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def typed(value: Any) -> bytes:
    """A metadata value with its kind in front: bool, int (u32), float, str, or a list of one of them."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    kind = typed(value[0])[:4] if value else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + b"".join(typed(v)[4:] for v in value)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: Tensors, version: int = 3) -> Path:
    """A GGUF file of `tensors`: name -> (block type, shape, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + typed(value) for key, value in metadata.items())
    body = b""
    for name, (kind, shape, data) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", KINDS.get(kind, 99), len(body))
        body += data + bytes(-len(data) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


TOKENS = ["<pad>", "<s>", "</s>", *"abcdefgh", "Ġ", "ab", "cd", "abcd", "0", "1", "<tool>", *"!?.ijkl"]
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5000.0,
    "llama.rope.dimension_count": 8,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 14, 4, *[1] * 7],
    "tokenizer.ggml.merges": ["a b", "c d", "ab cd"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama(tie: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            tie_word_embeddings=tie,
        )
    ).eval()


def neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head in llama.cpp's order: row i of one half, row i of the other, row i + 1 ..."""
    head_dim = weight.shape[0] // heads
    order = [
        h * head_dim + half * head_dim // 2 + i
        for h in range(heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


def llama_tensors(model: LlamaForCausalLM) -> Tensors:
    tensors = {}
    for name, weight in model.named_parameters():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            stem = f"blk.{layer}.{NAMES[rest]}"
        else:
            stem = NAMES[stem]
        if stem.endswith(("attn_q", "attn_k")):
            weight = neighbours(weight, 4 if stem.endswith("q") else 2)
        tensors[f"{stem}.weight"] = ("F32", tuple(weight.shape), weight.detach().numpy().tobytes())
    return tensors


def tiny_gguf(folder: Path) -> Path:
    """A GGUF file of the tiny Llama."""
    return write_gguf(folder / "tiny.gguf", METADATA, llama_tensors(tiny_llama()))
