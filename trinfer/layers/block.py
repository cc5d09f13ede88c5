"""A whole layer as a few launches: norms go into the products behind them, residuals into those before."""

import functools
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from trinfer.compat import cache_argument, has_user_hooks
from trinfer.kernels.norm_elements import Norm
from trinfer.layers import records
from trinfer.layers.attention import asks_for_weights, attend_heads
from trinfer.layers.linear import Biases, Segments, product, segments
from trinfer.layers.norm import normalise

Attend = Callable[[Tensor], Tensor]


class Parameters(NamedTuple):
    """The tensors of a layer in the places that its record names: views, never copies."""

    record: records.Block
    qkv: tuple[Segments, Biases]
    out: tuple[Segments, Biases]
    up: tuple[Segments, Biases]
    down: tuple[Segments, Biases]
    attention_norm: Norm
    mlp_norm: Norm


def parameters(layer: nn.Module, record: records.Block) -> Parameters:
    """Look up what `record` names in `layer`."""
    heads, mlp = record.attention, record.mlp
    ups = (mlp.gate, mlp.up) if mlp.gate else (mlp.up,)
    return Parameters(
        record,
        segments(layer, (heads.query, heads.key, heads.value)),
        segments(layer, (heads.out,)),
        segments(layer, ups, mlp.transposed),
        segments(layer, (mlp.down,), mlp.transposed),
        norm_at(layer, record.attention_norm),
        norm_at(layer, record.mlp_norm),
    )


def norm_at(owner: nn.Module, place: records.Place) -> Norm:
    """The norm at a place below `owner`, as the kernels take it."""
    module, norm = attrgetter(place.path)(owner), place.norm
    bias = getattr(module, "bias", None)
    return Norm(module.weight, bias, norm.eps, norm.kind, norm.offset, norm.cast)


def block(p: Parameters, x: Tensor, attend: Attend, out: Tensor | None = None) -> Tensor:
    """One layer; `attend` makes [..., H · D] of the product of queries, keys and values.

    Args:
        p: what `parameters` found.
        x: [..., K], hidden states.
        attend: rotation, cache and attention, which depend on where the layer runs.
        out: memory for the result; may be x itself.
    """
    mlp, residual = p.record.mlp, p.record.residual
    is_pre = residual != "post"
    attended = attend(product(x, *p.qkv, norm=p.attention_norm if is_pre else None))
    if residual == "parallel":
        inner = product(x, *p.up, act=mlp.act, gated=bool(mlp.gate), norm=p.mlp_norm)
        return product(inner, *p.down, residual=product(attended, *p.out, residual=x, out=out), out=out)
    h = product(attended, *p.out, residual=x, out=out)
    if not is_pre:
        h = normalise(h, p.attention_norm)
    inner = product(h, *p.up, act=mlp.act, gated=bool(mlp.gate), norm=p.mlp_norm if is_pre else None)
    h = product(inner, *p.down, residual=h, out=out if is_pre else None)
    return h if is_pre else normalise(h, p.mlp_norm)


def split_heads(qkv: Tensor, heads: records.Attention, weights: Segments) -> tuple[Tensor, ...]:
    """Queries [B, H, M, D], keys and values [B, G, M, D] of a product [B, M, outputs]; views."""
    parts = qkv.split([weight.shape[0] for weight in weights], -1)
    return tuple([part.unflatten(-1, (-1, heads.head_dim)).transpose(1, 2) for part in parts])


def block_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Forward of a layer inside the model's own forward, which hands it mask, rotary table and cache.

    It runs part by part in a call that asks for attention probabilities or attends to another model's states,
    and where parts got hooks after the plan was made.
    """
    given = dict(zip(_arguments(self.__class__), args, strict=False)) | kwargs
    names: records.Block = self._trinfer
    owner = attrgetter(names.owner)(self)
    if (
        asks_for_weights(owner, given)
        or given.get("encoder_hidden_states") is not None
        or has_user_hooks(self)
    ):
        return type(self).forward(self, hidden_states, *args, **kwargs)
    p = parameters(self, names)

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = split_heads(qkv, names.attention, p.qkv[0])
        turn, mask = given.get("position_embeddings"), given.get("attention_mask")
        return attend_heads(owner, names.attention, q, k, v, turn, mask, cache_argument(given))[0]

    return block(p, hidden_states, attend)


@functools.cache
def _arguments(layer: Any) -> tuple[str, ...]:
    """Names of what a layer takes after the hidden states."""
    return tuple(inspect.signature(layer.forward).parameters)[2:]
