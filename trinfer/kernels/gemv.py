"""Linear product of few rows (a decode step) over up to three weight segments, with its epilogue."""

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
    linear_ref,
    load_bias,
    pick_segment,
)
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.norm_elements import Norm, norm_options, normalise_ref
from trinfer.kernels.op import Op, nbytes, next_power_of_2, output
from trinfer.kernels.row_elements import (
    hold_rows,
    load_rows,
    row_moments,
    row_product,
    tile_product,
    whole_rows,
)

MAX_ROWS = 16

# a second input, its weight and its bias
Also = tuple[Tensor, Tensor, Tensor | None]


class _Key(NamedTuple):
    dtype: torch.dtype
    rows: int
    N: int
    K: int
    is_transposed: bool
    gated: bool
    has_norm: bool


# M is the batch and changes from call to call: it must not recompile
@triton.jit(do_not_specialize=["M"])
def _gemv_kernel(
    x_ptr,
    nw_ptr,
    nb_ptr,
    w0_ptr,
    w1_ptr,
    w2_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    also_ptr,
    residual_ptr,
    y_ptr,
    M,
    N0,
    N1,
    N2,
    K,
    stride_wn,
    stride_wk,
    stride_un,
    stride_uk,
    eps,
    SCALE: tl.constexpr,
    NORM: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
    ACT: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPANS_K: tl.constexpr,
):
    """One program per BLOCK_N outputs of one segment, all rows of x."""
    pid = tl.program_id(0)
    N_total = N0
    if IS_GATED or also_ptr is not None:
        w_ptr, segment, first, N, column = pick_segment(pid, w0_ptr, None, None, N0, N1, N2, BLOCK_N)
    else:
        w_ptr, segment, first, N, column = pick_segment(pid, w0_ptr, w1_ptr, w2_ptr, N0, N1, N2, BLOCK_N)
        if w1_ptr is not None:
            N_total += N1
        if w2_ptr is not None:
            N_total += N2
    # segments of unlike sizes that lie as [K, N_i] have no stride in common
    step_wk = N if stride_wk is None else stride_wk
    offset = first.to(tl.int64) * stride_wn
    w_ptr += offset
    u_ptr = None if also_ptr is None else w1_ptr + first.to(tl.int64) * stride_un
    rest = N - first
    offs_n = first + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    spans: tl.constexpr = SPANS_K and not IS_TRANSPOSED
    if BLOCK_M == 1 and not spans:
        for m in range(M):
            x_row = x_ptr + m * K
            mean, rstd = row_moments(x_row, K, eps, NORM, BLOCK_K)
            # fmt: off
            y = row_product(
                mean, rstd, x_row, nw_ptr, nb_ptr, w_ptr, rest, K, stride_wn, step_wk,
                NORM, NORM_OFFSET, IS_TRANSPOSED, BLOCK_N, BLOCK_K,
            )
            if IS_GATED:
                up = row_product(
                    mean, rstd, x_row, nw_ptr, nb_ptr, w1_ptr + offset, rest, K, stride_wn, step_wk,
                    NORM, NORM_OFFSET, IS_TRANSPOSED, BLOCK_N, BLOCK_K,
                )
                y += load_bias(b0_ptr, None, None, segment, offs_n, N)
                y = activate(y, ACT) * (up + load_bias(b1_ptr, None, None, segment, offs_n, N))
            elif also_ptr is not None:
                y += row_product(
                    0.0, 0.0, also_ptr + m * N1, None, None, u_ptr, rest, N1, stride_un, stride_uk,
                    "none", 0.0, IS_TRANSPOSED, BLOCK_N, BLOCK_K,
                )
                # fmt: on
                y += load_bias(b0_ptr, None, None, segment, offs_n, N)
                y += load_bias(b1_ptr, None, None, segment, offs_n, N)
            else:
                y = activate(y + load_bias(b0_ptr, b1_ptr, b2_ptr, segment, offs_n, N), ACT)
            y *= SCALE
            offs_y = m * N_total + column + offs_n
            if residual_ptr is not None:
                y += tl.load(residual_ptr + offs_y, mask=mask_n, other=0.0).to(tl.float32)
            tl.store(y_ptr + offs_y, y.to(y_ptr.dtype.element_ty), mask=mask_n)
    else:
        # fmt: off
        rows, means, rstds = load_rows(
            x_ptr, nw_ptr, nb_ptr, M, K, eps, NORM, NORM_OFFSET, BLOCK_M, BLOCK_K, spans
        )
        y = tile_product(
            rows, means, rstds, x_ptr, nw_ptr, nb_ptr, w_ptr, M, rest, K, stride_wn, step_wk,
            NORM, NORM_OFFSET, BLOCK_M, BLOCK_N, BLOCK_K, spans,
        )
        if IS_GATED:
            up = tile_product(
                rows, means, rstds, x_ptr, nw_ptr, nb_ptr, w1_ptr + offset, M, rest, K, stride_wn, step_wk,
                NORM, NORM_OFFSET, BLOCK_M, BLOCK_N, BLOCK_K, spans,
            )
            y += load_bias(b0_ptr, None, None, segment, offs_n, N)[:, None]
            y = activate(y, ACT) * (up + load_bias(b1_ptr, None, None, segment, offs_n, N)[:, None])
        elif also_ptr is not None:
            rows, means, rstds = load_rows(
                also_ptr, None, None, M, N1, 0.0, "none", 0.0, BLOCK_M, BLOCK_K, spans
            )
            y += tile_product(
                rows, means, rstds, also_ptr, None, None, u_ptr, M, rest, N1, stride_un, stride_uk,
                "none", 0.0, BLOCK_M, BLOCK_N, BLOCK_K, spans,
            )
            # fmt: on
            y += load_bias(b0_ptr, None, None, segment, offs_n, N)[:, None]
            y += load_bias(b1_ptr, None, None, segment, offs_n, N)[:, None]
        else:
            y = activate(y + load_bias(b0_ptr, b1_ptr, b2_ptr, segment, offs_n, N)[:, None], ACT)
        y *= SCALE
        offs_m = tl.arange(0, BLOCK_M)
        offs_y = offs_m[None, :] * N_total + column + offs_n[:, None]
        mask = (offs_m[None, :] < M) & mask_n[:, None]
        if residual_ptr is not None:
            y += tl.load(residual_ptr + offs_y, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + offs_y, y.to(y_ptr.dtype.element_ty), mask=mask)


