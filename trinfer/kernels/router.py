"""Router of few tokens: the logits of all experts and the choice between them, in one launch."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.elements import load_bias
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, nbytes, next_power_of_2, wide
from trinfer.kernels.routing_elements import check_routing, choose_experts, routing_rule_ref
from trinfer.kernels.row_elements import row_product

MAX_TOKENS = 16


class _Key(NamedTuple):
    dtype: torch.dtype
    E: int
    K: int
    top_k: int


# M is the number of tokens and changes from call to call: it must not recompile
@triton.jit(do_not_specialize=["M", "E"])
def _router_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    choice_ptr,
    logits_ptr,
    ids_ptr,
    weights_ptr,
    ticket_ptr,
    M,
    E,
    K,
    stride_wn,
    stride_wk,
    scale,
    SCORING: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program per BLOCK_N experts, all tokens; the last to come chooses, BLOCK_M tokens at a time."""
    first = tl.program_id(0) * BLOCK_N
    w_ptr += first.to(tl.int64) * stride_wn
    offs_n = first + tl.arange(0, BLOCK_N)
    for m in range(M):
        # fmt: off
        y = row_product(
            0.0, 0.0, x_ptr + m * K, None, None, w_ptr, E - first, K, stride_wn, stride_wk,
            "none", 0.0, False, BLOCK_N, BLOCK_K,
        )
        # fmt: on
        y += load_bias(b_ptr, None, None, 0, offs_n, E)
        tl.store(logits_ptr + m * E + offs_n, y.to(logits_ptr.dtype.element_ty), mask=offs_n < E)
    tl.debug_barrier()
    ticket = tl.atomic_add(ticket_ptr, 1, sem="acq_rel")
    if ticket == tl.num_programs(0) - 1:
        # the next launch takes its tickets from 0 again
        tl.store(ticket_ptr, ticket * 0)
        offs_e = tl.arange(0, BLOCK_E)[None, :]
        offs_t = tl.arange(0, BLOCK_T)[None, :]
        for start in range(0, M, BLOCK_M):
            offs_m = start + tl.arange(0, BLOCK_M)[:, None]
            mask = (offs_m < M) & (offs_e < E)
            # written by other programs: not from this one's first cache
            score = tl.load(logits_ptr + offs_m * E + offs_e, mask=mask, other=0.0, cache_modifier=".cg")
            # fmt: off
            ids, weights = choose_experts(
                score.to(tl.float32), choice_ptr, E, SCORING, RENORMALIZES, TOP_K, NUM_GROUPS, KEPT_GROUPS,
                GROUP_BEST, BLOCK_M, BLOCK_E, BLOCK_T,
            )
            # fmt: on
            offs = offs_m * TOP_K + offs_t
            mask_t = (offs_m < M) & (offs_t < TOP_K)
            tl.store(ids_ptr + offs, ids, mask=mask_t)
            tl.store(weights_ptr + offs, weights * scale, mask=mask_t)


