"""One row per architecture: what its parts are called and which variant of the mathematics they use."""

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

Norm = Literal["rms", "layer"]
Cast = Literal["input", "float32"]
Rotary = Literal["none", "half", "interleaved"]
Residual = Literal["pre", "post"]


@dataclass(frozen=True, kw_only=True)
class Arch:
    """Names and flags that tell the rewriting pass how to read a model; never a tensor, never a module.

    A path is dotted (`"encoder.layer"`), an attribute may be dotted too (`"config.num_attention_heads"`).
    An empty string means that the architecture has no such part.
    """

    model_type: str

    # the model: `backbone` and `head` from the outermost module (a bare backbone is found as well), the other
    # paths from the backbone
    backbone: str
    embedding: str
    layers: str
    positions: str = ""
    token_types: str = ""
    embedding_norm: str = ""
    rotary_table: str = ""
    final_norm: str = ""
    head: str = ""

    # norms of one layer, paths from the layer; `norm_cast` as in kernels.rms_norm
    norms: tuple[str, ...] = ()
    norm: Norm = "rms"
    norm_eps: str = "variance_epsilon"
    norm_cast: Cast = "input"
    norm_offset: float = 0.0

    # attention: a path from the layer, the rest are attributes of that module. An empty `out` means that the
    # output projection belongs to one of `dense_add_norms`
    attention: str
    query: str
    key: str
    value: str
    out: str
    head_dim: str
    num_heads: str
    num_kv_heads: str
    sm_scale: str
    is_causal: str = "is_causal"
    window: str = ""
    rotary: Rotary = "none"

    # the MLP as one module (path from the layer; gate is empty for a plain MLP) ...
    mlp: str = ""
    gate: str = ""
    up: str = ""
    down: str = ""
    # ... or spread over modules of the layer: act(dense(x)), and norm(dense(x) + residual)
    dense_acts: tuple[str, ...] = ()
    dense_add_norms: tuple[str, ...] = ()
    dense: str = ""
    dense_norm: str = ""
    activation: str = ""

    residual: Residual = "pre"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if get_origin(field.type) is Literal and value not in get_args(field.type):
                allowed = ", ".join(map(repr, get_args(field.type)))
                raise ValueError(
                    f"Arch.{field.name}={value!r} is not known; allowed: {allowed}; use one of these"
                )


LLAMA = Arch(
    model_type="llama",
    backbone="model",
    embedding="embed_tokens",
    layers="layers",
    rotary_table="rotary_emb",
    final_norm="norm",
    head="lm_head",
    norms=("input_layernorm", "post_attention_layernorm"),
    attention="self_attn",
    query="q_proj",
    key="k_proj",
    value="v_proj",
    out="o_proj",
    head_dim="head_dim",
    num_heads="config.num_attention_heads",
    num_kv_heads="config.num_key_value_heads",
    sm_scale="scaling",
    rotary="half",
    mlp="mlp",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    activation="act_fn",
)

BERT = Arch(
    model_type="bert",
    backbone="bert",
    embedding="embeddings.word_embeddings",
    layers="encoder.layer",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    norm="layer",
    norm_eps="eps",
    attention="attention.self",
    query="query",
    key="key",
    value="value",
    out="",
    head_dim="attention_head_size",
    num_heads="num_attention_heads",
    num_kv_heads="num_attention_heads",
    sm_scale="scaling",
    dense_acts=("intermediate",),
    dense_add_norms=("attention.output", "output"),
    dense="dense",
    dense_norm="LayerNorm",
    activation="intermediate_act_fn",
    residual="post",
)

ARCHITECTURES: dict[str, Arch] = {row.model_type: row for row in (LLAMA, BERT)}
