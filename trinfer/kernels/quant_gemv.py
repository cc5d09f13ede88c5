"""Linear product of few rows (a decode step) with quantised weights, over up to three segments."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.elements import activate, check_act, load_bias, pad_to_three, pick_segment
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, nbytes, next_power_of_2
from trinfer.kernels.quant_elements import (
    check_residual,
    layout_of,
    quant_linear_ref,
    quant_row_product,
    quant_segments,
    quant_tile_product,
)

MAX_ROWS = 16


class _Key(NamedTuple):
    dtype: torch.dtype
    rows: int
    N: int
    K: int
    bits: int
    group: int
    gated: bool


# M is the batch and changes from call to call: it must not recompile
@triton.jit(do_not_specialize=["M"])
def _quant_gemv_kernel(
    x_ptr,
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
    SPANS_K: tl.constexpr,
):
    """One program per BLOCK_N outputs of one segment, all rows of x."""
    pid = tl.program_id(0)
    N_total = N0
    if IS_GATED:
        w_ptr, segment, first, N, column = pick_segment(pid, w0_ptr, None, None, N0, N1, N2, BLOCK_N)
        s_ptr = s0_ptr
    else:
        w_ptr, segment, first, N, column = pick_segment(pid, w0_ptr, w1_ptr, w2_ptr, N0, N1, N2, BLOCK_N)
        s_ptr = pick_segment(pid, s0_ptr, s1_ptr, s2_ptr, N0, N1, N2, BLOCK_N)[0]
        if w1_ptr is not None:
            N_total += N1
        if w2_ptr is not None:
            N_total += N2
    w_offset = first.to(tl.int64) * stride_wn
    s_offset = first.to(tl.int64) * stride_sn
    w_ptr += w_offset
    s_ptr += s_offset
    rest = N - first
    offs_n = first + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    if BLOCK_M == 1:
        for m in range(M):
            x_row = x_ptr + m * K
            y = quant_row_product(
                x_row, w_ptr, s_ptr, rest, K, H, stride_wn,
                BITS, GROUP, HAS_ZERO, HAS_TAIL, BLOCK_N, BLOCK_K, SPANS_K,
            )  # fmt: skip
            if IS_GATED:
                up = quant_row_product(
                    x_row, w1_ptr + w_offset, s1_ptr + s_offset, rest, K, H, stride_wn,
                    BITS, GROUP, HAS_ZERO, HAS_TAIL, BLOCK_N, BLOCK_K, SPANS_K,
                )  # fmt: skip
                y += load_bias(b0_ptr, None, None, segment, offs_n, N)
                y = activate(y, ACT) * (up + load_bias(b1_ptr, None, None, segment, offs_n, N))
            else:
                y = activate(y + load_bias(b0_ptr, b1_ptr, b2_ptr, segment, offs_n, N), ACT)
            offs_y = m * N_total + column + offs_n
            if residual_ptr is not None:
                y += tl.load(residual_ptr + offs_y, mask=mask_n, other=0.0).to(tl.float32)
            tl.store(y_ptr + offs_y, y.to(y_ptr.dtype.element_ty), mask=mask_n)
    else:
        y = quant_tile_product(
            x_ptr, w_ptr, s_ptr, M, rest, K, H, K, stride_wn,
            BITS, GROUP, HAS_ZERO, HAS_TAIL, BLOCK_M, BLOCK_N, BLOCK_K, False,
        )  # fmt: skip
        if IS_GATED:
            up = quant_tile_product(
                x_ptr, w1_ptr + w_offset, s1_ptr + s_offset, M, rest, K, H, K, stride_wn,
                BITS, GROUP, HAS_ZERO, HAS_TAIL, BLOCK_M, BLOCK_N, BLOCK_K, False,
            )  # fmt: skip
            y += load_bias(b0_ptr, None, None, segment, offs_n, N)[:, None]
            y = activate(y, ACT) * (up + load_bias(b1_ptr, None, None, segment, offs_n, N)[:, None])
        else:
            y = activate(y + load_bias(b0_ptr, b1_ptr, b2_ptr, segment, offs_n, N)[:, None], ACT)
        offs_m = tl.arange(0, BLOCK_M)
        offs_y = offs_m[None, :] * N_total + column + offs_n[:, None]
        mask = (offs_m[None, :] < M) & mask_n[:, None]
        if residual_ptr is not None:
            y += tl.load(residual_ptr + offs_y, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + offs_y, y.to(y_ptr.dtype.element_ty), mask=mask)


@launcher
def quant_gemv(
    x: Tensor,
    weight: Tensor | tuple[Tensor, ...],
    scale: Tensor | tuple[Tensor, ...],
    bias: Tensor | tuple[Tensor | None, ...] | None = None,
    *,
    group: int | None = None,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """y = act(x · wᵀ + bias) + residual with w = weight · scale + zero, for up to 16 rows of x.

    Args:
        x: [..., K] float16|bfloat16|float32 with at most 16 rows, any strides.
        weight: what `quantize` gives for rows of K: [N, K] int8, or uint8 with two codes of 4 bits a byte;
            or up to 3 such segments of equal row strides.
        scale: what `quantize` gives, [N, G] or [N, 2, G] with zeros, or one entry a segment.
        bias: [N], or one entry a segment, which may be None.
        group: columns that share a scale, as `quantize` took it.
        act: none, gelu, gelu_tanh, relu, relu2 or silu.
        gated: the segments are (gate, up) and y = act(x · gateᵀ + bias_0) · (x · upᵀ + bias_1).
        residual: [..., sum of N_i], added last.

    Returns:
        [..., sum of N_i] in x.dtype.

    Raises:
        ValueError: more than 16 rows, shapes, dtypes or strides that do not fit together, unknown act.

    Numerics:
        Products, sums, scales and the whole epilogue in float32, one rounding at the end; codes are exact in
        every dtype of x.
    """
    check_act(act)
    segments = quant_segments(x, weight, scale, bias, group, gated)
    weights, scales, biases = segments
    sizes = [w.shape[0] for w in weights]
    outputs = sizes[:1] if gated else sizes
    y = x.new_empty((*x.shape[:-1], sum(outputs)))
    check_residual(y, residual)
    if not backend.runs_triton(x):
        return quant_linear_ref(x, segments, group, act, gated, residual)
    K = x.shape[-1]
    M = x.numel() // max(1, K)
    if M > MAX_ROWS or K == 0:
        raise ValueError(
            f"x has {M} rows of {K} - allowed: up to {MAX_ROWS} rows - call quant_matmul for more"
        )
    if y.numel() == 0:
        return y
    bits, width, H, has_tail = layout_of(weights[0], K, group)
    config = choose(OP, _Key(x.dtype, next_power_of_2(M), sizes[0], K, bits, width, gated))
    grid = (sum([-(-n // config["BLOCK_N"]) for n in outputs]),)
    residual = residual if residual is None else residual.contiguous()
    parts = (*pad_to_three(weights), *pad_to_three(scales), *pad_to_three(biases))
    pointers = (x.contiguous(), *parts, residual, y)
    scalars = (M, *pad_to_three(sizes), K, H, weights[0].stride(0), scales[0].stride(0))
    options = (act, gated, bits, width, scales[0].dim() == 3, has_tail)
    launched("quant_gemv")
    launch(_quant_gemv_kernel, grid)(*pointers, *scalars, *options, **config)
    return y


def quant_gemv_ref(
    x: Tensor,
    weight: Tensor | tuple[Tensor, ...],
    scale: Tensor | tuple[Tensor, ...],
    bias: Tensor | tuple[Tensor | None, ...] | None = None,
    *,
    group: int | None = None,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """The truth of `quant_gemv`."""
    segments = quant_segments(x, weight, scale, bias, group, gated)
    return quant_linear_ref(x, segments, group, act, gated, residual)


def _default(key: _Key) -> Config:
    stored = key.group or key.K
    stored = triton.next_power_of_2(stored if key.bits == 8 else -(-stored // 2))
    if backend.kind() != "gpu":
        # rows one by one unpack the weight again; timed on Zen 5, 1536 x 576, float32: at 8 rows tiles are
        # 1.1 times faster for int8, 1.4 for int4, 2.2 for groups of 64, at 4 rows 0.8, 0.9 and 1.2 times
        if key.rows > (2 if key.group else 4):
            return _config(16, 64, max(16, min(64 if key.bits == 8 else 32, stored)))
        if key.group:
            # sums of 4 rows of 64 stay in registers: 1.3 to 2 times faster than 8 to 32 rows (49152 x 576) or
            # 128 columns of int8 (14336 x 2048), timed on Zen 5
            return _config(1, 4, max(16, min(64, stored)))
        return _config(1, 32, max(16, stored), SPANS_K=True)
    if key.rows > 1:
        return _config(16, 32, max(16, min(128, stored)), num_stages=3)
    block = max(16, min(1024, stored))
    return _config(1, max(2, min(16, 2048 // block)), block)


def _config(
    BLOCK_M: int, BLOCK_N: int, BLOCK_K: int, SPANS_K: bool = False, num_stages: int = 1
) -> dict[str, Any]:
    return {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_K,
        "SPANS_K": SPANS_K,
        "num_warps": 4,
        "num_stages": num_stages,
    }


def _inputs(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    weight = torch.randint(-127, 128, (N, K), dtype=torch.int8, device=device)
    scale = torch.rand(N, 1, device=device) / K**0.5 / 64
    return {"x": torch.randn(M, K, dtype=dtype, device=device), "weight": weight, "scale": scale}


def _cost(x: Tensor, weight: Any, scale: Any, bias: Any = None, **options: Any) -> tuple[int, int]:
    weights = weight if isinstance(weight, tuple) else (weight,)
    scales = scale if isinstance(scale, tuple) else (scale,)
    rows = x.numel() // x.shape[-1]
    outputs = sum(w.shape[0] for w in weights)
    moved = nbytes(x, *weights, *scales) + rows * outputs * x.element_size()
    return moved, 2 * rows * outputs * x.shape[-1]


_SPACE = (
    *(
        _config(1, n, k) | {"num_warps": w}
        for n in (1, 2, 4, 8, 16)
        for k in (64, 256, 512, 1024)
        for w in (2, 4, 8)
    ),
    *(_config(16, n, k, num_stages=s) for n in (16, 32, 64) for k in (32, 64, 128) for s in (2, 3, 4)),
)

OP = Op("quant_gemv", quant_gemv, quant_gemv_ref, _SPACE, _default, _inputs, _cost)
