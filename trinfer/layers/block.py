"""A whole layer as a few launches: norms go into the products behind them, residuals into those before."""

import functools
import inspect
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from trinfer.compat import has_user_hooks, wants_attentions
from trinfer.kernels.norm_elements import Norm
from trinfer.layers import records
from trinfer.layers.attention import attend_heads, projections, slopes, split_heads
from trinfer.layers.linear import NORM_ROWS, Biases, Segments, halves, product, segments, sum_of_products
from trinfer.layers.norm import norm_of, normalise

Attend = Callable[[Tensor], Tensor]
Linear = tuple[Segments, Biases]


class Parameters(NamedTuple):
    """The tensors of a layer in the places that its record names: views, never copies."""

    record: records.Block
    qkv: Linear
    out: Linear
    up: Linear
    down: Linear
    attention_norm: Norm | None
    mlp_norm: Norm | None
    attention_out_norm: Norm | None
    mlp_out_norm: Norm | None
    query_norm: Norm | None
    key_norm: Norm | None
    sinks: Tensor | None
    slopes: Tensor | None


def parameters(layer: nn.Module, record: records.Block) -> Parameters:
    """Look up what `record` names in `layer`."""
    owner: Any = attrgetter(record.owner)(layer)
    heads, mlp = record.attention, record.mlp
    if mlp.gate_up:
        ups = halves(attrgetter(mlp.gate_up)(layer))
    else:
        ups = segments(layer, (mlp.gate, mlp.up) if mlp.gate else (mlp.up,), mlp.transposed)
    qkv = segments(owner, projections(heads), heads.transposed)
    return Parameters(
        record,
        qkv,
        segments(layer, (record.out,), heads.transposed),
        ups,
        segments(layer, (mlp.down,), mlp.transposed),
        norm_at(layer, record.attention_norm),
        norm_at(layer, record.mlp_norm),
        norm_at(layer, record.attention_out_norm),
        norm_at(layer, record.mlp_out_norm),
        norm_of(getattr(owner, heads.query_norm), heads.norm) if heads.norm else None,
        norm_of(getattr(owner, heads.key_norm), heads.norm) if heads.norm else None,
        getattr(owner, heads.sinks) if heads.sinks else None,
        slopes(heads, qkv[0][0].device),
    )


def norm_at(owner: nn.Module, place: records.Place | None) -> Norm | None:
    """The norm at a place below `owner`, as the kernels take it."""
    return None if place is None else norm_of(attrgetter(place.path)(owner), place.norm)


def block(p: Parameters, x: Tensor, attend: Attend, out: Tensor | None = None) -> Tensor:
    """One layer; `attend` makes [..., H · D] of the product of queries, keys and values.

    Args:
        p: what `parameters` found.
        x: [..., K], hidden states.
        attend: rotation, cache and attention, which depend on where the layer runs.
        out: memory for the result; may be x itself.
    """
    mlp, residual = p.record.mlp, p.record.residual
    if residual == "parallel":
        return _parallel(p, x, attend, out)
    is_pre = residual == "pre"
    attended = attend(product(x, *p.qkv, norm=p.attention_norm if is_pre else None))
    h = _add(p, attended, p.out, p.attention_out_norm, x, out)
    if not is_pre and p.attention_norm:
        h = normalise(h, p.attention_norm, out=h)
    inner = product(h, *p.up, act=mlp.act, gated=len(p.up[0]) > 1, norm=p.mlp_norm if is_pre else None)
    h = _add(p, inner, p.down, p.mlp_out_norm, h, out)
    return normalise(h, p.mlp_norm, out=h) if p.mlp_norm and not is_pre else h


