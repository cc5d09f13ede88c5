"""Linear product of many rows over up to three weight segments, with its epilogue."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.elements import (
    activate,
    as_segments,
    check_act,
    common_strides,
    dot,
    linear_ref,
    load_bias,
    pad_to_three,
    pick_segment,
)
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.norm_elements import Norm, norm_options, normalise, normalise_ref, row_statistics
from trinfer.kernels.op import Op, as_rows, cpu_columns, nbytes, next_power_of_2, output


class _Key(NamedTuple):
    dtype: torch.dtype
    M: int
    N: int
    K: int
    gated: bool
    has_norm: bool


# M is the number of tokens and changes from call to call: it must not recompile
@triton.jit(do_not_specialize=["M"])
def _matmul_kernel(
    x_ptr,
    nw_ptr,
    nb_ptr,
    w0_ptr,
    w1_ptr,
    w2_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    residual_ptr,
    y_ptr,
    M,
    N0,
    N1,
    N2,
    K,
    stride_xm,
    stride_wn,
    stride_wk,
    eps,
    SCALE: tl.constexpr,
    NORM: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
    ACT: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One program per [BLOCK_M, BLOCK_N] tile of the outputs of one segment."""
    N_total = N0
    num_n = tl.cdiv(N0, BLOCK_N)
    if not IS_GATED:
        if w1_ptr is not None:
            N_total += N1
            num_n += tl.cdiv(N1, BLOCK_N)
        if w2_ptr is not None:
            N_total += N2
            num_n += tl.cdiv(N2, BLOCK_N)
    # tiles of GROUP_M row blocks run column by column, so that programs in flight share weights in the cache
    pid = tl.program_id(0)
    in_group = GROUP_M * num_n
    first_m = pid // in_group * GROUP_M
    group_m = min(tl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    pid_m = first_m + pid % in_group % group_m
    pid_n = pid % in_group // group_m
    if IS_GATED:
        w_ptr, segment, first, N, column = pick_segment(pid_n, w0_ptr, None, None, N0, N1, N2, BLOCK_N)
    else:
        w_ptr, segment, first, N, column = pick_segment(pid_n, w0_ptr, w1_ptr, w2_ptr, N0, N1, N2, BLOCK_N)

    row = (pid_m * BLOCK_M).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < M - pid_m * BLOCK_M
    mask_n = offs_n < N - first
    x_ptrs = x_ptr + row * stride_xm + offs_m[:, None] * stride_xm + offs_k[None, :]
    # segments of unlike sizes that lie as [K, N_i] have no stride in common
    step_wk = N if stride_wk is None else stride_wk
    w_offs = first.to(tl.int64) * stride_wn + (offs_n[None, :] * stride_wn + offs_k[:, None] * step_wk)
    w_ptrs = w_ptr + w_offs
    u_ptrs = w_ptrs
    if IS_GATED:
        u_ptrs = w1_ptr + w_offs
    mean = tl.zeros([BLOCK_M], dtype=tl.float32)
    rstd = mean
    if NORM != "none":
        x_rows = x_ptr + row * stride_xm
        rows = M - pid_m * BLOCK_M
        mean, rstd = row_statistics(x_rows, rows, K, eps, stride_xm, NORM, BLOCK_M, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = acc
    for k in range(0, K, BLOCK_K):
        mask_k = offs_k < K - k
        mask_w = mask_k[:, None] & mask_n[None, :]
        x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        if NORM != "none":
            # fmt: off
            x = normalise(
                x, mean[:, None], rstd[:, None], nw_ptr, nb_ptr, k + offs_k[None, :], mask_k[None, :],
                NORM, NORM_OFFSET, x_ptr.dtype.element_ty,
            )
            # fmt: on
        acc = dot(x, tl.load(w_ptrs, mask=mask_w, other=0.0), acc)
        if IS_GATED:
            up = dot(x, tl.load(u_ptrs, mask=mask_w, other=0.0), up)
            u_ptrs += BLOCK_K * step_wk
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * step_wk

    if IS_GATED:
        acc += load_bias(b0_ptr, None, None, segment, first + offs_n, N)[None, :]
        up += load_bias(b1_ptr, None, None, segment, first + offs_n, N)[None, :]
        acc = activate(acc, ACT) * up
    else:
        acc += load_bias(b0_ptr, b1_ptr, b2_ptr, segment, first + offs_n, N)[None, :]
        acc = activate(acc, ACT)
    if SCALE != 1.0:
        acc *= SCALE
    offs_y = row * N_total + column + first + (offs_m[:, None] * N_total + offs_n[None, :])
    mask = mask_m[:, None] & mask_n[None, :]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + offs_y, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs_y, acc.to(y_ptr.dtype.element_ty), mask=mask)


@launcher
def matmul(
    x: Tensor,
    weight: Tensor | tuple[Tensor, ...],
    bias: Tensor | tuple[Tensor | None, ...] | None = None,
    *,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """y = scale · act(norm(x) · weightᵀ + bias) + residual.

    Args:
        x: [..., K] float16|bfloat16|float32, any strides; copied if its rows are not contiguous.
        weight: [N, K] with any strides, or up to 3 segments [N_i, K] of one dtype, of one stride or all of
            them transposed.
        bias: [N], or one entry a segment, which may be None.
        act: none, gelu, gelu_quick, gelu_tanh, relu, relu2 or silu.
        gated: the segments are (gate, up) and y = act(x · gateᵀ + bias_0) · (x · upᵀ + bias_1).
        residual: [..., sum of N_i], added last.
        norm: a `Norm` of the rows of x, done in the same launch by each tile. On a CPU 1.0 to 1.3 times as
            fast as two launches for up to 64 rows or 200 outputs; beyond, where it is 0.86 to 1.1, normalise
            first.
        scale: factor of everything but the residual (Granite).
        out: contiguous memory for y; may be the residual itself and overlaps no other argument.

    Returns:
        [..., sum of N_i] in x.dtype; `out` if given.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit together, unknown act, a norm or an out that
        does not fit.

    Numerics:
        Products of float32 are not shortened to tf32; sums and the whole epilogue are float32, rounded once.
        A normalised row is rounded to x.dtype before it is multiplied, as its own kernel would store it.
    """
    check_act(act)
    weights, biases = as_segments(x, weight, bias, gated, residual)
    norm_tensors, norm_constants = norm_options(x, norm)
    sizes = [w.shape[0] for w in weights]
    outputs = sizes[:1] if gated else sizes
    y = output(out, x, sum(outputs), (x, *weights, *biases, *norm_tensors[:2]), residual)
    if not backend.runs_triton(x):
        options: dict[str, Any] = {"act": act, "gated": gated, "residual": residual, "norm": norm}
        return matmul_ref(x, weights, biases, **options, scale=scale, out=y)
    if y.numel() == 0:
        return y
    rows = as_rows(x)
    M, K = rows.shape
    residual = residual if residual is None else residual.contiguous()
    bucket = min(256, next_power_of_2(M))
    config = choose(OP, _Key(x.dtype, bucket, sizes[0], K, gated, norm is not None))
    tiles = -(-M // config["BLOCK_M"]) * sum(-(-n // config["BLOCK_N"]) for n in outputs)
    pointers = (rows, *norm_tensors[:2], *pad_to_three(weights), *pad_to_three(biases), residual, y)
    scalars = (M, *pad_to_three(sizes), K, rows.stride(0), *common_strides(weights), norm_tensors[2], scale)
    launched("matmul", *pointers)
    launch(_matmul_kernel, (tiles,))(*pointers, *scalars, *norm_constants, act, gated, **config)
    return y


def matmul_ref(
    x: Tensor,
    weight: Tensor | tuple[Tensor, ...],
    bias: Tensor | tuple[Tensor | None, ...] | None = None,
    *,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """The truth of `matmul`."""
    y = linear_ref(normalise_ref(x, norm), weight, bias, act, gated, None)
    y = y if scale == 1.0 else y * scale
    y = y if residual is None else y + residual
    return y if out is None else out.copy_(y)


def _default(key: _Key) -> Config:
    if backend.kind() != "gpu":
        if key.has_norm:
            return _config(min(128, max(16, key.M)), _norm_columns(key), 64, 4, 1)
        columns = cpu_columns(key.dtype, backend.has_tile_registers())
        # a tile turns its part of the weight once for all of its rows; several tiles a thread
        most = 256 if -(-key.N // columns) >= 4 * torch.get_num_threads() else 128
        return _config(min(most, max(16, key.M)), columns, 64, 4, 1)
    if key.dtype == torch.float32:
        # no tensor cores: the products are scalar, and a larger tile spills; of two gated products without a
        # norm already 64 rows do on sm_80, with a norm 32 rows do on sm_90
        return _config(32 if key.gated and not key.has_norm else 64, 32, 32, 4, 3)
    if key.M <= 64:
        # a third stage of two weights would not fit the shared memory of gfx942
        return _config(max(16, key.M), 64, 64, 4, 3 if key.gated else 4)
    # 8 warps: with 4 this tile spills on sm_80 and sm_90; a gated tile holds two accumulators
    return _config(128, 64 if key.gated else 128, 64, 8, 3)


def _norm_columns(key: _Key) -> int:
    """Columns of a tile on a CPU when each tile normalises its rows: wide ones, so that few do.

    Timed on one Zen 5 core, 32 to 512 rows of 576, against rms_norm and matmul: bfloat16 has 0.59 to 0.8
    of their speed with 32 columns, 0.89 to 1.17 with these; float32 0.86 to 1.38.
    """
    if key.dtype == torch.float32:
        return 256 if key.N >= 1024 and key.M >= 128 else 64
    if key.N <= 64:
        return 64
    # the wider of those that leave the fewest columns empty
    return min((256, 128), key=lambda columns: -(-key.N // columns) * columns)


def _config(BLOCK_M: int, BLOCK_N: int, BLOCK_K: int, num_warps: int, num_stages: int) -> Config:
    return {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_K,
        "GROUP_M": 8,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def _inputs(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    weight = torch.randn(N, K, device=device) / K**0.5
    return {"x": torch.randn(M, K, dtype=dtype, device=device), "weight": weight.to(dtype)}


def _cost(x: Tensor, weight: Tensor | tuple[Tensor, ...], **options: Any) -> tuple[int, int]:
    weights = weight if isinstance(weight, tuple) else (weight,)
    rows = x.numel() // x.shape[-1]
    outputs = sum(w.shape[0] for w in weights)
    return nbytes(x, *weights) + rows * outputs * x.element_size(), 2 * rows * outputs * x.shape[-1]


_SPACE = tuple(
    _config(m, n, k, w, s)
    for m, n, w in (
        (16, 64, 4),
        (32, 64, 4),
        (64, 64, 4),
        (64, 128, 4),
        (128, 64, 4),
        (128, 128, 8),
        (128, 256, 8),
    )
    for k in (32, 64, 128)
    for s in (2, 3, 4)
)

OP = Op("matmul", matmul, matmul_ref, _SPACE, _default, _inputs, _cost)