@launcher
def router(
    x: Tensor,
    weight: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    choice_bias: Tensor | None = None,
    *,
    is_wide: bool = False,
    scoring: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    num_groups: int = 1,
    kept_groups: int = 1,
    group_best: int = 2,
    ticket: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """logits = x · weightᵀ + bias; ids, weights = top_k of score(logits) + choice_bias.

    Args:
        x: [..., K] float16|bfloat16|float32 with at most 16 rows, any strides.
        weight: [E, K] in the dtype of x, any strides.
        top_k, scoring, renormalize, scale, num_groups, kept_groups, group_best: as in `routing`.
        bias: [E] in the dtype of x.
        choice_bias: [E] float32, added for the choice only.
        is_wide: logits are float32, and x, weight and bias may differ in dtype; else logits are rounded to
            the dtype of x before they are scored.
        ticket: int32 [1], zero before the first launch; every launch leaves zero. Made if it is missing.

    Returns:
        (logits [..., E]; ids [..., top_k] int32, largest score first; weights [..., top_k] float32).

    Raises:
        ValueError: more than 16 rows, shapes and dtypes that do not fit together, a rule that does not fit.

    Numerics:
        Products and sums in float32; the choice as in `routing`.

    Source: https://arxiv.org/abs/2401.04088, https://arxiv.org/abs/2412.19437
    """
    E, K = weight.shape
    check_routing(E, top_k, choice_bias, scoring, num_groups, kept_groups, group_best)
    _check(x, weight, bias, is_wide)
    rule = (scoring, renormalize, top_k, num_groups, kept_groups, group_best)
    if not backend.runs_triton(x):
        options: dict[str, Any] = {"scoring": scoring, "renormalize": renormalize, "scale": scale}
        options |= {"num_groups": num_groups, "kept_groups": kept_groups, "group_best": group_best}
        return router_ref(x, weight, top_k, bias, choice_bias, is_wide=is_wide, **options)
    shape, device = x.shape[:-1], x.device
    logits = torch.empty((*shape, E), dtype=torch.float32 if is_wide else x.dtype, device=device)
    ids = torch.empty((*shape, top_k), dtype=torch.int32, device=device)
    weights = torch.empty((*shape, top_k), dtype=torch.float32, device=device)
    M = x.numel() // K
    if M == 0:
        return logits, ids, weights
    ticket = torch.zeros(1, dtype=torch.int32, device=device) if ticket is None else ticket
    config = choose(OP, _Key(x.dtype, E, K, top_k))
    pointers = (x.contiguous(), weight, bias, choice_bias, logits, ids, weights, ticket)
    launched("router", *pointers)
    launch(_router_kernel, (-(-E // config["BLOCK_N"]),))(
        *pointers, M, E, K, *weight.stride(), scale, *rule, BLOCK_E=next_power_of_2(E),
        BLOCK_T=next_power_of_2(top_k), **config,
    )  # fmt: skip
    return logits, ids, weights


def router_ref(
    x: Tensor,
    weight: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    choice_bias: Tensor | None = None,
    *,
    is_wide: bool = False,
    scoring: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    num_groups: int = 1,
    kept_groups: int = 1,
    group_best: int = 2,
    ticket: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The truth of `router`."""
    if is_wide:
        x, weight, bias = (
            x.to(wide(x)),
            weight.to(wide(weight)),
            None if bias is None else bias.to(wide(bias)),
        )
    logits = torch.nn.functional.linear(x, weight, bias)
    rule = (scoring, renormalize, scale, num_groups, kept_groups, group_best)
    return logits, *routing_rule_ref(logits, top_k, choice_bias, *rule)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, is_wide: bool) -> None:
    (E, K), rows = weight.shape, x.shape[:-1].numel()
    dtypes = {x.dtype, weight.dtype, x.dtype if bias is None else bias.dtype}
    is_one = len(dtypes) == 1 or (is_wide and all(dtype.is_floating_point for dtype in dtypes))
    if x.shape[-1] != K or not is_one or rows > MAX_TOKENS or K == 0:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}, bias "
            f"{None if bias is None else bias.dtype} - allowed: up to {MAX_TOKENS} rows of {K}, in one dtype "
            "if not is_wide - use gemv or matmul, then routing, for more"
        )
    if bias is not None and bias.shape != (E,):
        raise ValueError(f"bias is {tuple(bias.shape)} - allowed: ({E},) - pass that of this router")


def _default(key: _Key) -> Config:
    if backend.kind() != "gpu":
        return {"BLOCK_M": 8, "BLOCK_N": 8, "BLOCK_K": 256, "num_warps": 1}
    # a program reads a few rows of weights, the last one holds the scores of a few tokens in registers
    tokens = max(1, min(8, 512 // triton.next_power_of_2(key.E)))
    # 512 columns of float32 spill on sm_90
    columns = 256 if key.dtype == torch.float32 else 512
    return {"BLOCK_M": tokens, "BLOCK_N": 2, "BLOCK_K": columns, "num_warps": 4}


def _inputs(M: int, E: int, K: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    x = torch.randn(M, K, dtype=dtype, device=device)
    return {"x": x, "weight": (torch.randn(E, K, device=device) / K**0.5).to(dtype), "top_k": min(2, E)}


def _cost(x: Tensor, weight: Tensor, top_k: int, *args: Any, **options: Any) -> tuple[int, int]:
    M, E = x.numel() // x.shape[-1], len(weight)
    return nbytes(x, weight) + M * (E * x.element_size() + 8 * top_k), 2 * M * weight.numel()


_SPACE = tuple(
    {"BLOCK_M": 4, "BLOCK_N": n, "BLOCK_K": k, "num_warps": w}
    for n in (1, 2, 4, 8)
    for k in (256, 512, 1024)
    for w in (2, 4)
)

OP = Op("router", router, router_ref, _SPACE, _default, _inputs, _cost)
