"""Element functions of the choice of experts: scores, groups, the best of a row, and the rule's checks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer.kernels.op import wide

SCORINGS = ("softmax", "softmax_topk", "sigmoid")


@triton.jit
def sort_keys(score, offs_e, mask_e, BLOCK_E: tl.constexpr):
    """int64 that sorts as (score, -position): equal scores differ, -0 equals 0, masked experts are last."""
    bits = score.to(tl.int32, bitcast=True)
    # -0.0; on its bits, because a compiler may take floating point for blind to that sign
    bits = tl.where(bits == -2147483648, 0, bits)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = bits.to(tl.int64) * 4294967296 + (BLOCK_E - 1 - offs_e)
    return tl.where(mask_e, key, -9223372036854775808)


@triton.jit
def keep_best_groups(
    key,
    score,
    offs_e,
    E,
    NUM_GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """`key` without the experts outside of the KEPT groups whose best scores have the largest sums."""
    group = offs_e // (E // NUM_GROUPS)
    picked = tl.zeros_like(key).to(tl.int1)
    value = tl.zeros_like(score)
    for g in range(NUM_GROUPS):
        inside = tl.where(group == g, key, -9223372036854775808)
        first = tl.max(inside, 1)[:, None]
        inside = tl.where(inside == first, -9223372036854775808, inside)
        second = tl.max(inside, 1)[:, None]
        top = (key == first) | ((key == second) & (GROUP_BEST == 2))
        total = tl.sum(tl.where(top & (offs_e < E), score, 0.0), 1)[:, None]
        value = tl.where(group == g, total, value)
    # the first expert of a group stands for it, so that equal groups are taken in order
    leader = sort_keys(value, offs_e, (offs_e % (E // NUM_GROUPS) == 0) & (offs_e < E), BLOCK_E)
    for _ in range(KEPT):
        best = tl.max(leader, 1)[:, None]
        at = (BLOCK_E - 1 - (best & 0xFFFFFFFF)).to(tl.int32)
        picked = picked | (group == at // (E // NUM_GROUPS))
        leader = tl.where(offs_e == at, -9223372036854775808, leader)
    return tl.where(picked, key, -9223372036854775808)


@triton.jit
def choose_experts(
    score,
    bias_ptr,
    E,
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
    """Experts and weights [BLOCK_M, BLOCK_K] of tokens with logits `score` [BLOCK_M, BLOCK_E], float32."""
    offs_e = tl.arange(0, BLOCK_E)[None, :]
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    mask_e = offs_e < E
    if SCORING == "softmax":
        top = tl.max(tl.where(mask_e, score, float("-inf")), 1)[:, None]
        score = tl.where(mask_e, tl.exp(score - top), 0.0)
        score /= tl.sum(score, 1)[:, None]
    elif SCORING == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-score))
    choice = score
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + offs_e, mask=mask_e, other=0.0).to(tl.float32)
    key = sort_keys(choice, offs_e, mask_e, BLOCK_E)
    if NUM_GROUPS > 1:
        key = keep_best_groups(key, choice, offs_e, E, NUM_GROUPS, KEPT_GROUPS, GROUP_BEST, BLOCK_E)

    ids = tl.zeros([BLOCK_M, BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for k in range(TOP_K):
        best = tl.max(key, 1)[:, None]
        at = (BLOCK_E - 1 - (best & 0xFFFFFFFF)).to(tl.int32)
        ids = tl.where(offs_k == k, at, ids)
        weights = tl.where(offs_k == k, tl.sum(tl.where(offs_e == at, score, 0.0), 1)[:, None], weights)
        key = tl.where(offs_e == at, -9223372036854775808, key)
    mask_k = offs_k < TOP_K
    if SCORING == "softmax_topk":
        top = tl.max(tl.where(mask_k, weights, float("-inf")), 1)[:, None]
        weights = tl.where(mask_k, tl.exp(weights - top), 0.0)
        weights /= tl.sum(weights, 1)[:, None]
    if RENORMALIZES:
        weights /= tl.sum(tl.where(mask_k, weights, 0.0), 1)[:, None] + 1e-20
    return ids, weights


def routing_rule_ref(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None,
    scoring: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    kept_groups: int,
    group_best: int,
) -> tuple[Tensor, Tensor]:
    """The PyTorch truth of `choose_experts`, the weights scaled."""
    E, x = logits.shape[-1], logits.to(wide(logits))
    scores = x.softmax(-1) if scoring == "softmax" else x.sigmoid() if scoring == "sigmoid" else x
    choice = scores if bias is None else scores + bias
    if num_groups > 1:
        grouped = choice.unflatten(-1, (num_groups, -1))
        best = _first(grouped.topk(min(group_best, E // num_groups)).values.sum(-1), kept_groups)
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    ids = _first(choice, top_k)
    weights = scores.gather(-1, ids)
    if scoring == "softmax_topk":
        weights = weights.softmax(-1)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), (weights * scale).to(wide(logits))


def _first(scores: Tensor, count: int) -> Tensor:
    """Positions of the largest scores, of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def check_routing(
    E: int,
    top_k: int,
    bias: Tensor | None,
    scoring: str,
    num_groups: int,
    kept_groups: int,
    group_best: int,
) -> None:
    """Refuse a rule that does not fit E experts."""
    if scoring not in SCORINGS:
        raise ValueError(
            f"scoring={scoring!r} is not known - allowed: {', '.join(SCORINGS)} - pass one of these"
        )
    if num_groups < 1 or E % num_groups or not 1 <= kept_groups <= num_groups or group_best not in (1, 2):
        raise ValueError(
            f"num_groups={num_groups}, kept_groups={kept_groups} for {E} experts, group_best={group_best} - "
            "allowed: groups of equal size, of which at least one is kept, by its best one or two scores - "
            "take them from the model's config"
        )
    most = min(32, E // num_groups * kept_groups)
    if not 1 <= top_k <= most:
        raise ValueError(
            f"top_k={top_k} of {E} experts - allowed: 1 to {most} - take it from the model's config"
        )
    if bias is not None and (bias.shape != (E,) or bias.dtype != torch.float32):
        raise ValueError(
            f"bias is {tuple(bias.shape)} {bias.dtype} - allowed: ({E},) torch.float32 - convert it"
        )