@launcher
def gemv(
    x: Tensor,
    weight: Tensor | tuple[Tensor, ...],
    bias: Tensor | tuple[Tensor | None, ...] | None = None,
    *,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    also: Also | None = None,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """y = scale · act(norm(x) · weightᵀ + bias) + residual for up to 16 rows of x, reading each weight once.

    Args:
        x: [..., K] float16|bfloat16|float32 with at most 16 rows, any strides.
        weight: [N, K] with any strides, or up to 3 segments [N_i, K] of one dtype, of one stride or all of
            them transposed.
        bias: [N], or one entry a segment, which may be None.
        act: none, gelu, gelu_quick, gelu_tanh, relu, relu2 or silu.
        gated: the segments are (gate, up) and y = act(x · gateᵀ + bias_0) · (x · upᵀ + bias_1).
        residual: [..., sum of N_i], added last.
        norm: a `Norm` of the rows of x, done in the same launch. On a CPU 1.05 to 1.2 times as fast as two
            launches for one row, as fast (0.93 to 1.1) for several.
        also: a second input [..., L], its weight [N, L], its bias [N] or None: that product is added before
            the factor and the residual. For one weight segment without norm, activation and gate.
        scale: factor of everything but the residual (Granite).
        out: contiguous memory for y; may be the residual itself and overlaps no other argument.

    Returns:
        [..., sum of N_i] in x.dtype; `out` if given.

    Raises:
        ValueError: more than 16 rows, shapes, dtypes or strides that do not fit together, unknown act, a
        norm, a second input or an out that does not fit.

    Numerics:
        Products, sums and the whole epilogue in float32, one rounding at the end. A normalised row is
        rounded to x.dtype before it is multiplied, as its own kernel would store it.
    """
    check_act(act)
    weights, biases = as_segments(x, weight, bias, gated, residual)
    norm_tensors, norm_constants = norm_options(x, norm)
    sizes = [w.shape[0] for w in weights]
    outputs = sizes[:1] if gated else sizes
    _check_also(x, weights, also, act != "none" or gated or norm is not None)
    y = output(out, x, sum(outputs), (x, *weights, *biases, *norm_tensors[:2], *(also or ())), residual)
    if not backend.runs_triton(x):
        options: dict[str, Any] = {"act": act, "gated": gated, "residual": residual, "norm": norm}
        return gemv_ref(x, weights, biases, **options, also=also, scale=scale, out=y)
    K, M = x.shape[-1], _count_rows(x)
    if y.numel() == 0:
        return y
    residual = residual if residual is None else residual.contiguous()
    stride_wn, stride_wk = common_strides(weights)
    is_transposed = stride_wn == 1 and stride_wk != 1
    # a product of two inputs costs what one of both together would
    columns = K if also is None else K + also[0].shape[-1]
    key = _Key(x.dtype, next_power_of_2(M), sizes[0], columns, is_transposed, gated, norm is not None)
    config = hold_rows(choose(OP, key), M, also is not None)
    segments, sizes, strides = _as_arguments(weights, biases, sizes, also)
    pointers = (*norm_tensors[:2], *segments, residual, y)
    scalars = (M, *sizes, K, stride_wn, stride_wk, *strides, norm_tensors[2], scale, *norm_constants)
    launched("gemv", x, *pointers)
    grid = (sum([-(-n // config["BLOCK_N"]) for n in outputs]),)
    launch(_gemv_kernel, grid)(x.contiguous(), *pointers, *scalars, act, gated, is_transposed, **config)
    return y


def _count_rows(x: Tensor) -> int:
    """Rows of x; refuses more than a launch takes."""
    K = x.shape[-1]
    M = x.numel() // max(1, K)
    if M > MAX_ROWS or K == 0:
        raise ValueError(f"x has {M} rows of {K} - allowed: up to {MAX_ROWS} rows - call matmul for more")
    return M


def _as_arguments(
    weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...], sizes: list[int], also: Also | None
) -> tuple[Any, ...]:
    """(weights, biases and second input), sizes, strides of the second weight: as the kernel takes them."""
    if also is None:
        none = (None,) * (3 - len(weights))
        return (*weights, *none, *biases, *none, None), (*sizes, *none), (0, 0)
    second, other, bias = also
    # the kernel takes them as a second segment, whose size is that of their columns
    pointers = (*weights, other, None, *biases, bias, None, second.contiguous())
    return pointers, (*sizes, second.shape[-1], None), other.stride()


def _check_also(x: Tensor, weights: tuple[Tensor, ...], also: Also | None, is_more: bool) -> None:
    """Refuse a second input that does not fit the first."""
    if also is None:
        return
    second, weight, bias = also
    if is_more or len(weights) > 1:
        raise ValueError(
            "also comes with several segments, norm, activation or gate - allowed: one plain product of two "
            "inputs - call gemv twice"
        )
    shapes = [tuple(second.shape[:-1]), tuple(weight.shape), None if bias is None else tuple(bias.shape)]
    allowed = [
        tuple(x.shape[:-1]),
        (len(weights[0]), second.shape[-1]),
        bias if bias is None else weights[0].shape[:1],
    ]
    order = [w.stride(0) == 1 and w.stride(1) != 1 for w in (weights[0], weight)]
    dtypes = {x.dtype, second.dtype, weight.dtype, x.dtype if bias is None else bias.dtype}
    if shapes != allowed or len(dtypes) > 1 or order[0] != order[1]:
        raise ValueError(
            f"also holds rows {shapes[0]}, weight {shapes[1]} with strides {weight.stride()}, bias "
            f"{shapes[2]} - allowed: {allowed} in {x.dtype}, weights in one order of memory - convert them"
        )


def gemv_ref(
    x: Tensor,
    weight: Tensor | tuple[Tensor, ...],
    bias: Tensor | tuple[Tensor | None, ...] | None = None,
    *,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    also: Also | None = None,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """The truth of `gemv`."""
    y = linear_ref(normalise_ref(x, norm), weight, bias, act, gated, None)
    if also is not None:
        y = y + torch.nn.functional.linear(*also)
    y = y if scale == 1.0 else y * scale
    y = y if residual is None else y + residual
    return y if out is None else out.copy_(y)


def _default(key: _Key) -> Config:
    if backend.kind() != "gpu":
        # rows one by one walk the weight in the cache again; from here on a product of tiles is faster.
        # found on 2 cores with AVX-512 and AMX, 1536 x 576: 1.5x at 4 rows of bfloat16, even at 8 of float32
        if key.is_transposed:
            return _config(1, 64, 16)
        blocks = whole_rows(key.dtype, key.rows, key.N, key.K, key.has_norm)
        return _config(*blocks, SPANS_K=blocks[2] >= key.K)
    # float32 rows that are normalised on the way take registers: with larger blocks they spill
    is_tight = key.has_norm and key.dtype == torch.float32
    if key.rows > 1:
        # a gated product holds two sums: float32 spills with 4 warps
        warps = 8 if key.dtype == torch.float32 else 4
        return _config(16, 32, 32 if is_tight else 128, num_stages=3) | {"num_warps": warps}
    if key.is_transposed:
        return _config(1, 32 if key.has_norm else 64, 16)
    if key.K % 256:
        # no masked lanes for sizes such as 576: 31 registers, 128-bit loads, 32 KB in flight per SM on sm_90
        return _config(1, 8 if key.dtype == torch.float32 else 16, 64)
    return _config(1, 4, 512) if key.K <= 2048 else _config(1, 2, 512 if is_tight else 1024)


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
    weight = torch.randn(N, K, device=device) / K**0.5
    return {"x": torch.randn(M, K, dtype=dtype, device=device), "weight": weight.to(dtype)}


def _cost(x: Tensor, weight: Tensor | tuple[Tensor, ...], **options: Any) -> tuple[int, int]:
    weights = weight if isinstance(weight, tuple) else (weight,)
    rows = x.numel() // x.shape[-1]
    outputs = sum(w.shape[0] for w in weights)
    return nbytes(x, *weights) + rows * outputs * x.element_size(), 2 * rows * outputs * x.shape[-1]


_SPACE = (
    *(
        _config(1, n, k) | {"num_warps": w}
        for n in (1, 2, 4, 8, 16)
        for k in (64, 256, 512, 1024)
        for w in (2, 4, 8)
    ),
    *(_config(16, n, k, num_stages=s) for n in (16, 32, 64) for k in (64, 128, 256) for s in (2, 3, 4)),
)

OP = Op("gemv", gemv, gemv_ref, _SPACE, _default, _inputs, _cost)
