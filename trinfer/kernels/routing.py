"""Router of a mixture of experts: which experts a token goes to, and with what weights."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose, tuned
from trinfer.kernels.op import Op, as_rows, launched, nbytes, next_power_of_2, wide

SCORINGS = ("softmax", "softmax_topk", "sigmoid")


class _Key(NamedTuple):
    E: int
    top_k: int


@triton.jit
def _keys(score, offs_e, mask_e, BLOCK_E: tl.constexpr):
    """int64 that sorts as (score, -position): equal scores differ, -0 equals 0, masked experts are last."""
    bits = score.to(tl.int32, bitcast=True)
    # -0.0; on its bits, because a compiler may take floating point for blind to that sign
    bits = tl.where(bits == -2147483648, 0, bits)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = bits.to(tl.int64) * 4294967296 + (BLOCK_E - 1 - offs_e)
    return tl.where(mask_e, key, -9223372036854775808)


@triton.jit
def _keep_best_groups(
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
    leader = _keys(value, offs_e, (offs_e % (E // NUM_GROUPS) == 0) & (offs_e < E), BLOCK_E)
    for _ in range(KEPT):
        best = tl.max(leader, 1)[:, None]
        at = (BLOCK_E - 1 - (best & 0xFFFFFFFF)).to(tl.int32)
        picked = picked | (group == at // (E // NUM_GROUPS))
        leader = tl.where(offs_e == at, -9223372036854775808, leader)
    return tl.where(picked, key, -9223372036854775808)


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
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    mask_m = offs_m < M - first
    mask_e = offs_e < E
    ptrs = logits_ptr + first * stride_lm + offs_m * stride_lm + offs_e
    score = tl.load(ptrs, mask=mask_m & mask_e, other=0.0).to(tl.float32)
    if SCORING == "softmax":
        top = tl.max(tl.where(mask_e, score, float("-inf")), 1)[:, None]
        score = tl.where(mask_e, tl.exp(score - top), 0.0)
        score /= tl.sum(score, 1)[:, None]
    elif SCORING == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-score))
    choice = score
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + offs_e, mask=mask_e, other=0.0).to(tl.float32)
    key = _keys(choice, offs_e, mask_e, BLOCK_E)
    if NUM_GROUPS > 1:
        key = _keep_best_groups(key, choice, offs_e, E, NUM_GROUPS, KEPT_GROUPS, GROUP_BEST, BLOCK_E)

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
    offs = first * TOP_K + (offs_m * TOP_K + offs_k)
    tl.store(ids_ptr + offs, ids, mask=mask_m & mask_k)
    tl.store(weights_ptr + offs, weights * scale, mask=mask_m & mask_k)


@tuned
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
    _check(E, top_k, bias, scoring, num_groups, kept_groups, group_best)
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
    _routing_kernel[(-(-M // config["BLOCK_M"]),)](
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


def _check(
    E: int,
    top_k: int,
    bias: Tensor | None,
    scoring: str,
    num_groups: int,
    kept_groups: int,
    group_best: int,
) -> None:
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
