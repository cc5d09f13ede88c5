"""Rows of models with an encoder and a decoder."""

from dataclasses import replace

from trinfer.architectures.arch import Arch, Variant

BART = Arch(
    model_type="bart",
    backbone="model",
    embedding="encoder.embed_tokens",
    embedding_scale="encoder.embed_tokens.embed_scale",
    layers="encoder.layers",
    positions="encoder.embed_positions",
    position_offset=2,
    embedding_norm="encoder.layernorm_embedding",
    head="lm_head",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    norm="layer",
    norm_eps="eps",
    residual="post",
    attention="self_attn",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    out="self_attn.out_proj",
    head_dim="head_dim",
    num_heads="num_heads",
    num_kv_heads="num_heads",
    up="fc1",
    down="fc2",
    activation="activation_fn",
)
BART_DECODER = replace(
    BART,
    embedding="decoder.embed_tokens",
    embedding_scale="decoder.embed_tokens.embed_scale",
    layers="decoder.layers",
    positions="decoder.embed_positions",
    embedding_norm="decoder.layernorm_embedding",
    cross_attention_norm="encoder_attn_layer_norm",
    only_by_parts="its layers attend to the encoder as well",
)

BIAS = "its scores carry a learned bias by distance, which its own code makes"
T5 = Arch(
    model_type="t5",
    backbone="",
    embedding="shared",
    layers="encoder.block",
    final_norm="encoder.final_layer_norm",
    head="lm_head",
    attention_norm="layer.0.layer_norm",
    mlp_norm="layer.1.layer_norm",
    layer_output="tuple",
    attention="layer.0.SelfAttention",
    query="layer.0.SelfAttention.q",
    key="layer.0.SelfAttention.k",
    value="layer.0.SelfAttention.v",
    out="layer.0.SelfAttention.o",
    head_dim="key_value_proj_dim",
    num_heads="n_heads",
    num_kv_heads="n_heads",
    sm_scale=1.0,
    mlp="layer.1.DenseReluDense",
    up="layer.1.DenseReluDense.wi",
    down="layer.1.DenseReluDense.wo",
    activation="layer.1.DenseReluDense.act",
    attention_stays=BIAS,
    only_by_parts=BIAS,
    variants=(
        Variant(
            "is_gated_act",
            True,
            (("gate", "layer.1.DenseReluDense.wi_0"), ("up", "layer.1.DenseReluDense.wi_1")),
        ),
    ),
)
T5_DECODER = replace(
    T5,
    layers="decoder.block",
    final_norm="decoder.final_layer_norm",
    cross_attention_norm="layer.1.layer_norm",
    mlp_norm="layer.2.layer_norm",
    mlp="layer.2.DenseReluDense",
    up="layer.2.DenseReluDense.wi",
    down="layer.2.DenseReluDense.wo",
    activation="layer.2.DenseReluDense.act",
    variants=(
        Variant(
            "is_gated_act",
            True,
            (("gate", "layer.2.DenseReluDense.wi_0"), ("up", "layer.2.DenseReluDense.wi_1")),
        ),
    ),
)

ROWS = (replace(BART, decoder=BART_DECODER), replace(T5, decoder=T5_DECODER))
