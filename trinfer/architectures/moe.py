"""Rows of decoders with mixtures of experts; the experts themselves are read from the modules."""

from dataclasses import replace
from typing import Any

from trinfer.architectures.llama import LLAMA, MISTRAL, QWEN2, QWEN3

_EXPERTS: dict[str, Any] = {"router": "mlp.gate", "experts": "mlp.experts"}

MIXTRAL = replace(MISTRAL, model_type="mixtral", **_EXPERTS)
QWEN2_MOE = replace(
    QWEN2,
    model_type="qwen2_moe",
    # only layers that have a window have the attribute, and no kernel of a row gets it from elsewhere
    window="",
    must_be_off=("sliding_window",),
    shared_experts="mlp.shared_expert",
    **_EXPERTS,
)
QWEN3_MOE = replace(QWEN3, model_type="qwen3_moe", **_EXPERTS)
OLMOE = replace(
    LLAMA,
    model_type="olmoe",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    qk_norm="width",
    must_be_off=("config.clip_qkv",),
    **_EXPERTS,
)
DEEPSEEK_V2 = replace(
    LLAMA,
    model_type="deepseek_v2",
    attention_stays="expands latent keys and values in torch around the attention kernel",
    shared_experts="mlp.shared_experts",
    only_by_parts="the cache holds latents, not keys and values",
    **_EXPERTS,
)
DEEPSEEK_V3 = replace(DEEPSEEK_V2, model_type="deepseek_v3")
GPT_OSS = replace(
    LLAMA,
    model_type="gpt_oss",
    norm_cast="float32",
    window="sliding_window",
    sinks="sinks",
    rotary_layout="once",
    router="mlp.router",
    experts="mlp.experts",
)

ROWS = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS)
