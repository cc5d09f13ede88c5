"""Attention of one query token per sequence over a key/value cache."""

from torch import Tensor

from trinfer.kernels.elements import attend_ref


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float,
    window: int | None = None,
    kv_range: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(q kᵀ · sm_scale + bias, over the valid keys) v for one query at the last key position."""
    return decode_attention_ref(q, k, v, sm_scale=sm_scale, window=window, kv_range=kv_range, bias=bias)


def decode_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float,
    window: int | None = None,
    kv_range: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The truth of `decode_attention`."""
    return attend_ref(q, k, v, sm_scale, True, window, kv_range, bias)
