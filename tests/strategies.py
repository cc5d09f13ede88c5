"""What all property tests share: sizes, dtypes and memory layouts to draw, and one yardstick for results."""

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# (RMS error relative to the RMS of the truth, largest error relative to |truth| + its RMS); a 16-bit
# result may be rounded twice on its way, and 1 % is too much for every dtype
TOLERANCE = {
    torch.float32: (1e-5, 1e-4),
    torch.float16: (1e-3, 8e-3),
    torch.bfloat16: (6e-3, 6e-2),
}

dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**32 - 1)


def sizes(low: int, high: int) -> st.SearchStrategy[int]:
    """Sizes that break kernels: 1, primes, powers of two and their neighbours, and anything between."""
    edges = {1, 2, 3, 5, 7, 13, 31, 61, 127, 251, 509, 1021, 2039}
    edges |= {2**i + d for i in range(12) for d in (-1, 0, 1)}
    return st.sampled_from(sorted(n for n in edges if low <= n <= high)) | st.integers(low, high)


LAYOUTS = ("contiguous", "sliced", "transposed", "expanded")
layouts = st.sampled_from(LAYOUTS)


def make(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, layout: str = "contiguous", scale: float = 1.0
) -> Tensor:
    """Normal random numbers of `shape` in memory that is nan everywhere around and between them.

    A kernel that reads a lane it should have masked spreads that nan. Layouts: "contiguous"; "sliced", rows
    with a gap between them; "transposed", the first and last but one dimension swapped in memory; "expanded",
    stride 0 along the first dimension.
    """
    generator = torch.Generator().manual_seed(seed)
    if layout == "expanded" and len(shape) > 1:
        return make((1, *shape[1:]), dtype, seed, scale=scale).expand(shape)
    swap = layout == "transposed" and len(shape) > 2
    memory = list(shape)
    if swap:
        memory[0], memory[-2] = memory[-2], memory[0]
    gap = 16 if layout == "sliced" else 0
    padded = [*memory[:-1], memory[-1] + gap]
    margin = 64
    buffer = torch.full((math.prod(padded) + 2 * margin,), float("nan"), dtype=dtype)
    x = buffer[margin : margin + math.prod(padded)].view(padded)[..., : shape[-1]]
    x.copy_(torch.randn(memory, generator=generator) * scale)
    return x.transpose(0, -2) if swap else x


def make_weights(
    counts: tuple[int, ...], K: int, dtype: torch.dtype, seed: int, order: str = "rows"
) -> tuple[Tensor, ...]:
    """Weight segments [N_i, K], scaled so that products of `make` stay near 1.

    Orders: "rows", contiguous; "gaps", rows with a gap between them; "columns", stored [K, N] as Conv1D does,
    where all segments are slices of one tensor.
    """
    if order == "columns":
        return make((K, sum(counts)), dtype, seed, scale=K**-0.5).T.split(counts)
    layout = "sliced" if order == "gaps" else "contiguous"
    return tuple(make((N, K), dtype, seed + i, layout, scale=K**-0.5) for i, N in enumerate(counts))


def truth(ref: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The reference in float64, on inputs widened before it, so that nothing else is rounded."""

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        if isinstance(value, tuple):
            values = map(widen, value)
            return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
        return value

    return ref(*map(widen, args), **{name: widen(value) for name, value in kwargs.items()})


def assert_close(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str = "result", magnitude: float = 0.0
) -> None:
    """Assert that `actual` is of `dtype` and within its tolerance of `expected`, the truth in float64.

    `magnitude`: of the terms a result is a difference of, where a few small results may be all there are.
    """
    assert actual.dtype == dtype, f"{what} is {actual.dtype}, expected {dtype}"
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    a, e = actual.double(), expected.double()
    finite = e.isfinite()
    same = (a == e) | (a.isnan() & e.isnan())
    wild = torch.where(finite, ~a.isfinite(), ~same)
    error = torch.where(finite & ~wild, a - e, 0.0).abs()
    rms = torch.where(finite, e, 0.0).square().mean().sqrt().clamp_min(magnitude)
    tiny = torch.finfo(dtype).tiny
    rms_error = float(error.square().mean().sqrt() / (rms + tiny))
    relative = error / (torch.where(finite, e, 0.0).abs() + rms + tiny)
    rms_limit, max_limit = TOLERANCE[dtype]
    bad = wild | (relative > max_limit)
    if rms_error <= rms_limit and not bool(bad.any()):
        return
    worst = relative.masked_fill(wild, float("inf"))
    first = tuple((bad if bool(bad.any()) else worst == worst.max()).nonzero()[0].tolist())
    raise AssertionError(
        f"{what} {tuple(a.shape)} {dtype}: RMS error {rms_error:.3g} (limit {rms_limit:.3g}), "
        f"largest error {float(worst.max()):.3g} (limit {max_limit:.3g}), "
        f"{int(bad.sum())} of {a.numel()} entries beyond it; "
        f"first at {first}: {float(a[first]):.9g} instead of {float(e[first]):.9g}"
    )
