"""The keys of one query divided between programs, of which the last to come adds up what all have found."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SPLITS = 64


@triton.jit
def share_keys(lo, hi, pos, WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys of this split, and how many splits have any."""
    if WINDOW is not None:
        lo = tl.maximum(lo, pos + 1 - WINDOW)
    keys = tl.maximum(hi - lo, 0)
    used = 1
    if SPLITS > 1:
        blocks = tl.maximum(tl.cdiv(tl.cdiv(keys, SPLITS), BLOCK_N), 1)
        used = tl.maximum(tl.cdiv(keys, blocks * BLOCK_N), 1)
        lo += tl.program_id(1) * blocks * BLOCK_N
        hi = tl.minimum(hi, lo + blocks * BLOCK_N)
    return lo, hi, used


@triton.jit
def combine_splits(
    acc, l_i, m_i, partial_ptr, ticket_ptr, rows, mask_h, used, count, DV: tl.constexpr, SPLITS: tl.constexpr
):
    """Store what one split found; the program that comes last adds up what the used ones found."""
    offs_v = tl.arange(0, acc.shape[1])[None, :]
    mask = mask_h[:, None] & (offs_v < DV)
    # weighted values [count, SPLITS, DV], then sum and maximum [count, SPLITS, 2]
    split = tl.program_id(1)
    sums = partial_ptr + rows * (SPLITS * DV)
    pairs = partial_ptr + tl.cast(count, tl.int64) * (SPLITS * DV) + rows * (SPLITS * 2)
    tl.store(sums[:, None] + split * DV + offs_v, acc, mask=mask)
    tl.store(pairs + split * 2, l_i, mask=mask_h)
    tl.store(pairs + split * 2 + 1, m_i, mask=mask_h)
    tl.debug_barrier()
    is_last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        # the next launch takes its tickets from 0 again
        tl.store(ticket_ptr, 0)
        m_i = tl.full(m_i.shape, -1e20, dtype=tl.float32)
        l_i = tl.zeros_like(l_i)
        acc = tl.zeros_like(acc)
        for s in range(used):
            weight = tl.load(pairs + s * 2, mask=mask_h, other=0.0, cache_modifier=".cg")
            m = tl.load(pairs + s * 2 + 1, mask=mask_h, other=-1e20, cache_modifier=".cg")
            o = tl.load(sums[:, None] + s * DV + offs_v, mask=mask, other=0.0, cache_modifier=".cg")
            m_new = tl.maximum(m_i, m)
            alpha = tl.exp2(m_i - m_new)
            beta = tl.exp2(m - m_new)
            acc = acc * alpha[:, None] + o * beta[:, None]
            l_i = l_i * alpha + weight * beta
            m_i = m_new
    return acc, l_i, is_last


def split_scratch(
    B: int, H: int, Dv: int, splits: int = MAX_SPLITS, device: torch.device | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Memory in which the splits of a launch meet: (partial results, tickets); launches in a row share it."""
    if splits == 1:
        return None, None
    partials = torch.empty(B * H * splits * (Dv + 2), dtype=torch.float32, device=device)
    return partials, torch.zeros(B * H, dtype=torch.int32, device=device)


def as_scratch(
    scratch: tuple[Tensor | None, Tensor | None] | None, B: int, H: int, Dv: int, splits: int, x: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """`scratch`, refused if it is too small for a launch on the device of x, or a new one."""
    if scratch is None or splits == 1:
        return split_scratch(B, H, Dv, splits, x.device)
    sizes = [0 if part is None else part.numel() for part in scratch]
    least = [B * H * splits * (Dv + 2), B * H]
    if sizes[0] < least[0] or sizes[1] < least[1]:
        raise ValueError(
            f"scratch holds {sizes[0]} and {sizes[1]} entries - allowed: {least[0]} and {least[1]} or more "
            f"for {splits} splits - pass split_scratch({B}, {H}, {Dv})"
        )
    return scratch
