"""Linear product of many rows with quantised weights, over up to three segments; the rows may be int8 too."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.elements import activate, check_act, load_bias, pad_to_three, pick_segment
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, as_rows, nbytes, next_power_of_2
from trinfer.kernels.quant_elements import (
    check_residual,
    layout_of,
    quant_linear_ref,
    quant_segments,
    quant_tile_product,
)


class _Key(NamedTuple):
    dtype: torch.dtype
    M: int
    N: int
    K: int
    bits: int
    group: int
    gated: bool


# M is the number of tokens and changes from call to call: it must not recompile
@triton.jit(do_not_specialize=["M"])
def _quant_matmul_kernel(
    x_ptr,
    x_scale_ptr,
    w0_ptr,
    w1_ptr,
    w2_ptr,
    s0_ptr,
    s1_ptr,
    s2_ptr,
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
    H,
    stride_xm,
    stride_wn,
    stride_sn,
    ACT: tl.constexpr,
    IS_GATED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AS_FLOAT: tl.constexpr,
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
        s_ptr = s0_ptr
    else:
        w_ptr, segment, first, N, column = pick_segment(pid_n, w0_ptr, w1_ptr, w2_ptr, N0, N1, N2, BLOCK_N)
        s_ptr = pick_segment(pid_n, s0_ptr, s1_ptr, s2_ptr, N0, N1, N2, BLOCK_N)[0]

    row = (pid_m * BLOCK_M).to(tl.int64)
    x_ptr += row * stride_xm
    w_offset = first.to(tl.int64) * stride_wn
    s_offset = first.to(tl.int64) * stride_sn
    rest_m = M - pid_m * BLOCK_M
    rest_n = N - first
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    y = quant_tile_product(
        x_ptr, w_ptr + w_offset, s_ptr + s_offset, rest_m, rest_n, K, H, stride_xm, stride_wn,
        BITS, GROUP, HAS_ZERO, HAS_TAIL, BLOCK_M, BLOCK_N, BLOCK_K, AS_FLOAT,
    )  # fmt: skip
    if x_scale_ptr is not None:
        x_scale = tl.load(x_scale_ptr + row + offs_m, mask=offs_m < rest_m, other=0.0)[None, :]
        y *= x_scale
    if IS_GATED:
        up = quant_tile_product(
            x_ptr, w1_ptr + w_offset, s1_ptr + s_offset, rest_m, rest_n, K, H, stride_xm, stride_wn,
            BITS, GROUP, HAS_ZERO, HAS_TAIL, BLOCK_M, BLOCK_N, BLOCK_K, AS_FLOAT,
        )  # fmt: skip
        if x_scale_ptr is not None:
            up *= x_scale
        y += load_bias(b0_ptr, None, None, segment, first + offs_n, N)[:, None]
        up += load_bias(b1_ptr, None, None, segment, first + offs_n, N)[:, None]
        y = activate(y, ACT) * up
    else:
        y += load_bias(b0_ptr, b1_ptr, b2_ptr, segment, first + offs_n, N)[:, None]
        y = activate(y, ACT)
    offs_y = row * N_total + column + first + (offs_m[None, :] * N_total + offs_n[:, None])
    mask = (offs_m[None, :] < rest_m) & (offs_n[:, None] < rest_n)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + offs_y, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs_y, y.to(y_ptr.dtype.element_ty), mask=mask)


@launcher
def quant_matmul(
    x: Tensor,
    weight: Tensor | tuple[Tensor, ...],
    scale: Tensor | tuple[Tensor, ...],
    bias: Tensor | tuple[Tensor | None, ...] | None = None,
    *,
    group: int | None = None,
    x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """y = act(x · x_scale · wᵀ + bias) + residual with w = weight · scale + zero.

    Args:
        x: [..., K] float16|bfloat16|float32, or int8 with x_scale; any strides, copied if its rows are not
            contiguous.
        weight: what `quantize` gives for rows of K: [N, K] int8, or uint8 with two codes of 4 bits a byte;
            or up to 3 such segments of equal row strides.
        scale: what `quantize` gives, [N, G] or [N, 2, G] with zeros, or one entry a segment.
        bias: [N], or one entry a segment, which may be None.
        group: columns that share a scale, as `quantize` took it.
        x_scale: [..., 1] float32, one scale a row, as `quantize(x)` gives; None if x is not int8.
        dtype: of the result; that of x unless x is int8.
        act: none, gelu, gelu_tanh, relu, relu2 or silu.
        gated: the segments are (gate, up) and y = act(x · gateᵀ + bias_0) · (x · upᵀ + bias_1).
        residual: [..., sum of N_i], added last.

    Returns:
        [..., sum of N_i] in dtype.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit together, unknown act.

    Numerics:
        Codes are exact in every dtype of x; int8 products are summed in int32 for each scale. Scales and the
        whole epilogue are float32, rounded once.
    """
    check_act(act)
    dtype = _check_rows(x, x_scale, dtype)
    segments = quant_segments(x, weight, scale, bias, group, gated)
    weights, scales, biases = segments
    sizes = [w.shape[0] for w in weights]
    outputs = sizes[:1] if gated else sizes
    y = torch.empty((*x.shape[:-1], sum(outputs)), dtype=dtype, device=x.device)
    check_residual(y, residual)
    if not backend.runs_triton(x):
        return _linear_ref(x, segments, group, x_scale, dtype, act, gated, residual)
    if y.numel() == 0:
        return y
    rows = as_rows(x)
    M, K = rows.shape
    bits, width, H, has_tail = layout_of(weights[0], K, group)
    config = choose(OP, _Key(x.dtype, min(256, next_power_of_2(M)), sizes[0], K, bits, width, gated))
    tiles = -(-M // config["BLOCK_M"]) * sum(-(-n // config["BLOCK_N"]) for n in outputs)
    residual, x_scale = (t if t is None else t.contiguous() for t in (residual, x_scale))
    parts = (*pad_to_three(weights), *pad_to_three(scales), *pad_to_three(biases))
    strides = (rows.stride(0), weights[0].stride(0), scales[0].stride(0))
    options = (act, gated, bits, width, scales[0].dim() == 3, has_tail)
    launched("quant_matmul")
    launch(_quant_matmul_kernel, (tiles,))(
        rows, x_scale, *parts, residual, y, M, *pad_to_three(sizes), K, H, *strides, *options, **config
    )
    return y


def _check_rows(x: Tensor, x_scale: Tensor | None, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the result; refuses rows of codes without scales, and scales without codes."""
    is_int = x.dtype == torch.int8
    if (
        is_int != (x_scale is not None)
        or (is_int and dtype is None)
        or not (is_int or dtype in (None, x.dtype))
    ):
        raise ValueError(
            f"x is {x.dtype}, x_scale {'given' if x_scale is not None else None}, dtype={dtype} - allowed: "
            "int8 with x_scale and a dtype, or a floating point x without x_scale and in its own dtype - "
            "pass what quantize(x) gives, or x itself"
        )
    if x_scale is not None and (x_scale.shape != (*x.shape[:-1], 1) or x_scale.dtype != torch.float32):
        raise ValueError(
            f"x_scale is {tuple(x_scale.shape)} {x_scale.dtype} - allowed: {(*x.shape[:-1], 1)} "
            "torch.float32, one scale a row - pass what quantize(x) gives"
        )
    return dtype or x.dtype


