"""Products of few rows with the weights of their experts, without sorting, with epilogue or combination."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.elements import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    activate,
    as_experts,
    check_act,
    experts_ref,
    gate_up,
)
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, as_rows, nbytes, wide

MAX_PAIRS = 64


class _Key(NamedTuple):
    dtype: torch.dtype
    N: int
    K: int
    is_transposed: bool
    combines: bool


@triton.jit
def _row_product(
    x_ptr,
    w_ptr,
    b_ptr,
    N,
    K,
    stride_wn,
    stride_wk,
    IS_TRANSPOSED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x · wᵀ + b for one row x and the first BLOCK_N of N rows of w, [BLOCK_N] float32."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    if IS_TRANSPOSED:
        # the weight is stored [K, N]: walk it in memory order
        y = tl.zeros([BLOCK_N], dtype=tl.float32)
        w_ptrs = w_ptr + offs_k[:, None] * stride_wk + offs_n[None, :] * stride_wn
        for k in range(0, K, BLOCK_K):
            mask_k = offs_k < K - k
            x = tl.load(x_ptr + k + offs_k, mask=mask_k, other=0.0).to(tl.float32)
            w = tl.load(w_ptrs, mask=mask_k[:, None] & (offs_n[None, :] < N), other=0.0).to(tl.float32)
            y += tl.sum(w * x[:, None], 0)
            w_ptrs += BLOCK_K * stride_wk
    else:
        # summed once, after the loop: a reduction across threads costs more than the loads it waits for
        partial = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        w_ptrs = w_ptr + offs_n[:, None] * stride_wn + offs_k[None, :] * stride_wk
        for k in range(0, K, BLOCK_K):
            mask_k = offs_k < K - k
            x = tl.load(x_ptr + k + offs_k, mask=mask_k, other=0.0).to(tl.float32)
            w = tl.load(w_ptrs, mask=(offs_n[:, None] < N) & mask_k[None, :], other=0.0).to(tl.float32)
            partial += w * x[None, :]
            w_ptrs += BLOCK_K * stride_wk
        y = tl.sum(partial, 1)
    if b_ptr is not None:
        y += tl.load(b_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize=["E"])
def _grouped_gemv_kernel(
    x_ptr,
    w_ptr,
    u_ptr,
    b_ptr,
    c_ptr,
    ids_ptr,
    combine_ptr,
    residual_ptr,
    y_ptr,
    N,
    K,
    E,
    stride_xm,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    ACT: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per (BLOCK_N outputs, pair), or (BLOCK_N outputs, token) if it combines pairs."""
    first = tl.program_id(0) * BLOCK_N
    row = tl.program_id(1).to(tl.int64)
    rest = N - first
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < rest
    column = first.to(tl.int64) * stride_wn
    y_offs = row * N + first + offs_n
    y = tl.zeros([BLOCK_N], dtype=tl.float32)
    pairs = 1 if combine_ptr is None else TOP_K
    for j in range(pairs):
        pair = row * pairs + j
        e = tl.load(ids_ptr + pair).to(tl.int64)
        # a pair without expert adds nothing
        is_there = (e >= 0) & (e < E)
        e = tl.where(is_there, e, 0)
        rows = tl.where(is_there, rest, 0)
        inner = tl.where(is_there, K, 0)
        x_row = pair if combine_ptr is not None else row // TOP_K
        base_ptr = x_ptr + x_row * stride_xm
        bias_ptr = None if b_ptr is None else b_ptr + e * stride_be + first
        offset = e * stride_we + column
        part = _row_product(
            base_ptr,
            w_ptr + offset,
            bias_ptr,
            rows,
            inner,
            stride_wn,
            stride_wk,
            IS_TRANSPOSED,
            BLOCK_N,
            BLOCK_K,
        )
        if u_ptr is not None:
            bias_ptr = None if c_ptr is None else c_ptr + e * stride_be + first
            up = _row_product(
                base_ptr,
                u_ptr + offset,
                bias_ptr,
                rows,
                inner,
                stride_wn,
                stride_wk,
                IS_TRANSPOSED,
                BLOCK_N,
                BLOCK_K,
            )
            part = gate_up(part, up, ACT)
        else:
            part = activate(part, ACT)
        if combine_ptr is not None:
            part *= tl.load(combine_ptr + pair)
        y += part
    if residual_ptr is not None:
        y += tl.load(residual_ptr + y_offs, mask=mask_n, other=0.0).to(tl.float32)
    tl.store(y_ptr + y_offs, y.to(y_ptr.dtype.element_ty), mask=mask_n)


