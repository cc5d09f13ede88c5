"""Product of rows sorted by expert with the weights of their experts, with its epilogue."""

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
    dot,
    experts_ref,
    gate_up,
)
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, as_rows, cpu_columns, nbytes, next_power_of_2


class _Key(NamedTuple):
    dtype: torch.dtype
    rows: int
    N: int
    K: int
    gated: bool


@triton.jit
def _find_expert(offsets_ptr, tile, P, E, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first row, one past its last row) of a tile of rows; tiles do not cross experts.

    Rows without expert are those of "expert" E; a tile behind the last has no rows.
    """
    offs_e = tl.arange(0, BLOCK_E)
    start = tl.load(offsets_ptr + offs_e, mask=offs_e <= E, other=P)
    end = tl.load(offsets_ptr + offs_e + 1, mask=offs_e < E, other=P)
    end = tl.where(offs_e <= E, end, start)
    tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles, 0)
    e = tl.sum((last <= tile).to(tl.int32), 0)
    here = offs_e == e
    before = tl.sum(tl.where(offs_e < e, tiles, 0), 0)
    first = tl.sum(tl.where(here, start, 0), 0) + (tile - before) * BLOCK_M
    return e, first, tl.sum(tl.where(here, end, 0), 0)


@triton.jit
def _load_bias(b_ptr, e, E, offs_n, N, stride_be):
    """The biases of an expert in float32; zeros without biases or without expert."""
    bias = tl.zeros_like(offs_n).to(tl.float32)
    if b_ptr is not None:
        ptrs = b_ptr + e.to(tl.int64) * stride_be + offs_n
        bias += tl.load(ptrs, mask=offs_n < tl.where(e < E, N, 0), other=0.0).to(tl.float32)
    return bias


# P is the number of rows and changes from call to call: it must not recompile
@triton.jit(do_not_specialize=["P", "E"])
def _grouped_matmul_kernel(
    x_ptr,
    w_ptr,
    u_ptr,
    b_ptr,
    c_ptr,
    order_ptr,
    offsets_ptr,
    y_ptr,
    P,
    N,
    K,
    E,
    stride_xm,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    ACT: tl.constexpr,
    GATHERS: tl.constexpr,
    SCATTERS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One program per [BLOCK_M, BLOCK_N] tile of one expert; GATHERS: pairs per row of x, or 0."""
    # tiles of GROUP_M row blocks run column by column, so that programs in flight share weights in the cache
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    num_m = tl.num_programs(0) // num_n
    in_group = GROUP_M * num_n
    first_m = pid // in_group * GROUP_M
    group_m = min(num_m - first_m, GROUP_M)
    pid_m = first_m + pid % in_group % group_m
    first_n = pid % in_group // group_m * BLOCK_N

    e, row, end = _find_expert(offsets_ptr, pid_m, P, E, BLOCK_E, BLOCK_M)
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < end
    mask_n = offs_n < N - first_n
    x_row = offs_m
    y_row = offs_m
    if (GATHERS > 0) | SCATTERS:
        pair = tl.load(order_ptr + offs_m, mask=mask_m, other=0)
        if GATHERS > 0:
            x_row = pair // GATHERS
        if SCATTERS:
            y_row = pair
    x_ptrs = x_ptr + x_row.to(tl.int64)[:, None] * stride_xm + offs_k[None, :]
    expert = tl.minimum(e, E - 1).to(tl.int64)
    w_offs = expert * stride_we + first_n.to(tl.int64) * stride_wn
    w_offs += offs_n[None, :] * stride_wn + offs_k[:, None] * stride_wk
    w_ptrs = w_ptr + w_offs
    u_ptrs = w_ptrs
    if u_ptr is not None:
        u_ptrs = u_ptr + w_offs
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = acc
    # rows without expert are zeros
    for k in range(0, tl.where(e < E, K, 0), BLOCK_K):
        mask_k = offs_k < K - k
        mask_w = mask_k[:, None] & mask_n[None, :]
        x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        acc = dot(x, tl.load(w_ptrs, mask=mask_w, other=0.0), acc)
        if u_ptr is not None:
            up = dot(x, tl.load(u_ptrs, mask=mask_w, other=0.0), up)
            u_ptrs += BLOCK_K * stride_wk
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * stride_wk

    acc += _load_bias(b_ptr, e, E, first_n + offs_n, N, stride_be)[None, :]
    if u_ptr is not None:
        up += _load_bias(c_ptr, e, E, first_n + offs_n, N, stride_be)[None, :]
        acc = gate_up(acc, up, ACT)
    else:
        acc = activate(acc, ACT)
    y_ptrs = y_ptr + y_row.to(tl.int64)[:, None] * N + (first_n + offs_n)[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@launcher
def grouped_matmul(
    x: Tensor,
    weight: Tensor | tuple[Tensor, Tensor],
    order: Tensor,
    offsets: Tensor,
    bias: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    *,
    act: str = "none",
    gated: bool = False,
    gather: bool = False,
    scatter: bool = False,
) -> Tensor:
    """y_i = act(x_i · weight_eᵀ + bias_e) for the rows i of each expert e, sorted by expert.

    Args:
        x: [P, K] float16|bfloat16|float32, a row a pair (token, expert); any strides.
        weight: [E, N, K] with any strides, or (gate, up) of equal shape and strides, such as the halves
            or alternate rows of HF's fused gate_up_proj. A list of expert modules is stacked once by the
            caller, with their parameters as views.
        order: [P] int32, the pairs sorted by expert.
        offsets: [E + 1] int32, where in `order` each expert starts; both as `sort_by_expert` gives them.
        bias: [E, N], or (gate, up) of those.
        act: none, gelu, gelu_tanh, relu, relu2 or silu.
        gated: y = act(x · gateᵀ + bias_0) · (x · upᵀ + bias_1); here act may be swiglu_clamped, of gate
            and up both: gate' · sigmoid(1.702 gate') · (up' + 1), gate' at most 7, up' within ±7 (gpt-oss).
        gather: x is [T, K], a row a token; row i is that of pair order[i], of which each token has P / T.
        scatter: row i of y goes back to the place of its pair: y[order[i]].

    Returns:
        [P, N] in x.dtype; rows without expert are zeros.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit together, unknown act.

    Numerics:
        Like `matmul`; an expert without rows costs nothing.

    Source: https://arxiv.org/abs/2211.15841 (rows by expert, no padding in memory)
    """
    check_act(act, GATED_ACTIVATIONS if gated else ACTIVATIONS)
    weights, biases = as_experts(x, weight, bias, gated)
    _check(x, order, offsets, len(weights[0]), gather)
    if not backend.runs_triton(x):
        return grouped_matmul_ref(
            x, weight, order, offsets, bias, act=act, gated=gated, gather=gather, scatter=scatter
        )
    (E, N, K), P, x = weights[0].shape, len(order), as_rows(x)
    y = x.new_empty(P, N)
    if y.numel() == 0:
        return y
    config = choose(OP, _Key(x.dtype, min(256, next_power_of_2(-(-P // E))), N, K, gated))
    # every group of rows, those without expert too, may end in a tile that is not full
    tiles = P // config["BLOCK_M"] + min(E + 1, P)
    strides = (x.stride(0), *weights[0].stride(), biases[0].stride(0) if biases[0] is not None else 0)
    pointers = (x, weights[0], weights[1] if gated else None, biases[0], biases[1] if gated else None)
    launched("grouped_matmul")
    launch(_grouped_matmul_kernel, (tiles * -(-N // config["BLOCK_N"]),))(
        *pointers, order, offsets, y, P, N, K, E, *strides, act, P // len(x) if gather else 0, scatter,
        BLOCK_E=next_power_of_2(E + 1), **config,
    )  # fmt: skip
    return y


def grouped_matmul_ref(
    x: Tensor,
    weight: Tensor | tuple[Tensor, Tensor],
    order: Tensor,
    offsets: Tensor,
    bias: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    *,
    act: str = "none",
    gated: bool = False,
    gather: bool = False,
    scatter: bool = False,
) -> Tensor:
    """The truth of `grouped_matmul`."""
    order = order.long()
    rows = x[order // max(1, len(order) // max(1, len(x)))] if gather else x
    ids = torch.searchsorted(offsets[1:].contiguous(), torch.arange(len(order)).to(offsets), right=True)
    y = experts_ref(rows, ids, weight, bias, act, gated)
    return torch.empty_like(y).index_copy_(0, order, y) if scatter else y


def _check(x: Tensor, order: Tensor, offsets: Tensor, E: int, gather: bool) -> None:
    P = len(order)
    if order.dtype != torch.int32 or offsets.dtype != torch.int32 or offsets.shape != (E + 1,):
        raise ValueError(
            f"order is {order.dtype}, offsets {tuple(offsets.shape)} {offsets.dtype} - allowed: torch.int32, "
            f"({E + 1},) torch.int32 - pass what sort_by_expert gives for {E} experts"
        )
    if x.dim() != 2 or (P % max(1, len(x)) if gather else len(x) != P):
        raise ValueError(
            f"x is {tuple(x.shape)} for {P} pairs - allowed: one row a pair, or with gather=True one row a "
            "token, all with equally many pairs - flatten it"
        )


def _default(key: _Key) -> Config:
    BLOCK_M = min(128, max(16, key.rows))
    if backend.kind() != "gpu":
        columns = cpu_columns(key.dtype, backend.has_tile_registers())
        return _config(BLOCK_M, columns, 64, 4, 1)
    if key.dtype == torch.float32:
        # no tensor cores: the products are scalar, and a larger tile spills, as a gated one of 32 rows does
        return _config(16 if BLOCK_M == 16 else 64, 32, 32, 4, 3)
    if BLOCK_M <= 64:
        # a gated tile of four stages, or a large one with 64 inputs a step, passes the 64 KB shared on gfx942
        return _config(BLOCK_M, 64, 64, 4, 3 if key.gated else 4)
    return _config(128, 64, 32, 8, 3) if key.gated else _config(128, 128, 64, 8, 3)


def _config(BLOCK_M: int, BLOCK_N: int, BLOCK_K: int, num_warps: int, num_stages: int) -> Config:
    return {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_K,
        "GROUP_M": 8,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def _inputs(M: int, N: int, K: int, E: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    ids = torch.randint(E, (M,), device=device).sort().values
    offsets = torch.searchsorted(ids, torch.arange(E + 1, device=device)).int()
    weight = torch.randn(E, N, K, device=device) / K**0.5
    return {
        "x": torch.randn(M, K, dtype=dtype, device=device),
        "weight": weight.to(dtype),
        "order": torch.randperm(M, device=device).int(),
        "offsets": offsets,
    }


def _cost(
    x: Tensor, weight: Any, order: Tensor, offsets: Tensor, *args: Any, **options: Any
) -> tuple[int, int]:
    weights = weight if isinstance(weight, tuple) else (weight,)
    E, N, K = weights[0].shape
    moved = nbytes(x, order) + len(order) * N * x.element_size() + min(E, len(order)) * nbytes(*weights) // E
    return moved, 2 * len(weights) * len(order) * N * K


_SPACE = tuple(
    _config(m, n, k, w, s)
    for m, n, w in (
        (16, 64, 4),
        (16, 128, 4),
        (32, 64, 4),
        (64, 64, 4),
        (64, 128, 4),
        (128, 64, 8),
        (128, 128, 8),
    )
    for k in (64, 128)
    for s in (3, 4)
)

OP = Op("grouped_matmul", grouped_matmul, grouped_matmul_ref, _SPACE, _default, _inputs, _cost)
