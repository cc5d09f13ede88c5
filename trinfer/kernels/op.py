"""The record that describes an op to tests, benchmarks, tuner and compile gate; what launchers share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trinfer.autotune import Config


@dataclass(frozen=True, eq=False)
class Op:
    """A mathematical function: its launcher, its PyTorch truth, and how to configure, feed and price it.

    `default(key)` is a whole launch configuration; each entry of `space` overrides parts of it.
    `inputs(**sizes)` builds random arguments, `cost(**arguments)` gives the bytes moved and the operations;
    `writes` names those arguments that the launcher changes in place.
    `revision` rises when a configuration comes to mean something else: measured rows are void then.
    """

    name: str
    launcher: Callable[..., Any]
    ref: Callable[..., Any]
    space: tuple[Config, ...]
    default: Callable[[Any], Config]
    inputs: Callable[..., dict[str, Any]]
    cost: Callable[..., tuple[int, int]]
    writes: tuple[str, ...] = ()
    revision: int = 1


def unit_stride(x: Tensor) -> Tensor:
    """`x` itself if its last dimension is contiguous in memory, else a contiguous copy."""
    return x if x.stride()[-1] == 1 or x.shape[-1] == 1 else x.contiguous()


def unit_strides(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """`unit_stride` of each tensor that is there."""
    return tuple([None if t is None else unit_stride(t) for t in tensors])


def as_rows(x: Tensor) -> Tensor:
    """`x` as a matrix [M, N] of rows with unit stride: a view where the strides allow it, else a copy."""
    if x.dim() != 2:
        x = x.flatten(0, -2) if x.dim() > 2 else x[None]
    return x if x.stride(-1) == 1 else x.contiguous()


def output(
    out: Tensor | None, x: Tensor, N: int, read: tuple[Tensor | None, ...], residual: Tensor | None = None
) -> Tensor:
    """`out`, or new memory, for a result [..., N] of the rows of x.

    Refuses an `out` of another shape, dtype, device or layout, and one that overlaps what programs still read
    while others write: the tensors of `read`, and `residual` unless it is the same memory entry by entry.
    """
    if out is not None and residual is not None:
        is_same = residual.data_ptr() == out.data_ptr() and residual.is_contiguous()
        read = read if is_same else (*read, residual)
    return output_of((*x.shape[:-1], N), out, x, read)


def output_of(
    shape: tuple[int, ...],
    out: Tensor | None,
    x: Tensor,
    read: tuple[Tensor | None, ...],
    dtype: torch.dtype | None = None,
    name: str = "out",
) -> Tensor:
    """`out`, or new memory of `shape` like x; refuses what `output` refuses, without a residual."""
    dtype = x.dtype if dtype is None else dtype
    if out is None:
        return x.new_empty(shape, dtype=dtype)
    if out.shape != shape or out.dtype != dtype or out.device != x.device or not out.is_contiguous():
        raise ValueError(
            f"{name} is {tuple(out.shape)} {out.dtype} on {out.device} with strides {out.stride()} - "
            f"allowed: {shape} {dtype} on {x.device}, contiguous - "
            f"make it with x.new_empty({shape}, dtype={dtype})"
        )
    if any(t is not None and _overlap(out, t) for t in read):
        raise ValueError(
            f"{name} shares memory with an argument - allowed: memory of its own, or the residual itself - "
            "pass another tensor"
        )
    return out


def rows_output(out: Tensor | None, x: Tensor, read: tuple[Tensor | None, ...]) -> Tensor:
    """`out`, or new memory, for a result like x whose rows may lie at any distance.

    Refuses an `out` that is not like x or has rows with gaps, and one that overlaps a tensor of `read` other
    than entry by entry.
    """
    if out is None:
        return x.new_empty(x.shape)
    rows = as_rows(out) if out.stride(-1) == 1 else out.contiguous()
    overlaps = len(rows) > 1 and rows.stride(0) < rows.shape[1]
    if out.shape != x.shape or out.dtype != x.dtype or rows.data_ptr() != out.data_ptr() or overlaps:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} with strides {out.stride()} - allowed: {tuple(x.shape)} "
            f"{x.dtype}, rows without gaps at one distance - make it with torch.empty_like(x)"
        )
    place = out.data_ptr(), out.stride()
    if any(t is not None and (t.data_ptr(), t.stride()) != place and _overlap(out, t) for t in read):
        raise ValueError(
            "out shares memory with an argument - allowed: memory of its own, or that of an argument, entry "
            "by entry - pass another tensor"
        )
    return out


def _overlap(a: Tensor, b: Tensor) -> bool:
    """True if the addresses of two tensors, gaps included, overlap."""
    (first_a, last_a), (first_b, last_b) = _addresses(a), _addresses(b)
    return first_a < last_b and first_b < last_a


def _addresses(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + spanned(x)


def spanned(x: Tensor) -> int:
    """Bytes from the first entry of a tensor to the end of its last, gaps included."""
    if x.numel() == 0:
        return 0
    return (
        sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
    ) * x.element_size()


def as_bias(bias: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """The bias of attention with strides for [B, H, M, N] and a contiguous last dimension; bool as uint8."""
    if bias is None:
        return None
    bias = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
    return unit_stride(bias.expand(shape))


def strides_of(x: Tensor | None, dims: int) -> tuple[int | None, ...]:
    """The first `dims` strides of a tensor that may be missing."""
    return (None,) * dims if x is None else x.stride()[:dims]


def cpu_columns(dtype: torch.dtype, has_tile_registers: bool) -> int:
    """Columns of a tile of a product of many rows on a CPU, with tile registers (AMX) or without.

    Timed with them, 512 x 1536 x 576: bfloat16 takes 1.7 ms with 32 columns, 2.3 ms with 64. Without, 32 take
    1.05 times as long as 64, in both types.
    """
    return 32 if dtype == torch.bfloat16 and has_tile_registers else 64


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is not below n; Triton's own function costs a launch over a microsecond."""
    return 1 << (n - 1).bit_length() if n else 1


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of all given tensors together."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def wide(x: Tensor) -> torch.dtype:
    """The dtype a reference computes in: float64 for float64 inputs (tests), else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
