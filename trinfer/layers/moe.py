"""Mixtures of experts: the router, and the experts of few or of many tokens."""

import functools
import threading
from typing import Any

import torch
from torch import Tensor

from trinfer.kernels.combine_experts import combine_experts
from trinfer.kernels.grouped_gemv import MAX_PAIRS, grouped_gemv
from trinfer.kernels.grouped_matmul import grouped_matmul
from trinfer.kernels.router import MAX_TOKENS, router
from trinfer.kernels.routing import routing
from trinfer.kernels.softmax import softmax
from trinfer.kernels.sort_by_expert import sort_by_expert
from trinfer.layers.linear import product, segments
from trinfer.layers.read import gate_and_up


def router_forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights, experts) of each token: of few in one launch, of many a product and a choice."""
    names = self._trinfer
    x = (args[0] if args else kwargs[names.input]).flatten(0, -2)
    weight, bias = self.weight, getattr(self, names.bias) if names.bias else None
    choice_bias = getattr(self, names.choice_bias).float() if names.choice_bias else None
    rule: dict[str, Any] = {
        "scoring": names.scoring,
        "renormalize": names.renormalize,
        "scale": names.scale,
        "num_groups": names.num_groups,
        "kept_groups": names.kept_groups,
        "group_best": names.group_best,
    }
    if len(x) <= MAX_TOKENS:
        logits, ids, weights = router(
            x, weight, names.top_k, bias, choice_bias, is_wide=names.is_wide, **rule
        )
        return logits, weights, ids
    if names.is_wide:
        x, weight = x.float(), weight.float()
    logits = product(x, (weight,), None if bias is None else (bias,))
    ids, weights = routing(logits, names.top_k, choice_bias, **rule)
    return logits, weights, ids


def ticket_of(x: Tensor) -> Tensor:
    """The ticket of the launches that follow each other, in the stream or thread of this call."""
    line = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else threading.get_ident()
    return _ticket(x.device, line)


@functools.lru_cache
def _ticket(device: torch.device, line: int) -> Tensor:
    # a recording or a mode of the caller must not own it
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int32, device=device)


def experts_forward(self: Any, hidden_states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Two launches for few tokens; for many they are sorted by expert before and summed after: four."""
    names = self._trinfer
    ids, weights = experts.to(torch.int32), weights.to(torch.float32)
    up, up_bias = _stacked(self, names.up, names.up_bias, names.transposed)
    down, down_bias = _stacked(self, names.down, names.down_bias, names.transposed)
    gated = bool(names.act and names.halves)
    if gated:
        up = gate_and_up(up, names.halves, 1)
        # the kernels want rows of biases without gaps
        halves = () if up_bias is None else gate_and_up(up_bias, names.halves, 1)
        up_bias = tuple(half.contiguous() for half in halves) or None
    options: dict[str, Any] = {"act": names.act or "none", "gated": gated}
    if ids.numel() <= MAX_PAIRS:
        h = grouped_gemv(hidden_states, up, ids, up_bias, **options)
        h = h if names.act else self._apply_gate(h)
        return grouped_gemv(h, down, ids, down_bias, combine=weights)
    order, offsets = sort_by_expert(ids, len(down))
    h = grouped_matmul(hidden_states, up, order, offsets, up_bias, gather=True, **options)
    h = h if names.act else self._apply_gate(h)
    y = grouped_matmul(h, down, order, offsets, down_bias, scatter=True)
    return combine_experts(y, weights)


def residual_moe_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """The two branches of a residual layer, weighted by the shares that a linear gives them."""
    names = self._trinfer
    router, experts, dense = (self.get_submodule(p) for p in (names.router, names.experts, names.dense))
    x = hidden_states.flatten(0, -2)
    _, weights, ids = router(x)
    branches = dense(x), experts(x, ids, weights)
    branches = branches if names.dense_first else branches[::-1]
    shares = softmax(product(x, *segments(self, (names.coefficient,))))
    # an entry of the pair (token, branch) a row
    y = combine_experts(torch.stack(branches, 1).flatten(0, 1), shares.float())
    return y.view(hidden_states.shape)


def _stacked(owner: Any, weight: str, bias: str, transposed: bool) -> tuple[Any, Any]:
    """Weight [E, N, K] as a view, whatever its layout in memory, and bias [E, N]."""
    w = getattr(owner, weight)
    return w.transpose(1, 2) if transposed else w, getattr(owner, bias) if bias else None
