"""Softmax over the last dimension."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, as_rows, nbytes, wide


class _Key(NamedTuple):
    dtype: torch.dtype
    N: int


@triton.jit
def _softmax_kernel(x_ptr, y_ptr, N, stride_xm, BLOCK_N: tl.constexpr, SPANS_N: tl.constexpr):
    """One program per row."""
    pid_m = tl.program_id(0).to(tl.int64)
    x_ptr += pid_m * stride_xm
    y_ptr += pid_m * N
    offs_n = tl.arange(0, BLOCK_N)
    if SPANS_N:
        mask_n = offs_n < N
        x = tl.load(x_ptr + offs_n, mask=mask_n, other=float("-inf")).to(tl.float32)
        m = tl.max(x, 0)
        # nothing is above -inf in a row of -inf only, and -inf - -inf is nan
        m = tl.where(m == float("-inf"), 0.0, m)
        # the mask says so again: a loop on a CPU ends where all that follows is 0
        p = tl.where(mask_n, tl.exp(x - m), 0.0)
        s = tl.sum(p, 0)
        y = p * (1.0 / tl.where(s == 0.0, 1.0, s))
        tl.store(y_ptr + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask_n)
    else:
        m_i = float("-inf")
        l_i = 0.0
        for n in range(0, N, BLOCK_N):
            x = tl.load(x_ptr + n + offs_n, mask=offs_n < N - n, other=float("-inf")).to(tl.float32)
            m_new = tl.maximum(m_i, tl.max(x, 0))
            m = tl.where(m_new == float("-inf"), 0.0, m_new)
            l_i = l_i * tl.exp(m_i - m) + tl.sum(tl.exp(x - m), 0)
            m_i = m_new
        m = tl.where(m_i == float("-inf"), 0.0, m_i)
        scale = 1.0 / tl.where(l_i == 0.0, 1.0, l_i)
        for n in range(0, N, BLOCK_N):
            mask_n = offs_n < N - n
            x = tl.load(x_ptr + n + offs_n, mask=mask_n, other=float("-inf")).to(tl.float32)
            y = tl.exp(x - m) * scale
            tl.store(y_ptr + n + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask_n)


@launcher
def softmax(x: Tensor) -> Tensor:
    """y = exp(x) / sum(exp(x)), over the last dimension.

    Args:
        x: [..., N] float16|bfloat16|float32, any strides; copied if its rows are not contiguous.

    Returns:
        y like x, contiguous; zeros for a row of -inf only.

    Numerics:
        In float32, relative to the largest entry of the row; rounded once.

    Source: https://arxiv.org/abs/1805.02867 (rows longer than a block)
    """
    if not backend.runs_triton(x):
        return softmax_ref(x)
    y = x.new_empty(x.shape)
    if y.numel():
        rows = as_rows(x)
        M, N = rows.shape
        config = choose(OP, _Key(x.dtype, N))
        launched("softmax")
        launch(_softmax_kernel, (M,))(rows, y, N, rows.stride(0), SPANS_N=config["BLOCK_N"] >= N, **config)
    return y


def softmax_ref(x: Tensor) -> Tensor:
    """The truth of `softmax`."""
    masked = (x == float("-inf")).all(-1, keepdim=True)
    return x.to(wide(x)).softmax(-1).masked_fill(masked, 0).to(x.dtype)


def _default(key: _Key) -> Config:
    block = min(16384, max(16, triton.next_power_of_2(key.N)))
    return {"BLOCK_N": block, "num_warps": min(16, max(1, block // 512)), "num_stages": 1}


def _inputs(M: int, N: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {"x": torch.randn(M, N, dtype=dtype, device=device)}


def _cost(x: Tensor) -> tuple[int, int]:
    return nbytes(x, x), 5 * x.numel()


_SPACE = (
    *({"num_warps": w} for w in (1, 2, 4, 8, 16)),
    *({"BLOCK_N": n, "num_warps": w} for n in (2048, 4096, 8192) for w in (4, 8, 16)),
)

OP = Op("softmax", softmax, softmax_ref, _SPACE, _default, _inputs, _cost)
