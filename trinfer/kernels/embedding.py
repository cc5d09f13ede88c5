"""Look-up of token vectors."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.op import Op, launched, nbytes, wide


class _Key(NamedTuple):
    dtype: torch.dtype
    N: int


# slices of token ids start at any address: their alignment must not recompile
@triton.jit(do_not_specialize=["V"], do_not_specialize_on_alignment=["ids_ptr"])
def _embedding_kernel(
    ids_ptr, weight_ptr, y_ptr, V, N, stride_wv, scale, HAS_SCALE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One program per token."""
    pid_m = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + pid_m).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    # an id outside the table shows as nan, whatever lies in memory there
    width = tl.where((token >= 0) & (token < V), N, 0)
    y = tl.load(weight_ptr + token * stride_wv + offs_n, mask=offs_n < width, other=float("nan")).to(
        tl.float32
    )
    if HAS_SCALE:
        y *= scale
    tl.store(y_ptr + pid_m * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask_n)


def embedding(ids: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    """y = weight[ids] · scale.

    Args:
        ids: [...] int32|int64, any strides; copied if not contiguous.
        weight: [V, N] float16|bfloat16|float32, rows contiguous.
        scale: factor of every entry (Gemma).

    Returns:
        [..., N] in weight.dtype. An id outside 0..V-1 gives a row of nan, never foreign memory.

    Raises:
        ValueError: weight is not a matrix, or ids are not integers.

    Numerics:
        Exact for scale 1; else the product in float32, rounded once.
    """
    if weight.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"ids are {ids.dtype}, weight has shape {tuple(weight.shape)} - "
            "allowed: int32 or int64 ids, a matrix [V, N] - convert them"
        )
    if not backend.runs_triton(weight):
        return embedding_ref(ids, weight, scale=scale)
    V, N = weight.shape
    y = weight.new_empty((*ids.shape, N))
    M = ids.numel()
    if M:
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        config = choose(OP, _Key(weight.dtype, N))
        launched("embedding")
        _embedding_kernel[(M,)](
            ids.contiguous(), weight, y, V, N, weight.stride(0), float(scale), scale != 1.0, **config
        )
    return y


def embedding_ref(ids: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    """The truth of `embedding`."""
    is_valid = (ids >= 0) & (ids < weight.shape[0])
    y = weight[ids.masked_fill(~is_valid, 0)]
    y = y if scale == 1.0 else (y.to(wide(y)) * scale).to(y.dtype)
    return y.masked_fill(~is_valid[..., None], float("nan"))


def _default(key: _Key) -> Config:
    block = max(16, triton.next_power_of_2(key.N))
    return {"BLOCK_N": block, "num_warps": min(8, max(1, block // 512)), "num_stages": 1}


def _inputs(M: int, V: int, N: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {
        "ids": torch.randint(V, (M,), device=device),
        "weight": torch.randn(V, N, dtype=dtype, device=device),
    }


def _cost(ids: Tensor, weight: Tensor, **options: Any) -> tuple[int, int]:
    entries = ids.numel() * weight.shape[1]
    return nbytes(ids) + 2 * entries * weight.element_size(), entries


_SPACE = tuple({"num_warps": w} for w in (1, 2, 4, 8))

OP = Op("embedding", embedding, embedding_ref, _SPACE, _default, _inputs, _cost)
