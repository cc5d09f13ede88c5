"""Attention: the forwards bound onto attention modules, and the function registered with transformers."""

from typing import Any

import torch
from torch import Tensor, nn

from trinfer.compat import cache_argument
from trinfer.kernels.attention import attention
from trinfer.kernels.decode_attention import decode_attention
from trinfer.kernels.rotary import rotary
from trinfer.layers import records
from trinfer.layers.linear import product, segments


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


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of modules that keep their own forward, called by transformers' attention interface.

    Args:
        query: [B, H, M, D], any strides.
        key, value: [B, G, N, D], not repeated for grouped heads.
        attention_mask: what `mask_function` returned, or the caller's own 4-D mask.

    Returns:
        [B, M, H, D], and the probabilities if they were asked for.

    Raises:
        NotImplementedError: a score transformation that the attention kernel does not know.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown:
        raise NotImplementedError(
            f"{type(module).__name__} asks for attention with {', '.join(unknown)}; the attention kernel "
            "knows scaling, sliding_window and masks; use replace_with_kernel_inject=False for this model"
        )
    return attend(
        query,
        key,
        value,
        attention_mask,
        sm_scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        window=sliding_window,
        with_weights=asks_for_weights(module, kwargs),
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    sm_scale: float,
    is_causal: bool,
    window: int | None,
    with_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """One of the two attention kernels, by the number of queries and the kind of mask; [B, M, H, D]."""
    kv_range, bias = (None, mask) if mask is not None and mask.dim() == 4 else (mask, None)
    if bias is not None:
        # a 4-D mask is complete by transformers' contract: it holds causality and window as well
        is_causal, window = False, None
        bias = bias if bias.is_floating_point() else bias.to(torch.bool)
    if with_weights:
        return _with_weights(q, k, v, sm_scale, is_causal, window, kv_range, bias)
    if q.shape[2] == 1 and (is_causal or window is None):
        return decode_attention(q, k, v, sm_scale=sm_scale, window=window, kv_range=kv_range, bias=bias), None
    return (
        attention(
            q, k, v, sm_scale=sm_scale, is_causal=is_causal, window=window, kv_range=kv_range, bias=bias
        ),
        None,
    )


def _layer(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    names = self._trinfer
    weights, biases = segments(self, (names.query, names.key, names.value))
    qkv = product(hidden_states, weights, biases)
    widths = [weight.shape[0] for weight in weights]
    q, k, v = (part.unflatten(-1, (-1, names.head_dim)).transpose(1, 2) for part in qkv.split(widths, -1))
    cache, with_weights = cache_argument(kwargs), asks_for_weights(self, kwargs)
    out, probabilities = attend_heads(
        self, names, q, k, v, position_embeddings, attention_mask, cache, with_weights
    )
    return (product(out, *segments(self, (names.out,))) if names.out else out), probabilities


def attend_heads(
    owner: Any,
    names: records.Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
    cache: Any,
    with_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rotation, cache and attention of the attention module `owner`; [B, M, H · D], and the probabilities."""
    if position_embeddings is not None and names.rotary != "none":
        q, k = rotary(q, k, *position_embeddings, interleaved=names.rotary == "interleaved")
    if cache is not None:
        k, v = cache.update(k, v, owner.layer_idx)
    out, probabilities = attend(
        q,
        k,
        v,
        mask,
        sm_scale=names.sm_scale,
        is_causal=names.is_causal,
        window=names.window,
        with_weights=with_weights,
    )
    return out.flatten(2), probabilities


def asks_for_weights(module: Any, kwargs: dict[str, Any]) -> bool:
    """True if this call of an attention module must return its probabilities."""
    return bool(kwargs.get("output_attentions", getattr(module.config, "output_attentions", False)))


def _with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sm_scale: float,
    is_causal: bool,
    window: int | None,
    kv_range: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention in torch, for the calls that want its probabilities: a kernel never holds them all."""
    group, (M, N) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)).float() * sm_scale
    key = torch.arange(N, device=q.device)
    distance = torch.arange(N - M, N, device=q.device)[:, None] - key
    allowed = torch.ones(1, 1, M, N, dtype=torch.bool, device=q.device)
    if is_causal:
        allowed = allowed & (distance >= 0)
    if window is not None:
        allowed = allowed & (distance < window if is_causal else distance.abs() <= window)
    if kv_range is not None:
        start, end = kv_range[:, 0, None], kv_range[:, 1, None]
        allowed = allowed & ((key >= start) & (key < end))[:, None, None, :]
    if bias is not None:
        allowed, scores = (allowed & bias, scores) if bias.dtype == torch.bool else (allowed, scores + bias)
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1).masked_fill(~allowed, 0).to(q.dtype)
    return (weights @ v).transpose(1, 2).contiguous(), weights
