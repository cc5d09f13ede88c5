"""What a row can say: the names of the parts of a model, and flags for the mathematics they use."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin

NormKind = Literal["rms", "layer"]
Cast = Literal["input", "float32"]
Rotary = Literal["none", "half", "interleaved"]
RotaryLayout = Literal["halves", "pairs", "sines_first", "once"]
Residual = Literal["pre", "post", "parallel"]
QkvLayout = Literal["concat", "heads", "groups", "shards"]
QkNorm = Literal["none", "head", "width"]
Alibi = Literal["none", "plain", "scaled"]
LayerOutput = Literal["tensor", "tuple"]


@dataclass(frozen=True)
class Variant:
    """What a row changes where an attribute of the model's configuration has this value."""

    attribute: str
    value: bool | int | str | None
    changes: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Arch:
    """Names and flags that tell the rewriting pass how to read a model; never a tensor, never a module.

    A path is dotted (`"encoder.layer"`), an attribute may be dotted too (`"config.num_attention_heads"`).
    An empty string means that the architecture has no such part. A row whose names or flags depend on the
    configuration of a model lists `variants`; `resolved` applies those that hold.
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
    # attributes: the first of the backbone, the others of the outermost module. Logits are multiplied by
    # `logit_scale`, divided by `logit_divisor`, then bent by `logit_softcap`
    embedding_scale: str = ""
    logit_scale: str = ""
    logit_divisor: str = ""
    logit_softcap: str = ""
    # rows of the position table that stand before the first position
    position_offset: int = 0

    # what follows describes one layer, and all paths start there. Its norms: before attention and MLP (after
    # the addition where `residual` is post; the same one twice where a parallel layer has only one), and on
    # what they give, before it is added. `norm_cast` as in kernels.rms_norm
    attention_norm: str = ""
    mlp_norm: str = ""
    attention_out_norm: str = ""
    mlp_out_norm: str = ""
    # of the attention to an encoder, which a row does not describe
    cross_attention_norm: str = ""
    norm: NormKind = "rms"
    norm_eps: str = "variance_epsilon"
    norm_cast: Cast = "input"
    norm_offset: float = 0.0

    residual: Residual = "pre"
    # attribute of the layer: factor of what attention and MLP give, before it is added
    residual_scale: str = ""
    # what the layer's own forward returns
    layer_output: LayerOutput = "tensor"

    # attention: three linears, or `qkv` in which each layout has its order of outputs: concat q|k|v, heads
    # q|k|v for each head, groups q..q|k|v for each key/value head, shards q|v|k for each of four
    attention: str
    query: str = ""
    key: str = ""
    value: str = ""
    qkv: str = ""
    qkv_layout: QkvLayout = "concat"
    out: str
    # norms of q and k, over each head or over all of them at once; of the kind that `norm` says
    query_norm: str = ""
    key_norm: str = ""
    qk_norm: QkNorm = "none"

    # attributes of the attention module, or for some their value; an empty `sm_scale` is 1 / sqrt(head_dim)
    head_dim: str
    num_heads: str
    num_kv_heads: str
    layer_index: str = "layer_idx"
    sm_scale: str | float = "scaling"
    is_causal: str | bool = "is_causal"
    # a layer has a window where `window_where`, (attribute, value), holds; empty: where it is not None
    window: str = ""
    window_where: tuple[str, str] | tuple[()] = ()
    softcap: str = ""
    sinks: str = ""
    # scaled: `sm_scale` is applied to the bias as well, and the model's own 4-D masks hold it already
    alibi: Alibi = "none"
    # `rotary_layout` says how the model's own table holds its angles: all of them twice, each of them twice,
    # or once, with the sines first or not; `rotary_flag` is an attribute of the attention module, false where
    # a layer does not rotate
    rotary: Rotary = "none"
    rotary_layout: RotaryLayout = "halves"
    rotary_flag: str = ""
    # the model's own masks are bool and True where a query must not attend; it makes them without asking
    # which attention is chosen
    mask_is_inverted: bool = False
    # the model's own 4-D masks lack what the attention module itself adds: causality and window
    mask_is_open: bool = False

    # the MLP: `mlp` is the module around it, empty where its linears live in the layer or apart; `gate_up` is
    # a linear whose outputs are those of gate, then those of up
    mlp: str = ""
    gate: str = ""
    up: str = ""
    gate_up: str = ""
    down: str
    activation: str

    # a mixture of experts in the place of the MLP, in the layers that have one: rule, biases and layout are
    # read from the modules. Of a residual layer: the dense branch, and the linear of the two shares
    router: str = ""
    experts: str = ""
    shared_experts: str = ""
    dense_branch: str = ""
    coefficient: str = ""

    # the module's own forward takes the residual and adds it
    attention_adds_residual: bool = False
    mlp_adds_residual: bool = False
    # attributes of attention and MLP modules that change what they compute where they are set
    must_be_off: tuple[str, ...] = ()

    # classes of models whose code is not in transformers, known by name to compute what this row says
    foreign: tuple[str, ...] = ()

    # why attention keeps its own code around the kernel, and why a layer of this row cannot run as one; empty
    # if it does not, and if it can
    attention_stays: str = ""
    only_by_parts: str = ""

    # the row of the decoder in a model that has an encoder as well
    decoder: "Arch | None" = None
    variants: tuple[Variant, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if get_origin(field.type) is Literal and value not in get_args(field.type):
                allowed = ", ".join(map(repr, get_args(field.type)))
                raise ValueError(
                    f"Arch.{field.name}={value!r} is not known; allowed: {allowed}; use one of these"
                )

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms of a layer, each once."""
        before = (self.attention_norm, self.cross_attention_norm, self.mlp_norm)
        return tuple(dict.fromkeys(filter(None, (*before, self.attention_out_norm, self.mlp_out_norm))))

    def resolved(self, config: Any) -> "Arch":
        """This row for a model with this configuration; has no variants left."""
        decoder = self.decoder.resolved(config) if self.decoder else None
        return replace(self, **({"variants": (), "decoder": decoder} | dict(self._changes(config))))

    def _changes(self, config: Any) -> Iterator[tuple[str, Any]]:
        for variant in self.variants:
            if getattr(config, variant.attribute, None) == variant.value:
                yield from variant.changes
