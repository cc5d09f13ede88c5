"""Layer normalisation, with an optional residual addition before it."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.norm_elements import check_norm
from trinfer.kernels.op import Op, as_rows, nbytes, rows_output, unit_strides, wide


class _Key(NamedTuple):
    dtype: torch.dtype
    N: int


@triton.jit
def _layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    add_ptr,
    y_ptr,
    h_ptr,
    N,
    stride_xm,
    stride_rm,
    stride_am,
    stride_ym,
    eps,
    WEIGHT_OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per row."""
    pid_m = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    x = tl.load(x_ptr + pid_m * stride_xm + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + pid_m * stride_rm + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        # the model's next residual addition reads h as it is stored, so the norm has to see the same rounding
        h = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + pid_m * N + offs_n, h, mask=mask_n)
        x = h.to(tl.float32)
    # two passes over registers: E[x²] - E[x]² cancels when the mean is large
    x = tl.where(mask_n, x - tl.sum(x, 0) / N, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32) + WEIGHT_OFFSET
    if bias_ptr is not None:
        y += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    if add_ptr is not None:
        # rounded as the tensor that a model adds
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
        y += tl.load(add_ptr + pid_m * stride_am + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    tl.store(y_ptr + pid_m * stride_ym + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask_n)


@launcher
def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """y = (x - mean(x)) / sqrt(var(x) + eps) · (weight + weight_offset) + bias + add, over the last.

    Args:
        x: [..., N] float16|bfloat16|float32, any strides; copied if its rows are not contiguous.
        weight: [N] float16|bfloat16|float32, or None for 1.
        bias: [N], or None for 0.
        eps: added inside the root.
        residual: like x; then h = x + residual, rounded to x.dtype, is what is normalised.
        weight_offset: 1.0 for models that store weight - 1 (Nemotron); of a weight that is there.
        add: like x; added to the norm, which is rounded to x.dtype first.
        out: like x, rows contiguous at any distance, takes y; may be x, residual or add itself.

    Returns:
        y like x, contiguous; with residual the pair (y, h); `out` in the place of y if given.

    Raises:
        ValueError: weight, bias, residual, add or out do not fit x, or N is above 65536.

    Numerics:
        Mean, then the squares of what is left, all in float32; one rounding at the end.

    Source: https://arxiv.org/abs/1607.06450
    """
    check_norm(x, weight, bias, residual, add)
    y = rows_output(out, x, (x, residual, add))
    if not backend.runs_triton(x):
        options: dict[str, Any] = {"weight_offset": weight_offset, "add": add, "out": y}
        return layer_norm_ref(x, weight, bias, eps, residual=residual, **options)
    rows = as_rows(x)
    M, N = rows.shape
    h, res = (None, None) if residual is None else (x.new_empty(x.shape), as_rows(residual))
    added = None if add is None else as_rows(add)
    if M:
        config = choose(OP, _Key(x.dtype, N))
        launched("layer_norm", rows, res, y, h)
        tensors = (rows, res, *unit_strides(weight, bias), added, y, h)
        strides = [N if t is None else t.stride(0) for t in (rows, res, added, as_rows(y))]
        launch(_layer_norm_kernel, (M,))(*tensors, N, *strides, eps, weight_offset, **config)
    return y if h is None else (y, h)


def layer_norm_ref(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The truth of `layer_norm`."""
    h = x if residual is None else x + residual
    n = h.to(wide(x))
    n = n - n.mean(-1, keepdim=True)
    y = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.to(wide(x)) + weight_offset)
    if bias is not None:
        y = y + bias
    y = y.to(x.dtype)
    y = y if add is None else y + add
    y = y if out is None else out.copy_(y)
    return y if residual is None else (y, h)


def _default(key: _Key) -> Config:
    block = max(16, triton.next_power_of_2(key.N))
    if block > 65536:
        raise ValueError(f"x has rows of {key.N} entries - allowed: up to 65536 - split the row")
    return {"BLOCK_N": block, "num_warps": min(16, max(1, block // 512)), "num_stages": 1}


def _inputs(M: int, N: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    x = torch.randn(2, M, N, dtype=dtype, device=device)
    weight, bias = torch.randn(2, N, dtype=dtype, device=device)
    return {"x": x[0], "weight": weight, "bias": bias, "eps": 1e-5, "residual": x[1]}


def _cost(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None, **options: Any
) -> tuple[int, int]:
    return nbytes(x, x, weight, bias, residual, residual), 7 * x.numel()


_SPACE = tuple({"num_warps": w} for w in (1, 2, 4, 8, 16))

OP = Op("layer_norm", layer_norm, layer_norm_ref, _SPACE, _default, _inputs, _cost)
