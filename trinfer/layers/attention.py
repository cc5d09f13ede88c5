"""Attention: the forwards bound onto attention modules, and the function registered with transformers."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trinfer.compat import cache_argument, kernel_window, rotary_argument, wants_attentions
from trinfer.kernels.attention import attention
from trinfer.kernels.decode_attention import decode_attention
from trinfer.kernels.rotary import rotary
from trinfer.kernels.scores import alibi_slopes
from trinfer.layers import records
from trinfer.layers.linear import product, segments
from trinfer.layers.norm import norm_of, normalise


class Scores(NamedTuple):
    """How scores are made of queries and keys, beside the mask: the options of both attention kernels."""

    sm_scale: float
    is_causal: bool
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None


def decoder_attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Forward of an attention module whose layer hands it the rotary table."""
    return _layer(self, hidden_states, position_embeddings, attention_mask, kwargs)


def encoder_attention_forward(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Forward of an attention module without rotary embedding."""
    return _layer(self, hidden_states, None, attention_mask, kwargs)


def residual_attention_forward(
    self: Any, hidden_states: Tensor, residual: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Forward of an attention module that adds the residual of its layer."""
    return _layer(self, hidden_states, None, attention_mask, kwargs, residual)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of modules that keep their own forward, called by transformers' attention interface.

    Args:
        query: [B, H, M, D], any strides.
        key, value: [B, G, N, D], not repeated for grouped heads.
        attention_mask: what `mask_function` returned, or the caller's own 4-D mask.
        s_aux: [H], a logit per head that takes its share of the softmax (gpt-oss).
        position_bias: [1 or B, H, M, N], added to the scores (T5).

    Returns:
        [B, M, H, D], and the probabilities if they were asked for.
    """
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window is None:
        # some modules leave it to the mask, of which this function sees the padding only
        sliding_window = getattr(module, "sliding_window", None)
    scores = Scores(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        is_causal,
        kernel_window(sliding_window, is_causal),
        softcap,
        s_aux,
    )
    if position_bias is not None:
        sizes = (query.shape[2], key.shape[2])
        attention_mask = _with_bias(position_bias, attention_mask, *sizes, scores.is_causal)
    return attend(query, key, value, attention_mask, scores, with_weights=wants_attentions(module, kwargs))


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores, *, with_weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """One of the two attention kernels, by the number of queries and the kind of mask; [B, M, H, D]."""
    kv_range, bias = (None, mask) if mask is not None and mask.dim() == 4 else (mask, None)
    if bias is not None:
        # a 4-D mask is complete by transformers' contract: it holds causality and window as well
        scores = scores._replace(is_causal=False, window=None)
        bias = bias if bias.is_floating_point() else bias.to(torch.bool)
    if with_weights:
        return _with_weights(q, k, v, scores, kv_range, bias)
    options = scores._asdict() | {"kv_range": kv_range, "bias": bias}
    if q.shape[2] == 1 and (scores.is_causal or scores.window is None):
        del options["is_causal"]
        return decode_attention(q, k, v, **options), None
    return attention(q, k, v, **options), None


def _layer(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    names = self._trinfer
    qkv = product(hidden_states, *segments(self, projections(names), names.transposed))
    out, probabilities = attend_heads(self, names, qkv, position_embeddings, attention_mask, kwargs)
    if names.out:
        out = product(out, *segments(self, (names.out,), names.transposed), residual=residual)
    return out, probabilities


def projections(names: records.Attention) -> tuple[str, ...]:
    """The linears whose outputs, side by side, are queries, keys and values."""
    return (names.qkv,) if names.qkv else (names.query, names.key, names.value)


def attend_heads(
    owner: Any,
    names: Any,
    qkv: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """What the attention module `owner` makes of its projections [B, M, width]: norms, rotation, attention.

    Returns:
        [B, M, H · D], and the probabilities if they were asked for.
    """
    q, k, v = (x.flatten(2, -2) for x in split_heads(qkv, names))
    if names.qk_norm == "width":
        q, k = (
            normalise(x.flatten(2), norm_of(getattr(owner, name), names.norm)).unflatten(-1, x.shape[2:])
            for name, x in ((names.query_norm, q), (names.key_norm, k))
        )
    elif names.qk_norm == "head":
        q = normalise(q, norm_of(getattr(owner, names.query_norm), names.norm))
        k = normalise(k, norm_of(getattr(owner, names.key_norm), names.norm))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if names.rotary != "none":
        table = rotary_table(names, *rotary_argument(owner, position_embeddings, kwargs))
        q, k = rotary(q, k, *table, interleaved=names.rotary == "interleaved")
    cache = cache_argument(kwargs)
    if cache is not None:
        k, v = cache.update(k, v, names.layer)
    mask, alibi = _mask_and_alibi(names, attention_mask, kwargs.get("alibi"), q, k)
    sinks = getattr(owner, names.sinks) if names.sinks else None
    scores = Scores(names.sm_scale, names.is_causal, names.window, names.softcap, sinks, alibi)
    out, probabilities = attend(q, k, v, mask, scores, with_weights=wants_attentions(owner, kwargs))
    return out.flatten(2), probabilities


def split_heads(qkv: Tensor, names: records.Attention) -> tuple[Tensor, ...]:
    """Queries, keys and values in projections [B, M, width], each [B, M, heads, D]; views.

    Heads that do not lie evenly in memory come in two dimensions, whose product counts them.
    """
    return _SPLITS[names.qkv_layout](qkv, names)


def _split_concat(qkv: Tensor, names: Any) -> tuple[Tensor, ...]:
    G = names.num_kv_heads
    return qkv.unflatten(-1, (-1, names.head_dim)).split((names.num_heads, G, G), 2)


def _split_heads(qkv: Tensor, names: Any) -> tuple[Tensor, ...]:
    return qkv.unflatten(-1, (names.num_heads, 3, names.head_dim)).unbind(3)


def _split_groups(qkv: Tensor, names: Any) -> tuple[Tensor, ...]:
    if names.num_kv_heads == 1:
        return _split_concat(qkv, names)
    groups = qkv.unflatten(-1, (names.num_kv_heads, -1, names.head_dim))
    return groups[:, :, :, :-2], groups[:, :, :, -2], groups[:, :, :, -1]


def _split_shards(qkv: Tensor, names: Any) -> tuple[Tensor, ...]:
    q, v, k = qkv.unflatten(-1, (4, 3, -1, names.head_dim)).unbind(3)
    return q, k, v


# where queries, keys and values lie in a projection, by its layout
_SPLITS = {
    "concat": _split_concat,
    "heads": _split_heads,
    "groups": _split_groups,
    "shards": _split_shards,
}


def rotary_table(names: records.Attention, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The model's own rotary table as the kernels read it."""
    if names.rotary_layout == "sines_first":
        return second.repeat_interleave(2, -1), first.repeat_interleave(2, -1)
    if names.rotary_layout == "once":
        return torch.cat((first, first), -1), torch.cat((second, second), -1)
    if names.rotary == "interleaved" and names.rotary_layout == "halves":
        half = first.shape[-1] // 2
        return first[..., :half].repeat_interleave(2, -1), second[..., :half].repeat_interleave(2, -1)
    return first, second


def _mask_and_alibi(
    names: Any, mask: Tensor | None, bias: Tensor | None, q: Tensor, k: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The mask as `attend` takes it, and the slopes that the kernels turn into a bias by distance.

    Args:
        mask: what the layer was handed.
        bias: the model's own ALiBi [B · H, 1, N], where it makes one.
    """
    if names.mask_is_inverted and mask is not None:
        mask = ~mask
    if names.mask_is_open and mask is not None and mask.dim() == 4:
        allowed = allowed_keys(q.shape[2], k.shape[2], names.is_causal, names.window, None, q.device)
        mask = _with_rule(mask, allowed)
    if names.alibi == "none":
        return mask, None
    if mask is not None and mask.dim() == 4 and bias is not None:
        if names.alibi == "plain":
            # distances count the tokens that a mask leaves, which only the model's own bias knows
            whole = bias.unflatten(0, (-1, names.num_heads)).expand(-1, -1, q.shape[2], -1)
            mask = _with_bias(whole, mask, q.shape[2], k.shape[2], names.is_causal)
        return mask, None
    return mask, slopes(names, q.device)


def _with_rule(mask: Tensor, allowed: Tensor) -> Tensor:
    """A 4-D mask that also forbids what is not in `allowed`."""
    if mask.is_floating_point():
        return mask.masked_fill(~allowed, torch.finfo(mask.dtype).min)
    return mask.to(torch.bool) & allowed


def slopes(names: records.Attention, device: torch.device) -> Tensor | None:
    """[H] float32, what scores lose for each step between query and key; None without ALiBi."""
    if names.alibi == "none":
        return None
    return _alibi(names.num_heads, names.sm_scale if names.alibi == "scaled" else 1.0, device)


@functools.lru_cache
def _alibi(num_heads: int, factor: float, device: torch.device) -> Tensor:
    return (alibi_slopes(num_heads) * factor).to(device)


def _with_bias(bias: Tensor, mask: Tensor | None, M: int, N: int, is_causal: bool) -> Tensor:
    """A bias of the scores with the mask in it, as one 4-D mask."""
    bias = bias[:, :, -M:, :N]
    lowest = torch.finfo(bias.dtype).min
    if mask is not None and mask.dim() == 4 and mask.is_floating_point():
        # selected, not added: what forbids must stay the lowest number, which a bias would move
        return (bias + mask).masked_fill(mask <= torch.finfo(mask.dtype).min / 2, lowest)
    allowed = mask.to(torch.bool) if mask is not None and mask.dim() == 4 else None
    if allowed is None:
        allowed = allowed_keys(M, N, is_causal, None, mask, bias.device)
    return bias.masked_fill(~allowed, lowest)


def allowed_keys(
    M: int, N: int, is_causal: bool, window: int | None, kv_range: Tensor | None, device: torch.device
) -> Tensor:
    """What queries may see, bool [B or 1, 1, M, N]."""
    key = torch.arange(N, device=device)
    distance = torch.arange(N - M, N, device=device)[:, None] - key
    allowed = torch.ones(1, 1, M, N, dtype=torch.bool, device=device)
    if is_causal:
        allowed = allowed & (distance >= 0)
    if window is not None:
        allowed = allowed & (distance < window if is_causal else distance.abs() <= window)
    if kv_range is not None:
        start, end = kv_range[:, 0, None], kv_range[:, 1, None]
        allowed = allowed & ((key >= start) & (key < end))[:, None, None, :]
    return allowed


def _with_weights(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, kv_range: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention in torch, for the calls that want its probabilities: a kernel never holds them all."""
    group, (M, N) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = (q @ k.transpose(-1, -2)).float() * scores.sm_scale
    if scores.softcap is not None:
        logits = (logits / scores.softcap).tanh() * scores.softcap
    if scores.alibi is not None:
        logits = logits + scores.alibi[:, None, None] * torch.arange(1 - N, 1, device=q.device)
    allowed = allowed_keys(M, N, scores.is_causal, scores.window, kv_range, q.device)
    if bias is not None:
        allowed, logits = (allowed & bias, logits) if bias.dtype == torch.bool else (allowed, logits + bias)
    logits = logits.masked_fill(~allowed, float("-inf"))
    if scores.sinks is not None:
        sinks = scores.sinks.float()[None, :, None, None].expand(q.shape[0], -1, M, 1)
        logits = torch.cat((logits, sinks), -1)
    weights = logits.softmax(-1)[..., :N].masked_fill(~allowed, 0).to(q.dtype)
    return (weights @ v).transpose(1, 2).contiguous(), weights