def _parallel(p: Parameters, x: Tensor, attend: Attend, out: Tensor | None) -> Tensor:
    """x + attention(norm(x)) + MLP(norm(x))."""
    norm, mlp_norm, n = p.attention_norm, p.mlp_norm, x
    is_one = p.record.attention_norm == p.record.mlp_norm
    if norm and is_one and x.shape[:-1].numel() > NORM_ROWS:
        n, norm, mlp_norm = normalise(x, norm), None, None
    attended = attend(product(n, *p.qkv, norm=norm))
    inner = product(n, *p.up, act=p.record.mlp.act, gated=len(p.up[0]) > 1, norm=mlp_norm)
    return sum_of_products(attended, p.out, inner, p.down, x, out)


def _add(
    p: Parameters, x: Tensor, linear: Linear, norm: Norm | None, residual: Tensor, out: Tensor | None
) -> Tensor:
    """What closes half a layer: a product of x, its norm if it has one, and the residual."""
    if norm is None:
        return product(x, *linear, residual=residual, scale=p.record.residual_scale, out=out)
    return normalise(product(x, *linear), norm, add=residual, out=out)


def score_options(p: Parameters) -> dict[str, Any]:
    """How the layer makes scores, for both attention kernels."""
    heads = p.record.attention
    options = {"sm_scale": heads.sm_scale, "window": heads.window, "softcap": heads.softcap}
    return options | {"alibi": p.slopes, "sinks": p.sinks}


def heads_of(p: Parameters, qkv: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values [B, heads, M, D] of a product [B, M, width]; views (see `split_heads`)."""
    q, k, v = split_heads(qkv, p.record.attention)
    if p.record.attention.qk_norm == "width":
        for x, norm in ((q.flatten(2), p.query_norm), (k.flatten(2), p.key_norm)):
            assert norm is not None
            normalise(x, norm, out=x)
    return tuple(x.movedim(1, -2) for x in (q, k, v))


def block_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Forward of a layer, which the model's own forward hands mask, rotary table and cache.

    Inside the model it gives what the model's code expects, called by hand what `return_tuple` says.
    """
    return handed_on(self, layer_states(self, hidden_states, *args, **kwargs))


def layer_states(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What a layer gives inside its model.

    It runs part by part in a call that asks for attention probabilities or attends to another model's states,
    and where parts got hooks after the plan was made.
    """
    given = dict(zip(_arguments(self.__class__), args, strict=False)) | kwargs
    names: records.Block = self._trinfer
    owner = attrgetter(names.owner)(self)
    if (
        wants_attentions(owner, given)
        or given.get("encoder_hidden_states") is not None
        or has_user_hooks(self)
    ):
        return type(self).forward(self, hidden_states, *args, **kwargs)

    def attend(qkv: Tensor) -> Tensor:
        turn, mask = given.get("position_embeddings"), given.get("attention_mask")
        return attend_heads(owner, names.attention, qkv, turn, mask, given)[0]

    states = block(parameters(self, names), hidden_states, attend)
    return (states, None) if names.gives_tuple else states


def handed_on(layer: Any, states: Any) -> Any:
    """What `layer_states` gave, in the form that the caller of the layer expects.

    A tuple for a caller outside the model has more than the states only if more was asked for.
    """
    if getattr(_running, "depth", 0):
        return states
    given = states if isinstance(states, tuple) else (states,)
    if not layer._trinfer.return_tuple:
        return given[0]
    return given[:1] if all(extra is None for extra in given[1:]) else given


class Surrounding:
    """The forward of a module in which whole layers run, bound in the place of its own: it tells them so."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _running.depth = getattr(_running, "depth", 0) + 1
        try:
            return type(self.module).forward(self.module, *args, **kwargs)
        finally:
            _running.depth -= 1

    @property
    def __signature__(self) -> inspect.Signature:
        own = inspect.signature(type(self.module).forward)
        return own.replace(parameters=list(own.parameters.values())[1:])


# how many forwards of models this thread is in
_running = threading.local()


@functools.cache
def _arguments(layer: Any) -> tuple[str, ...]:
    """Names of what a layer takes after the hidden states."""
    return tuple(inspect.signature(layer.forward).parameters)[2:]
