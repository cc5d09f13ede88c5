"""The (token, expert) pairs of a router in the order of experts, for products over all rows of one."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, nbytes, next_power_of_2


class _Key(NamedTuple):
    pairs: int
    E: int


# P is the number of pairs and changes from call to call: it must not recompile
@triton.jit(do_not_specialize=["P", "E"])
def _sort_by_expert_kernel(ids_ptr, order_ptr, offsets_ptr, P, E, BLOCK_P: tl.constexpr):
    """One program per expert, and one for the pairs without expert: no program waits for another."""
    pid = tl.program_id(0)
    offs_p = tl.arange(0, BLOCK_P)
    before = tl.zeros([BLOCK_P], tl.int32)
    for p in range(0, P, BLOCK_P):
        mask = offs_p < P - p
        ids = tl.load(ids_ptr + p + offs_p, mask=mask, other=0)
        ids = tl.where((ids >= 0) & (ids < E), ids, E)
        before += (mask & (ids < pid)).to(tl.int32)
    at = tl.sum(before, 0)
    tl.store(offsets_ptr + pid, at)
    for p in range(0, P, BLOCK_P):
        mask = offs_p < P - p
        ids = tl.load(ids_ptr + p + offs_p, mask=mask, other=0)
        ids = tl.where((ids >= 0) & (ids < E), ids, E)
        mine = mask & (ids == pid)
        count = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order_ptr + at + count - 1, p + offs_p, mask=mine)
        at += tl.sum(mine.to(tl.int32), 0)


@launcher
def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """order = stable argsort of ids, offsets[e] = how many ids are smaller than e.

    Args:
        ids: int32 of any shape, as `routing` gives them: pair t · top_k + j is choice j of token t. An id
            that is no expert (one on another device, say) comes last.
        num_experts: E.

    Returns:
        (order [pairs] int32, offsets [E + 1] int32): expert e has the pairs
        order[offsets[e]:offsets[e + 1]], by token; behind order[:offsets[E]] come the pairs without expert.

    Raises:
        ValueError: ids are not int32, or num_experts is below 1.

    Numerics:
        Exact, and the same in every run: no atomics.

    Source: own; each expert reads all ids, which are few beside its weights
    """
    if ids.dtype != torch.int32 or num_experts < 1:
        raise ValueError(
            f"ids are {ids.dtype}, num_experts={num_experts} - allowed: torch.int32 and 1 or more - "
            "pass what routing gives"
        )
    if not backend.runs_triton(ids):
        return sort_by_expert_ref(ids, num_experts)
    P = ids.numel()
    order, offsets = ids.new_empty(P), ids.new_empty(num_experts + 1)
    if P == 0:
        return order, offsets.zero_()
    config = choose(OP, _Key(next_power_of_2(P), num_experts))
    launched("sort_by_expert")
    launch(_sort_by_expert_kernel, (num_experts + 1,))(
        ids.contiguous(), order, offsets, P, num_experts, **config
    )
    return order, offsets


def sort_by_expert_ref(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The truth of `sort_by_expert`."""
    flat = ids.flatten().long()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.bincount(flat, minlength=num_experts + 1)
    return flat.argsort(stable=True).int(), (counts.cumsum(0) - counts).int()


def _default(key: _Key) -> Config:
    return {"BLOCK_P": min(2048, max(64, key.pairs)), "num_warps": 4}


def _inputs(M: int, E: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    ids = torch.randint(E, (M, min(2, E)), dtype=torch.int32, device=device)
    return {"ids": ids, "num_experts": E}


def _cost(ids: Tensor, num_experts: int) -> tuple[int, int]:
    return 2 * nbytes(ids) + 4 * (num_experts + 1), 2 * ids.numel() * (num_experts + 1)


_SPACE = tuple({"BLOCK_P": p, "num_warps": w} for p in (256, 512, 1024, 2048, 4096) for w in (1, 2, 4, 8))

OP = Op("sort_by_expert", sort_by_expert, sort_by_expert_ref, _SPACE, _default, _inputs, _cost)