@launcher
def grouped_gemv(
    x: Tensor,
    weight: Tensor | tuple[Tensor, Tensor],
    ids: Tensor,
    bias: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    *,
    act: str = "none",
    gated: bool = False,
    combine: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """y_p = act(x_t · weight_eᵀ + bias_e) for each pair p of a token t and an expert e = ids_p.

    With `combine`: y_t = Σ_p of t combine_p · act(x_p · weight_eᵀ + bias_e) + residual_t.

    Args:
        x: [T, K] float16|bfloat16|float32, any strides; with combine [T · top_k, K], a row a pair.
        weight: [E, N, K] with any strides, or (gate, up) of equal shape and strides (see `grouped_matmul`).
        ids: [T, top_k] int32, the expert of each pair, at most 64 in all; what is no expert adds nothing.
        bias: [E, N], or (gate, up) of those.
        act: none, gelu, gelu_tanh, relu, relu2 or silu.
        gated: act(x · gateᵀ + bias_0) · (x · upᵀ + bias_1); here act may be swiglu_clamped, of gate and up
            both: gate' · sigmoid(1.702 gate') · (up' + 1), gate' at most 7 and up' within ±7 (gpt-oss).
        combine: [T, top_k] float32, the weights of the router.
        residual: [T, N], added last; with combine only.

    Returns:
        [T · top_k, N] in x.dtype, or [T, N] with combine.

    Raises:
        ValueError: more than 64 pairs, shapes, dtypes or strides that do not fit together, unknown act.

    Numerics:
        Products, sums, also those over a token's experts, and the epilogue in float32, in a fixed order,
        one rounding at the end.
    """
    check_act(act, GATED_ACTIVATIONS if gated else ACTIVATIONS)
    weights, biases = as_experts(x, weight, bias, gated)
    _check(x, ids, combine, residual, weights[0].shape[1])
    if not backend.runs_triton(x):
        return grouped_gemv_ref(
            x, weight, ids, bias, act=act, gated=gated, combine=combine, residual=residual
        )
    (E, N, K), (T, top_k), x = weights[0].shape, ids.shape, as_rows(x)
    y = x.new_empty(ids.numel() if combine is None else T, N)
    if y.numel() == 0:
        return y
    stride_wn, stride_wk = weights[0].stride()[1:]
    is_transposed = stride_wn < stride_wk
    config = choose(OP, _Key(x.dtype, N, K, is_transposed, combine is not None))
    pointers = (x, weights[0], weights[1] if gated else None, biases[0], biases[1] if gated else None)
    stride_be = biases[0].stride(0) if biases[0] is not None else 0
    launched("grouped_gemv")
    launch(_grouped_gemv_kernel, (-(-N // config["BLOCK_N"]), len(y)))(
        *pointers, ids.contiguous(), None if combine is None else combine.contiguous(),
        None if residual is None else residual.contiguous(), y, N, K, E, x.stride(0), *weights[0].stride(),
        stride_be, act, top_k, is_transposed, **config,
    )  # fmt: skip
    return y


def grouped_gemv_ref(
    x: Tensor,
    weight: Tensor | tuple[Tensor, Tensor],
    ids: Tensor,
    bias: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    *,
    act: str = "none",
    gated: bool = False,
    combine: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The truth of `grouped_gemv`."""
    rows = x.repeat_interleave(ids.shape[1], 0) if combine is None else x
    y = experts_ref(rows, ids.flatten(), weight, bias, act, gated)
    if combine is None:
        return y
    y = (y.view(*ids.shape, y.shape[-1]).to(wide(x)) * combine[..., None]).sum(1)
    return (y if residual is None else y + residual).to(x.dtype)


def _check(x: Tensor, ids: Tensor, combine: Tensor | None, residual: Tensor | None, N: int) -> None:
    if ids.dtype != torch.int32 or ids.dim() != 2 or ids.numel() > MAX_PAIRS:
        raise ValueError(
            f"ids are {tuple(ids.shape)} {ids.dtype} - allowed: [T, top_k] torch.int32, up to {MAX_PAIRS} of "
            "them - call sort_by_expert and grouped_matmul for more"
        )
    rows = ids.shape[0] if combine is None else ids.numel()
    if x.dim() != 2 or len(x) != rows:
        raise ValueError(
            f"x is {tuple(x.shape)} - allowed: {rows} rows, one a {'token' if combine is None else 'pair'} - "
            "flatten it"
        )
    if combine is not None and (combine.shape != ids.shape or not combine.is_floating_point()):
        raise ValueError(
            f"combine is {tuple(combine.shape)} {combine.dtype} - allowed: {tuple(ids.shape)} "
            "torch.float32 - pass the weights that routing gives"
        )
    shape = (len(ids), N)
    if residual is not None and (combine is None or residual.shape != shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual is {tuple(residual.shape)} {residual.dtype} - allowed: {shape} {x.dtype} together "
            "with combine - expand or convert it"
        )


def _default(key: _Key) -> Config:
    if backend.kind() != "gpu":
        if key.is_transposed:
            return _config(64, 16)
        # between what bench.tune finds for 576 columns on Zen 5, 256, and on Zen 4, 64
        return _config(16, min(128, max(16, triton.next_power_of_2(key.K))))
    if key.is_transposed:
        return _config(64, 16)
    if key.K % 256:
        return _config(16, 64)
    return _config(4, 512)


def _config(BLOCK_N: int, BLOCK_K: int, num_warps: int = 4) -> Config:
    return {"BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "num_warps": num_warps}


def _inputs(M: int, N: int, K: int, E: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    weight = torch.randn(E, N, K, device=device) / K**0.5
    return {
        "x": torch.randn(M, K, dtype=dtype, device=device),
        "weight": weight.to(dtype),
        "ids": torch.randint(E, (M, 2), dtype=torch.int32, device=device),
    }


def _cost(x: Tensor, weight: Any, ids: Tensor, *args: Any, **options: Any) -> tuple[int, int]:
    weights = weight if isinstance(weight, tuple) else (weight,)
    E, N, K = weights[0].shape
    P = ids.numel()
    moved = nbytes(x, ids) + P * N * x.element_size() + min(E, P) * nbytes(*weights) // E
    return moved, 2 * len(weights) * P * N * K


_SPACE = tuple(_config(n, k, w) for n in (2, 4, 8, 16, 32) for k in (64, 256, 512, 1024) for w in (2, 4, 8))

OP = Op("grouped_gemv", grouped_gemv, grouped_gemv_ref, _SPACE, _default, _inputs, _cost)
