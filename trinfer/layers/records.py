"""What a bound forward remembers on its module: one frozen record of names and flags, never a tensor.

Nothing here imports a kernel, so a plan can be made where Triton is missing.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """y = x · weightᵀ + bias; `transposed` says that the weight lies in memory as [in, out]."""

    transposed: bool = False


@dataclass(frozen=True)
class Norm:
    """RMS or layer normalisation; `eps` is the value, read when the plan was made."""

    kind: str
    eps: float
    cast: str = "input"
    offset: float = 0.0


@dataclass(frozen=True)
class Activation:
    """An elementwise activation by its kernel name."""

    act: str


@dataclass(frozen=True)
class Embedding:
    """Rows of a table."""


@dataclass(frozen=True)
class Patches:
    """A convolution whose windows neither overlap nor leave gaps."""


@dataclass(frozen=True)
class Mlp:
    """down(act(gate(x)) · up(x)), or down(act(up(x))) where both `gate` and `gate_up` are empty.

    `gate_up` is one linear that holds the outputs of gate, then those of up.
    """

    gate: str
    up: str
    down: str
    act: str
    transposed: bool = False
    gate_up: str = ""


@dataclass(frozen=True)
class DenseAct:
    """act(dense(x))."""

    dense: str
    act: str


@dataclass(frozen=True)
class DenseAddNorm:
    """norm(dense(x) + residual); no norm where `norm` is empty."""

    dense: str
    norm: str = ""
    eps: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Projections, norms of queries and keys, rotary embedding, cache and attention of one layer.

    Either `query`, `key` and `value` are linears or `qkv` is; names, layouts and flags as in `Arch`.
    `mask_is_open`: the model's own 4-D masks lack causality and window, which attention adds.
    """

    query: str = ""
    key: str = ""
    value: str = ""
    qkv: str = ""
    qkv_layout: str = "concat"
    transposed: bool = False
    out: str = ""
    head_dim: int
    num_heads: int
    num_kv_heads: int
    layer: int | None
    sm_scale: float
    is_causal: bool
    window: int | None = None
    softcap: float | None = None
    sinks: str = ""
    alibi: str = "none"
    rotary: str = "none"
    rotary_layout: str = "halves"
    query_norm: str = ""
    key_norm: str = ""
    qk_norm: str = "none"
    norm: Norm | None = None
    mask_is_inverted: bool = False
    mask_is_open: bool = False


@dataclass(frozen=True)
class Place:
    """A norm and where it is: a path from the module that remembers it."""

    path: str
    norm: Norm


@dataclass(frozen=True, kw_only=True)
class Block:
    """A whole layer; names in it are paths from the layer, but those in `attention`: these start at `owner`.

    owner: the attention module, to which `out` need not belong.
    attention_norm, mlp_norm: before the halves, or after the additions where `residual` is "post".
    attention_out_norm, mlp_out_norm: of what the halves give, before it is added.
    residual: "pre" x + f(norm(x)), "post" norm(x + f(x)), "parallel" x + attention(norm(x)) + MLP(norm(x)).
    residual_scale: factor of what the halves give.
    gives_tuple: the layer's own forward returns its states in a tuple.
    return_tuple: a call from outside the model gets a tuple.
    """

    owner: str
    attention: Attention
    out: str
    mlp: Mlp
    attention_norm: Place | None
    mlp_norm: Place | None
    attention_out_norm: Place | None = None
    mlp_out_norm: Place | None = None
    residual: str
    residual_scale: float = 1.0
    gives_tuple: bool = False
    return_tuple: bool = True

    @property
    def launches(self) -> int:
        """Launches for a token: those of five, and one for each norm behind a product."""
        parallel = self.residual == "parallel"
        behind = [self.attention_out_norm, self.mlp_out_norm]
        behind += [self.attention_norm, self.mlp_norm] if self.residual == "post" else []
        joined = parallel and not any(behind) and self.residual_scale == 1.0
        return 5 - joined + sum(map(bool, behind)) + 2 * (self.attention.qk_norm == "width")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A model that decodes by launches alone: its layers and what is around them; paths from the model.

    Where `is_scale_rounded`, the scale of the embedding has the precision of its table. `positions` is a
    table of which `position_offset` rows stand before the first position. `rotary_kinds` has an entry a
    layer: what the rotary module wants to be told of it, empty where it takes nothing. Logits are multiplied
    by `logit_scale`, then become logit_cap · tanh(logits / logit_cap). `max_positions`: what the tables have
    room for, None if they grow.
    """

    embedding: str
    layers: tuple[str, ...]
    blocks: tuple[Block, ...]
    positions: str = ""
    position_offset: int = 0
    embedding_norm: Place | None = None
    embedding_scale: float = 1.0
    is_scale_rounded: bool = False
    rotary: str = ""
    rotary_kinds: tuple[str, ...] = ()
    final_norm: Place | None
    head: str
    logit_scale: float = 1.0
    logit_cap: float | None = None
    max_positions: int | None = None


@dataclass(frozen=True)
class ReadNorm:
    """A normalisation found by reading its module: `input` is its argument, the rest as in `Norm`.

    `weight` and `bias` are names of parameters; layer normalisation may lack either.
    """

    input: str
    kind: str
    weight: str
    bias: str
    eps: float
    cast: str = "input"
    offset: float = 0.0


@dataclass(frozen=True)
class ReadMlp:
    """An MLP found by reading its module.

    `ups` are one or two linears. `halves` says how a gated MLP with one linear holds both: the gate in the
    first half of its rows ("gate_up"), in the second ("up_gate"), or in every other row, from row 0
    ("gate_up_rows") or from row 1 ("up_gate_rows"); empty if it does not. `down` may be missing. `residual`
    is the argument, if there is one, that is added to what the linears give.
    """

    input: str
    ups: tuple[str, ...]
    down: str
    act: str
    halves: str = ""
    transposed: bool = False
    residual: str = ""


@dataclass(frozen=True)
class LinearAct:
    """act(x · weightᵀ + bias), of a linear and an activation that lie side by side in their layer."""

    act: str
    transposed: bool = False


@dataclass(frozen=True)
class Done:
    """What another module has done already: the input is handed on."""


@dataclass(frozen=True)
class Router:
    """Which experts a token goes to; the rule as in `kernels.routing`.

    `bias` is added to the logits, `choice_bias` to the scores for the choice only; `is_wide`: the product is
    in float32 whatever the dtype of the model.
    """

    input: str
    bias: str
    choice_bias: str
    top_k: int
    scoring: str
    renormalize: bool
    scale: float
    num_groups: int
    kept_groups: int
    group_best: int
    is_wide: bool


@dataclass(frozen=True)
class Experts:
    """down(act(gate(x)) · up(x)) of the experts of each token, weighted and summed.

    `halves` as in `ReadMlp`, empty without a gate; an empty `act` leaves what is between the products to the
    module's own `_apply_gate`.
    """

    up: str
    down: str
    up_bias: str
    down_bias: str
    act: str
    halves: str
    transposed: bool


@dataclass(frozen=True)
class ResidualMoe:
    """dense(x) · c₁ + experts(x) · c₂, c the softmax of a linear; `dense_first` says which share is whose."""

    router: str
    experts: str
    dense: str
    coefficient: str
    dense_first: bool = True


Record = (
    Linear
    | Norm
    | Activation
    | Embedding
    | Patches
    | Mlp
    | DenseAct
    | DenseAddNorm
    | Attention
    | Block
    | ReadNorm
    | ReadMlp
    | LinearAct
    | Done
    | Router
    | Experts
    | ResidualMoe
)
