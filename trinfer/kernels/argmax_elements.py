"""Element functions that find the largest entries of rows which several programs share."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rank(y, index, mask):
    """float32 y and its index as one int64 in the order of torch.argmax; 0, below all others, where masked.

    Upper 32 bits: y, nan above inf. Lower 31 bits: the index, so that the lowest of equal entries wins.
    """
    # -0.0 equals 0.0
    bits = tl.where(y == 0.0, 0.0, y).to(tl.int32, bitcast=True).to(tl.int64)
    order = tl.where(bits < 0, 0x7FFFFFFF - (bits & 0x7FFFFFFF), bits + 0x80000000)
    order = tl.where(y != y, 0xFFFFFFFF, order)
    return tl.where(mask, order * 0x80000000 + (0x7FFFFFFF - index), 0)


@triton.jit
def finish_argmax(best_ptr, ticket_ptr, token_ptr, M, programs, BLOCK_M: tl.constexpr):
    """Tokens of M rows, stored by the last of `programs` that have added their ranks to best_ptr.

    Leaves zeros behind, which is what the next launch starts from.
    """
    tl.debug_barrier()
    ticket = tl.atomic_add(ticket_ptr, 1, sem="acq_rel")
    if ticket == programs - 1:
        offs_m = tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        best = tl.load(best_ptr + offs_m, mask=mask_m, other=0, cache_modifier=".cg")
        tl.store(token_ptr + offs_m, 0x7FFFFFFF - (best & 0x7FFFFFFF), mask=mask_m)
        tl.store(best_ptr + offs_m, best * 0, mask=mask_m)
        tl.store(ticket_ptr, ticket * 0)


def argmax_memory(x: Tensor, scratch: Tensor | None, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Memory (scratch, tokens) for the rows of x: what was passed, if it fits, or new."""
    shape = x.shape[:-1]
    size = 2 * shape.numel()
    if scratch is None:
        scratch = torch.zeros(size, dtype=torch.int64, device=x.device)
    elif scratch.numel() < size or not _is_plain(scratch, x):
        raise ValueError(
            f"scratch is {_text(scratch)} - allowed: {size} or more entries of torch.int64 on {x.device}, "
            f"contiguous - make it with torch.zeros({size}, dtype=torch.int64, device=...)"
        )
    if out is None:
        out = x.new_empty(shape, dtype=torch.int64)
    elif out.shape != shape or not _is_plain(out, x):
        raise ValueError(
            f"out is {_text(out)} - allowed: {tuple(shape)} torch.int64 on {x.device}, contiguous - "
            f"make it with torch.empty({tuple(shape)}, dtype=torch.int64, device=...)"
        )
    return scratch, out


def _is_plain(memory: Tensor, x: Tensor) -> bool:
    return memory.dtype == torch.int64 and memory.device == x.device and memory.is_contiguous()


def _text(memory: Tensor) -> str:
    return f"{tuple(memory.shape)} {memory.dtype} on {memory.device}"
