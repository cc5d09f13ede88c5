"""Rows of decoders laid out as Llama is: RMS norms before both halves, gated MLP, rotary embedding."""

from trinfer.architectures.arch import Arch

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

ROWS = (LLAMA,)