def quant_matmul_ref(
    x: Tensor,
    weight: Tensor | tuple[Tensor, ...],
    scale: Tensor | tuple[Tensor, ...],
    bias: Tensor | tuple[Tensor | None, ...] | None = None,
    *,
    group: int | None = None,
    x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """The truth of `quant_matmul`."""
    segments = quant_segments(x, weight, scale, bias, group, gated)
    return _linear_ref(x, segments, group, x_scale, dtype, act, gated, residual)


def _linear_ref(
    x: Tensor,
    segments: tuple[tuple, tuple, tuple],
    group: int | None,
    x_scale: Tensor | None,
    dtype: torch.dtype | None,
    act: str,
    gated: bool,
    residual: Tensor | None,
) -> Tensor:
    if x_scale is None:
        return quant_linear_ref(x, segments, group, act, gated, residual)
    y = quant_linear_ref(x.to(x_scale.dtype) * x_scale, segments, group, act, gated, residual)
    return y if x_scale.dtype == torch.float64 else y.to(dtype)


def _default(key: _Key) -> Config:
    stored = key.group or key.K
    stored = triton.next_power_of_2(stored if key.bits == 8 else -(-stored // 2))
    # an int8 product of tensor cores spans 32 columns
    block = max(32 if key.dtype == torch.int8 else 16, min(64, stored))
    if backend.kind() != "gpu":
        # integer products of tiles are scalar code in the CPU backend, those of bfloat16 3 times faster
        return _config(min(128, max(16, key.M)), 64, block, 4, 1, AS_FLOAT=backend.kind() == "cpu")
    if key.dtype == torch.float32:
        # no tensor cores: the products are scalar, and a larger tile spills
        return _config(32, 32, 32, 4, 1)
    if key.M <= 64:
        return _config(max(16, key.M), 64, block, 4, 3)
    # two accumulators of a gated tile, or the product of a group beside their sum
    if key.gated or key.group:
        return _config(64, 64, block, 4, 2)
    return _config(64, 128, block, 8, 3)


def _config(
    BLOCK_M: int, BLOCK_N: int, BLOCK_K: int, num_warps: int, num_stages: int, AS_FLOAT: bool = False
) -> Config:
    return {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_K,
        "AS_FLOAT": AS_FLOAT,
        "GROUP_M": 8,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def _inputs(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    weight = torch.randint(-127, 128, (N, K), dtype=torch.int8, device=device)
    scale = torch.rand(N, 1, device=device) / K**0.5 / 64
    return {"x": torch.randn(M, K, dtype=dtype, device=device), "weight": weight, "scale": scale}


def _cost(
    x: Tensor, weight: Any, scale: Any, bias: Any = None, dtype: torch.dtype | None = None, **options: Any
) -> tuple[int, int]:
    weights = weight if isinstance(weight, tuple) else (weight,)
    scales = scale if isinstance(scale, tuple) else (scale,)
    rows = x.numel() // x.shape[-1]
    outputs = sum(w.shape[0] for w in weights)
    moved = nbytes(x, *weights, *scales) + rows * outputs * (dtype or x.dtype).itemsize
    return moved, 2 * rows * outputs * x.shape[-1]


_SPACE = tuple(
    _config(m, n, k, w, s)
    for m, n, w in ((16, 64, 4), (32, 64, 4), (64, 64, 4), (64, 128, 8), (128, 64, 8), (128, 128, 8))
    for k in (32, 64, 128)
    for s in (2, 3, 4)
)

OP = Op("quant_matmul", quant_matmul, quant_matmul_ref, _SPACE, _default, _inputs, _cost)
