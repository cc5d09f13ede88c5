"""Normalisation of rows, alone or inside a product: its record, checks, element functions, PyTorch truth."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer.kernels.op import unit_strides


class Norm(NamedTuple):
    """What a product does with the rows of x before it multiplies: `rms_norm` or `layer_norm`.

    weight: [K], or None for 1 (layer). bias: [K] or None (layer). eps: added inside the root.
    kind: "rms" or "layer". weight_offset: added to the weight. cast: as in `rms_norm` (rms).
    """

    weight: Tensor | None
    bias: Tensor | None = None
    eps: float = 1e-6
    kind: str = "rms"
    weight_offset: float = 0.0
    cast: str = "input"

    @property
    def mode(self) -> str:
        """What the kernels call it: layer, rms_input or rms_float32."""
        return "layer" if self.kind == "layer" else f"rms_{self.cast}"


@triton.jit
def row_statistics(
    x_ptr, M, K, eps, stride_xm, NORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Means (zeros for rms) and reciprocal roots of the first M of BLOCK_M rows, [BLOCK_M] each."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m[:, None] < M
    x_ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_k[None, :]
    mean = tl.zeros([BLOCK_M], dtype=tl.float32)
    # summed once, after the loop: a reduction across threads costs more than the loads it waits for
    if NORM == "layer":
        sums = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            sums += tl.load(x_ptrs + k, mask=mask_m & (offs_k[None, :] < K - k), other=0.0).to(tl.float32)
        mean = tl.sum(sums, 1) / K
    squares = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        mask = mask_m & (offs_k[None, :] < K - k)
        x = tl.load(x_ptrs + k, mask=mask, other=0.0).to(tl.float32)
        if NORM == "layer":
            # two passes over the row: E[x²] - E[x]² cancels when the mean is large
            x = tl.where(mask, x - mean[:, None], 0.0)
        squares += x * x
    return mean, tl.rsqrt(tl.sum(squares, 1) / K + eps)


@triton.jit
def normalise(
    x,
    mean,
    rstd,
    weight_ptr,
    bias_ptr,
    offs_k,
    mask_k,
    NORM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Entries of rows as the norm's own kernel would store them in DTYPE."""
    x = x.to(tl.float32)
    if NORM == "layer":
        y = (x - mean) * rstd
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32) + WEIGHT_OFFSET
        if bias_ptr is not None:
            y += tl.load(bias_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    else:
        y = x * rstd
        if NORM == "rms_input":
            y = y.to(DTYPE).to(tl.float32)
        y *= tl.load(weight_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32) + WEIGHT_OFFSET
    return y.to(DTYPE)


@triton.jit
def normalise_row(
    row,
    weight_ptr,
    bias_ptr,
    offs_k,
    mask_k,
    K,
    eps,
    NORM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """A whole row in registers, 0 where masked, as the norm's own kernel would store it in DTYPE."""
    mean = 0.0
    centred = row
    if NORM == "layer":
        mean = tl.sum(row, 0) / K
        centred = tl.where(mask_k, row - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 0) / K + eps)
    return normalise(row, mean, rstd, weight_ptr, bias_ptr, offs_k, mask_k, NORM, WEIGHT_OFFSET, DTYPE)


def check_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    add: Tensor | None = None,
) -> None:
    """Refuse arguments of a normalisation that do not fit the rows of x."""
    N = x.shape[-1]
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.shape != (N,):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)} - allowed: ({N},), the last size of x - "
                f"pass the {name} of this norm"
            )
    for name, value in (("residual", residual), ("add", add)):
        if value is not None and (value.shape != x.shape or value.dtype != x.dtype):
            raise ValueError(
                f"{name} is {tuple(value.shape)} {value.dtype} - allowed: {tuple(x.shape)} {x.dtype}, "
                "as x is - expand or convert it"
            )


def check_cast(cast: str) -> None:
    """Refuse an unknown place of the rounding in `rms_norm`."""
    if cast not in ("input", "float32"):
        raise ValueError(f"cast={cast!r} is unknown - allowed: 'input', 'float32' - pass one of these")


def norm_options(x: Tensor, norm: Norm | None) -> tuple[tuple[Any, Any, float], tuple[str, float]]:
    """(weight, bias, eps) and (mode, weight_offset), which a kernel takes; refuses a norm unfit for x."""
    if norm is None:
        return (None, None, 0.0), ("none", 0.0)
    if norm.kind not in ("rms", "layer"):
        raise ValueError(f"norm.kind={norm.kind!r} is unknown - allowed: 'rms', 'layer' - pass one of these")
    if norm.kind == "rms" and (norm.weight is None or norm.bias is not None):
        raise ValueError(
            f"norm of kind 'rms' has {'no weight' if norm.weight is None else 'a bias'} - allowed: a weight "
            "and no bias - pass kind='layer' or change it"
        )
    if norm.kind == "layer" and (norm.cast != "input" or (norm.weight_offset and norm.weight is None)):
        raise ValueError(
            f"norm of kind 'layer' has weight_offset={norm.weight_offset}, cast={norm.cast!r} - allowed: an "
            "offset of a weight, no cast - pass kind='rms' or leave them out"
        )
    check_cast(norm.cast)
    check_norm(x, norm.weight, norm.bias)
    weight, bias = unit_strides(norm.weight, norm.bias)
    return (weight, bias, norm.eps), (norm.mode, norm.weight_offset)


def normalise_ref(x: Tensor, norm: Norm | None) -> Tensor:
    """The PyTorch truth of `normalise`: the rows of x, normalised, in x.dtype."""
    if norm is None:
        return x
    n = x if x.dtype == torch.float64 else x.float()
    if norm.kind == "layer":
        weight, bias = (None if v is None else v.to(n.dtype) for v in (norm.weight, norm.bias))
        weight = weight if weight is None else weight + norm.weight_offset
        return torch.nn.functional.layer_norm(n, n.shape[-1:], weight, bias, norm.eps).to(x.dtype)
    assert norm.weight is not None
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.cast == "input":
        n = n.to(x.dtype)
    weight = norm.weight if x.dtype == torch.float64 else norm.weight.float()
    return (n * (weight + norm.weight_offset)).to(x.dtype)
