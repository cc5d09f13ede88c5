"""What passes from one decode step to the next: the chosen tokens, who has finished, and every length."""

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
    E: int


# a workspace is cut into slices for any batch, and each call ends on tokens of its own: neither may recompile
@triton.jit(
    do_not_specialize=["S", "E", "stride_sb", "pad"],
    do_not_specialize_on_alignment=[
        "eos_ptr",
        "token_ptr",
        "finished_ptr",
        "kv_range_ptr",
        "sequence_cache_ptr",
        "length_ptr",
    ],
)
def _advance_kernel(
    eos_ptr,
    token_ptr,
    finished_ptr,
    kv_range_ptr,
    sequence_cache_ptr,
    length_ptr,
    S,
    E,
    stride_sb,
    pad,
    BLOCK_E: tl.constexpr,
):
    """One program per sequence."""
    pid_b = tl.program_id(0).to(tl.int64)
    is_finished = tl.load(finished_ptr + pid_b) != 0
    token = tl.where(is_finished, pad, tl.load(token_ptr + pid_b))
    length = tl.load(length_ptr + pid_b)
    end_ptr = kv_range_ptr + 2 * pid_b + 1
    end = tl.load(end_ptr)
    sequence_cache_ptr += pid_b * stride_sb
    # the last token of a generation may have no column any more
    tl.store(sequence_cache_ptr + length.to(tl.int64), token, mask=(length >= 0) & (length < S))
    tl.store(token_ptr + pid_b, token)
    tl.store(length_ptr + pid_b, length + 1)
    tl.store(end_ptr, end + 1)
    if eos_ptr is not None:
        offs_e = tl.arange(0, BLOCK_E)
        mask_e = offs_e < E
        eos = tl.load(eos_ptr + offs_e, mask=mask_e, other=0)
        is_eos = tl.sum((mask_e & (eos == token)).to(tl.int32), 0) > 0
        tl.store(finished_ptr + pid_b, (is_finished | is_eos).to(tl.uint8))


@launcher
def advance(
    token: Tensor,
    finished: Tensor,
    kv_range: Tensor,
    sequences: Tensor,
    length: Tensor,
    eos: Tensor | None = None,
    *,
    pad: int = 0,
) -> Tensor:
    """token = pad where finished; it is appended to its sequence, and an end of sequence finishes that.

    Everything is changed in place, at the start of a step, with the token that the step before has chosen.

    Args:
        token: [B] int64, the choice; becomes what the step embeds.
        finished: [B] bool|uint8; true from the step on that an entry of eos is chosen.
        kv_range: [B, 2] int32, first and one past the last valid key; the end advances by one.
        sequences: [B, S] int64, rows contiguous; takes the token at column `length`, if there is one.
        length: [B] int32|int64, the columns that are taken in each row; advances by one.
        eos: [E] int64, the tokens that end a sequence; None: finished stays as it is.
        pad: what follows the end of a sequence.

    Returns:
        token.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit; eos without an entry.

    Numerics:
        Integers.
    """
    _check(token, finished, kv_range, sequences, length, eos)
    if not backend.runs_triton(token):
        return advance_ref(token, finished, kv_range, sequences, length, eos, pad=pad)
    B, S = sequences.shape
    if B:
        eos = eos if eos is None else eos.contiguous()
        E = 0 if eos is None else len(eos)
        config = choose(OP, _Key(next_power_of_2(E)))
        launched("advance")
        memory = (eos, token, finished.view(torch.uint8), kv_range, sequences, length)
        launch(_advance_kernel, (B,))(*memory, S, E, sequences.stride(0), pad, **config)
    return token


def _check(
    token: Tensor,
    finished: Tensor,
    kv_range: Tensor,
    sequences: Tensor,
    length: Tensor,
    eos: Tensor | None,
) -> None:
    B = token.numel()
    rules: tuple[tuple[str, Tensor, tuple[int, ...], tuple[torch.dtype, ...]], ...] = (
        ("token", token, (B,), (torch.int64,)),
        ("finished", finished, (B,), (torch.bool, torch.uint8)),
        ("kv_range", kv_range, (B, 2), (torch.int32,)),
        ("length", length, (B,), (torch.int32, torch.int64)),
    )
    for name, value, shape, dtypes in rules:
        if value.shape != shape or value.dtype not in dtypes or not value.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(value.shape)} {value.dtype} with strides {value.stride()} - allowed: "
                f"{shape} {' or '.join(map(str, dtypes))}, contiguous - it is changed in place: make it so"
            )
    if sequences.shape[:-1] != (B,) or sequences.dtype != torch.int64 or sequences.stride(-1) != 1:
        raise ValueError(
            f"sequences are {tuple(sequences.shape)} {sequences.dtype} with strides {sequences.stride()} - "
            f"allowed: [{B}, S] torch.int64 with contiguous rows - they are changed in place: make them so"
        )
    if eos is not None and (eos.dim() != 1 or eos.dtype != torch.int64 or len(eos) == 0):
        raise ValueError(
            f"eos is {tuple(eos.shape)} {eos.dtype} - allowed: [E] torch.int64 with 1 entry or more - "
            "pass None for sequences that nothing ends"
        )


def advance_ref(
    token: Tensor,
    finished: Tensor,
    kv_range: Tensor,
    sequences: Tensor,
    length: Tensor,
    eos: Tensor | None = None,
    *,
    pad: int = 0,
) -> Tensor:
    """The truth of `advance`; it changes the same memory."""
    token.masked_fill_(finished.bool(), pad)
    row = ((length >= 0) & (length < sequences.shape[1])).nonzero().flatten()
    sequences[row, length[row].long()] = token[row]
    if eos is not None:
        finished |= torch.isin(token, eos)
    kv_range[:, 1] += 1
    length += 1
    return token


def _default(key: _Key) -> Config:
    return {"BLOCK_E": max(16, key.E), "num_warps": 1, "num_stages": 1}


def _inputs(B: int, N: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {
        "token": torch.randint(9, (B,), device=device),
        "finished": torch.zeros(B, dtype=torch.bool, device=device),
        "kv_range": torch.zeros(B, 2, dtype=torch.int32, device=device),
        "sequences": torch.zeros(B, N, dtype=torch.int64, device=device),
        "length": torch.zeros(B, dtype=torch.int64, device=device),
        "eos": torch.arange(1, 3, device=device),
    }


def _cost(
    token: Tensor,
    finished: Tensor,
    kv_range: Tensor,
    sequences: Tensor,
    length: Tensor,
    eos: Tensor | None = None,
    **options: Any,
) -> tuple[int, int]:
    # every entry is read and written, of the sequences one a row is written
    moved = 2 * nbytes(token, finished, length) + nbytes(kv_range, token, eos)
    return moved, len(token) * (4 if eos is None else 4 + len(eos))


_SPACE = ({"num_warps": 1}, {"num_warps": 2})

OP = Op(
    "advance",
    advance,
    advance_ref,
    _SPACE,
    _default,
    _inputs,
    _cost,
    writes=("token", "finished", "kv_range", "sequences", "length"),
)
