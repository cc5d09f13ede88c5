"""Rows of encoders."""

from trinfer.architectures.arch import Arch

BERT = Arch(
    model_type="bert",
    backbone="bert",
    embedding="embeddings.word_embeddings",
    layers="encoder.layer",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    attention_norm="attention.output.LayerNorm",
    mlp_norm="output.LayerNorm",
    norm="layer",
    norm_eps="eps",
    residual="post",
    attention="attention.self",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    out="attention.output.dense",
    head_dim="attention_head_size",
    num_heads="num_attention_heads",
    num_kv_heads="num_attention_heads",
    up="intermediate.dense",
    down="output.dense",
    activation="intermediate.intermediate_act_fn",
)

ROWS = (BERT,)
