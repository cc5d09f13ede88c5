"""Rows of decoders laid out as Llama is: norms before both halves, an MLP as one module, rotary embedding."""

from dataclasses import replace

from trinfer.architectures.arch import Arch, Variant

LLAMA = Arch(
    model_type="llama",
    backbone="model",
    embedding="embed_tokens",
    layers="layers",
    rotary_table="rotary_emb",
    final_norm="norm",
    head="lm_head",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    attention="self_attn",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    out="self_attn.o_proj",
    head_dim="head_dim",
    num_heads="config.num_attention_heads",
    num_kv_heads="config.num_key_value_heads",
    rotary="half",
    mlp="mlp",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    activation="mlp.act_fn",
)
INTERNLM = replace(
    LLAMA,
    model_type="internlm",
    num_kv_heads="config.num_attention_heads",
    sm_scale="",
    is_causal=True,
    foreign=("InternLMRMSNorm", "InternLMMLP", "InternLMAttention"),
)
INTERNLM3 = replace(LLAMA, model_type="internlm3")
MISTRAL = replace(LLAMA, model_type="mistral", window="config.sliding_window")
QWEN2 = replace(LLAMA, model_type="qwen2", window="sliding_window")
QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    qk_norm="head",
)
SMOLLM3 = replace(LLAMA, model_type="smollm3", window="sliding_window", rotary_flag="use_rope")
GRANITE = replace(
    LLAMA,
    model_type="granite",
    embedding_scale="embedding_multiplier",
    residual_scale="residual_multiplier",
    logit_divisor="config.logits_scaling",
)
OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    norm_cast="float32",
    attention_norm="",
    mlp_norm="",
    attention_out_norm="post_attention_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    qk_norm="width",
)

GEMMA = replace(
    LLAMA,
    model_type="gemma",
    embedding_scale="embed_tokens.scalar_embed_scale",
    norm_eps="eps",
    norm_cast="float32",
    norm_offset=1.0,
)
GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    window="sliding_window",
    softcap="attn_logit_softcapping",
    logit_softcap="config.final_logit_softcapping",
)
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    # its own attention never reads attn_logit_softcapping
    softcap="",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    qk_norm="head",
)

PHI3 = replace(
    LLAMA,
    model_type="phi3",
    query="",
    key="",
    value="",
    qkv="self_attn.qkv_proj",
    window="config.sliding_window",
    gate="",
    up="",
    gate_up="mlp.gate_up_proj",
    activation="mlp.activation_fn",
)
GLM4 = replace(
    LLAMA,
    model_type="glm4",
    attention_out_norm="post_self_attn_layernorm",
    mlp_out_norm="post_mlp_layernorm",
    rotary="interleaved",
    gate="",
    up="",
    gate_up="mlp.gate_up_proj",
    activation="mlp.activation_fn",
)
COHERE = replace(
    LLAMA,
    model_type="cohere",
    mlp_norm="input_layernorm",
    norm="layer",
    residual="parallel",
    rotary="interleaved",
    rotary_layout="pairs",
    must_be_off=("use_qk_norm",),
    logit_scale="logit_scale",
)
STARCODER2 = replace(
    LLAMA,
    model_type="starcoder2",
    norm="layer",
    norm_eps="eps",
    window="config.sliding_window",
    gate="",
    up="mlp.c_fc",
    down="mlp.c_proj",
    activation="mlp.act",
)
STABLELM = replace(
    LLAMA,
    model_type="stablelm",
    norm="layer",
    norm_eps="eps",
    must_be_off=("qk_layernorm",),
    variants=(
        Variant("use_parallel_residual", True, (("residual", "parallel"), ("mlp_norm", "input_layernorm"))),
    ),
)
NEMOTRON = replace(LLAMA, model_type="nemotron", norm="layer", norm_eps="eps", norm_offset=1.0, gate="")
PHI = replace(
    LLAMA,
    model_type="phi",
    final_norm="final_layernorm",
    mlp_norm="input_layernorm",
    norm="layer",
    norm_eps="eps",
    residual="parallel",
    out="self_attn.dense",
    gate="",
    up="mlp.fc1",
    down="mlp.fc2",
    activation="mlp.activation_fn",
    variants=(
        Variant(
            "qk_layernorm",
            True,
            (
                ("query_norm", "self_attn.q_layernorm"),
                ("key_norm", "self_attn.k_layernorm"),
                ("qk_norm", "head"),
            ),
        ),
    ),
)
PERSIMMON = replace(
    PHI,
    model_type="persimmon",
    mlp_norm="post_attention_layernorm",
    residual="pre",
    query="",
    key="",
    value="",
    qkv="self_attn.query_key_value",
    qkv_layout="heads",
    num_heads="num_heads",
    num_kv_heads="num_heads",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    activation="mlp.act",
)

ROWS = (
    LLAMA,
    INTERNLM,
    INTERNLM3,
    MISTRAL,
    QWEN2,
    QWEN3,
    SMOLLM3,
    GRANITE,
    OLMO2,
    GEMMA,
    GEMMA2,
    GEMMA3,
    PHI3,
    GLM4,
    COHERE,
    STARCODER2,
    STABLELM,
    NEMOTRON,
    PHI,
    PERSIMMON,
)
