"""Tiny mixtures of experts: the part of the zoo with routers."""

from typing import Any

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_DEEPSEEK = _SMALL | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
_QWEN = _SMALL | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_QWEN2 = _QWEN | {"shared_expert_intermediate_size": 56}
_WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
_OLMOE = _SMALL | {"num_experts": 5, "num_experts_per_tok": 2}
_OSS = _SMALL | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}

# name -> (model_type, kind, config)
MOE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("mixtral", "CausalLM", _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", "CausalLM", _QWEN2),
    # one layer has no experts
    "qwen2_moe_dense": ("qwen2_moe", "CausalLM", _QWEN2 | {"mlp_only_layers": [0]}),
    "qwen2_moe_sw": ("qwen2_moe", "CausalLM", _QWEN2 | _WINDOW),
    "qwen3_moe": ("qwen3_moe", "CausalLM", _QWEN | {"head_dim": 16}),
    "qwen3_moe_normed": ("qwen3_moe", "CausalLM", _QWEN | {"head_dim": 16, "norm_topk_prob": True}),
    "olmoe": ("olmoe", "CausalLM", _OLMOE),
    "olmoe_clipped": ("olmoe", "CausalLM", _OLMOE | {"clip_qkv": 0.5}),
    "deepseek_v2": ("deepseek_v2", "CausalLM", _DEEPSEEK),
    "deepseek_v2_groups": ("deepseek_v2", "CausalLM", _DEEPSEEK | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", "CausalLM", _DEEPSEEK),
    "gpt_oss": ("gpt_oss", "CausalLM", _OSS),
}


def all_experts(name: str) -> dict[str, Any]:
    """Changes to the config of a model after which every token goes to every expert; none for a dense one."""
    config = MOE[name][2] if name in MOE else {}
    changes = {"topk_group": config["n_group"]} if "n_group" in config else {}
    for key in {"num_experts", "num_local_experts", "n_routed_experts"} & config.keys():
        changes["num_experts_per_tok"] = config[key]
    return changes
