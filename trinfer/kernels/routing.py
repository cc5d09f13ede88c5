"""Router of a mixture of experts: which experts a token goes to, and with what weights."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, as_rows, nbytes, next_power_of_2
from trinfer.kernels.routing_elements import check_routing, choose_experts, routing_rule_ref


class _Key(NamedTuple):
    E: int
    top_k: int


# M is the number of tokens and changes from call to call: it must not recompile
@triton.jit(do_not_specialize=["M", "E"])
def _routing_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    M,
    E,
    stride_lm,
    scale,
    SCORING: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per BLOCK_M tokens."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)[:, None]
    offs_e = tl.arange(0, BLOCK_E)[None, :]
    mask_m = offs_m < M - first
    ptrs = logits_ptr + first * stride_lm + offs_m * stride_lm + offs_e
    score = tl.load(ptrs, mask=mask_m & (offs_e < E), other=0.0).to(tl.float32)
    # fmt: off
    ids, weights = choose_experts(
        score, bias_ptr, E, SCORING, RENORMALIZES, TOP_K, NUM_GROUPS, KEPT_GROUPS, GROUP_BEST,
        BLOCK_M, BLOCK_E, BLOCK_K,
    )
    # fmt: on
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    mask_k = offs_k < TOP_K
    offs = first * TOP_K + (offs_m * TOP_K + offs_k)
    tl.store(ids_ptr + offs, ids, mask=mask_m & mask_k)
    tl.store(weights_ptr + offs, weights * scale, mask=mask_m & mask_k)


@launcher
def routing(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    num_groups: int = 1,
    kept_groups: int = 1,
    group_best: int = 2,
) -> tuple[Tensor, Tensor]:
    """ids = top_k of (score(logits) + bias), weights = score(logits)[ids] · scale.

    Args:
        logits: [..., E] float16|bfloat16|float32, any strides.
        top_k: how many experts a token gets, 1 to 32.
        bias: [E] float32, added for the choice only, as DeepSeek-V3 does.
        scoring: softmax (over all experts), softmax_topk (over the chosen ones) or sigmoid.
        renormalize: divide the weights of a token by their sum.
        scale: of the weights, last.
        num_groups: E is split into groups of which only some are chosen from.
        kept_groups: how many: those with the largest sums of their best scores.
        group_best: how many scores of a group that is, 1 (DeepSeek-V2) or 2 (V3).

    Returns:
        (ids [..., top_k] int32, largest score first; weights [..., top_k] float32).

    Raises:
        ValueError: top_k, groups or bias do not fit the experts, unknown scoring.

    Numerics:
        In float32. Of equal scores the lower expert comes first, which torch.topk leaves open.

    Source: https://arxiv.org/abs/2401.04088, https://arxiv.org/abs/2412.19437
    """
    E = logits.shape[-1]
    check_routing(E, top_k, bias, scoring, num_groups, kept_groups, group_best)
    if not backend.runs_triton(logits):
        return routing_ref(
            logits, top_k, bias, scoring=scoring, renormalize=renormalize, scale=scale,
            num_groups=num_groups, kept_groups=kept_groups, group_best=group_best,
        )  # fmt: skip
    shape = (*logits.shape[:-1], top_k)
    ids = logits.new_empty(shape, dtype=torch.int32)
    weights = logits.new_empty(shape, dtype=torch.float32)
    if ids.numel() == 0:
        return ids, weights
    rows = as_rows(logits)
    M = rows.shape[0]
    config = choose(OP, _Key(E, top_k))
    launched("routing")
    launch(_routing_kernel, (-(-M // config["BLOCK_M"]),))(
        rows, bias, ids, weights, M, E, rows.stride(0), scale, scoring, renormalize, top_k, num_groups,
        kept_groups, group_best, BLOCK_E=next_power_of_2(E), BLOCK_K=next_power_of_2(top_k), **config,
    )  # fmt: skip
    return ids, weights


def routing_ref(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    num_groups: int = 1,
    kept_groups: int = 1,
    group_best: int = 2,
) -> tuple[Tensor, Tensor]:
    """The truth of `routing`."""
    rule = (scoring, renormalize, scale, num_groups, kept_groups, group_best)
    return routing_rule_ref(logits, top_k, bias, *rule)


def _default(key: _Key) -> Config:
    if backend.kind() != "gpu":
        return {"BLOCK_M": 8, "num_warps": 1}
    # one warp holds the scores of a few tokens in registers
    return {"BLOCK_M": max(1, min(8, 512 // triton.next_power_of_2(key.E))), "num_warps": 1}


def _inputs(M: int, E: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {"logits": torch.randn(M, E, dtype=dtype, device=device), "top_k": min(2, E)}


def _cost(logits: Tensor, top_k: int, *args: Any, **options: Any) -> tuple[int, int]:
    M = logits.numel() // logits.shape[-1]
    return nbytes(logits) + 8 * M * top_k, (6 + top_k) * logits.numel()


_SPACE = tuple({"BLOCK_M": m, "num_warps": w} for m in (1, 2, 4, 8, 16) for w in (1, 2, 4))

OP = Op("routing", routing, routing_ref, _SPACE, _default, _inputs, _cost)
