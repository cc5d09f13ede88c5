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
class Mlp:
    """down(act(gate(x)) · up(x)), or down(act(up(x))) where `gate` is empty."""

    gate: str
    up: str
    down: str
    act: str
    transposed: bool = False


@dataclass(frozen=True)
class DenseAct:
    """act(dense(x))."""

    dense: str
    act: str


@dataclass(frozen=True)
class DenseAddNorm:
    """norm(dense(x) + residual)."""

    dense: str
    norm: str
    eps: float


@dataclass(frozen=True)
class Attention:
    """Projections, rotary embedding, cache and attention of one layer."""

    query: str
    key: str
    value: str
    out: str
    head_dim: int
    sm_scale: float
    is_causal: bool
    window: int | None
    rotary: str


@dataclass(frozen=True)
class Place:
    """A norm and where it is: a path from the module that remembers it."""

    path: str
    norm: Norm


@dataclass(frozen=True)
class Block:
    """A whole layer; every name in it is a path from the layer.

    owner: the attention module, which knows its place among the layers.
    residual: "pre" x + f(norm(x)), "post" norm(x + f(x)), "parallel" x + attention(norm(x)) + MLP(norm(x)).
    """

    owner: str
    attention: Attention
    mlp: Mlp
    attention_norm: Place
    mlp_norm: Place
    residual: str


@dataclass(frozen=True)
class Decoder:
    """A model that decodes by launches alone: its layers and what is around them; paths from the model.

    Logits are multiplied by `logit_scale`, then become logit_cap · tanh(logits / logit_cap).
    """

    embedding: str
    layers: tuple[str, ...]
    blocks: tuple[Block, ...]
    rotary: str
    final_norm: Place
    head: str
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None


Record = Linear | Norm | Activation | Embedding | Mlp | DenseAct | DenseAddNorm | Attention | Block
