"""Weighted sum of what the experts of a token gave."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, nbytes, wide


class _Key(NamedTuple):
    dtype: torch.dtype
    N: int


@triton.jit
def _combine_experts_kernel(
    x_ptr, weights_ptr, residual_ptr, y_ptr, N, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One program per (token, BLOCK_N entries)."""
    pid_m = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    y = tl.zeros([BLOCK_N], dtype=tl.float32)
    for k in range(TOP_K):
        pair = pid_m * TOP_K + k
        x = tl.load(x_ptr + pair * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        y += x * tl.load(weights_ptr + pair)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + pid_m * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    tl.store(y_ptr + pid_m * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask_n)


@launcher
def combine_experts(x: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """y_t = sum over k of weights_tk · x_tk, + residual_t.

    Args:
        x: [T · top_k, N] float16|bfloat16|float32, a row a pair (token, expert), pairs of a token adjacent.
        weights: [T, top_k] float32, as `routing` gives them.
        residual: [T, N], added last: the output of a shared expert, say.

    Returns:
        [T, N] in x.dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit together.

    Numerics:
        In float32, in the order of k, rounded once.
    """
    T, top_k = weights.shape
    N = x.shape[-1]
    if x.shape != (T * top_k, N) or not weights.is_floating_point():
        raise ValueError(
            f"x is {tuple(x.shape)}, weights {tuple(weights.shape)} {weights.dtype} - allowed: "
            "[T · top_k, N] and [T, top_k] torch.float32 - pass one row a pair"
        )
    if residual is not None and (residual.shape != (T, N) or residual.dtype != x.dtype):
        raise ValueError(
            f"residual is {tuple(residual.shape)} {residual.dtype} - allowed: {(T, N)} {x.dtype}, "
            "as the result is - expand or convert it"
        )
    if not backend.runs_triton(x):
        return combine_experts_ref(x, weights, residual)
    y = x.new_empty(T, N)
    if y.numel() == 0:
        return y
    config = choose(OP, _Key(x.dtype, N))
    residual = residual if residual is None else residual.contiguous()
    launched("combine_experts")
    launch(_combine_experts_kernel, (T, -(-N // config["BLOCK_N"])))(
        x.contiguous(), weights.contiguous(), residual, y, N, top_k, **config
    )
    return y


def combine_experts_ref(x: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """The truth of `combine_experts`."""
    y = (x.view(*weights.shape, x.shape[-1]).to(wide(x)) * weights[..., None]).sum(1)
    return (y if residual is None else y + residual).to(x.dtype)


def _default(key: _Key) -> Config:
    return {"BLOCK_N": min(1024, max(16, triton.next_power_of_2(key.N))), "num_warps": 4}


def _inputs(M: int, N: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {
        "x": torch.randn(2 * M, N, dtype=dtype, device=device),
        "weights": torch.rand(M, 2, device=device),
    }


def _cost(x: Tensor, weights: Tensor, residual: Tensor | None = None) -> tuple[int, int]:
    written = nbytes(x) // max(1, weights.shape[1])
    return nbytes(x, weights, residual) + written, 2 * x.numel()


_SPACE = tuple({"BLOCK_N": n, "num_warps": w} for n in (256, 512, 1024, 2048) for w in (1, 2, 4, 8))

OP = Op("combine_experts", combine_experts, combine_experts_ref, _SPACE, _default, _inputs, _cost)
