"""Attention of many queries, computed block by block with online softmax."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.elements import dot, load_tile
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, as_bias, nbytes, next_power_of_2, strides_of, unit_stride
from trinfer.kernels.scores import (
    add_bias,
    attend_packed_ref,
    attend_ref,
    check_attention,
    check_packed,
    load_range,
    mask_keys,
    scale_scores,
)


class _Key(NamedTuple):
    dtype: torch.dtype
    M: int
    D: int
    Dv: int
    has_bias: bool


@triton.jit
def _attend(
    acc,
    l_i,
    m_i,
    q,
    k_ptr,
    v_ptr,
    bias_ptr,
    lo,
    hi,
    pos_m,
    mask_m,
    window,
    stride_kn,
    stride_vn,
    slope,
    softcap,
    sm_scale,
    IS_CAUSAL: tl.constexpr,
    IS_MASKED: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Fold the keys lo..hi into the running maximum, sum and weighted values of a block of queries."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_DV)
    for n in range(lo, hi, BLOCK_N):
        mask_n = offs_n < hi - n
        base = tl.cast(n, tl.int64)
        k_ptrs = k_ptr + base * stride_kn + (offs_n[None, :] * stride_kn + offs_d[:, None])
        k = load_tile(k_ptrs, mask_n[None, :], offs_d[:, None] < D, IS_MASKED, BLOCK_D != D)
        s = dot(q, k, tl.zeros([q.shape[0], BLOCK_N], dtype=tl.float32))
        s = scale_scores(s, sm_scale, softcap)
        key = n + offs_n[None, :]
        if slope is not None:
            s += slope * (key - pos_m).to(tl.float32)
        if IS_MASKED:
            keep = mask_n[None, :]
            keep = mask_keys(keep, key, pos_m, window, IS_CAUSAL)
            if bias_ptr is not None:
                s, keep = add_bias(s, keep, bias_ptr + base + offs_n[None, :], mask_m & mask_n[None, :])
            # far below the first maximum, so that the weight of what is not allowed is exactly zero
            s = tl.where(keep, s, -1e30)
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        v_ptrs = v_ptr + base * stride_vn + (offs_n[:, None] * stride_vn + offs_v[None, :])
        v = load_tile(v_ptrs, mask_n[:, None], offs_v[None, :] < DV, IS_MASKED, BLOCK_DV != DV)
        acc = dot(p.to(v.dtype), v, acc * alpha[:, None])
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def _place(q_range_ptr, pid_b, row, first, M, N, lo, hi):
    """Of a block of queries: first row in q and in o, queries of the sequence, first position, last key."""
    if q_range_ptr is None:
        o_row = pid_b * M + row
        pos = first + N - M
    else:
        start = tl.load(q_range_ptr + 2 * pid_b)
        M = tl.load(q_range_ptr + 2 * pid_b + 1) - start
        row += start
        o_row = row
        pos = first + hi - M
        # a block behind the last query of a short sequence sees nothing
        hi = tl.where(first < M, hi, lo)
    return row, o_row, M, pos, hi


# the lengths, and the strides of a bias with them, change from call to call: they must not recompile
@triton.jit(
    do_not_specialize=["M", "N", "group", "stride_bb", "stride_bh", "stride_bm"],
    do_not_specialize_on_alignment=["kv_range_ptr", "q_range_ptr", "bias_ptr"],
)
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    kv_range_ptr,
    q_range_ptr,
    alibi_ptr,
    sinks_ptr,
    o_ptr,
    M,
    N,
    group,
    window,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kg,
    stride_kn,
    stride_vb,
    stride_vg,
    stride_vn,
    stride_bb,
    stride_bh,
    stride_bm,
    softcap,
    sm_scale,
    IS_CAUSAL: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PEELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One program per (query block, head, batch)."""
    # the last blocks of a causal mask see the most keys: start them first
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    pid_h = tl.program_id(1).to(tl.int64)
    pid_b = tl.program_id(2).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    offs_v = tl.arange(0, BLOCK_DV)[None, :]
    lo, hi = load_range(kv_range_ptr, pid_b, N)
    row = first.to(tl.int64)
    row, o_row, M, pos, hi = _place(q_range_ptr, pid_b, row, first, M, N, lo, hi)
    if q_range_ptr is None:
        q_ptr += pid_b * stride_qb
    mask_m = offs_m < M - first
    q_ptrs = q_ptr + pid_h * stride_qh + row * stride_qm + (offs_m * stride_qm + offs_d)
    q = load_tile(q_ptrs, mask_m, offs_d < D, True, BLOCK_D != D)
    k_ptr += pid_b * stride_kb + pid_h // group * stride_kg
    v_ptr += pid_b * stride_vb + pid_h // group * stride_vg
    bias_ptrs = bias_ptr
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + pid_b * stride_bb + pid_h * stride_bh + row * stride_bm + offs_m * stride_bm

    # the keys that any query of this block may see
    end = hi
    if IS_CAUSAL:
        end = tl.minimum(hi, pos + 1)
        hi = tl.minimum(hi, pos + BLOCK_M)
    if window is not None:
        lo = tl.maximum(lo, pos - window)
        hi = tl.minimum(hi, pos + BLOCK_M + window)

    m_i = tl.full([BLOCK_M], -1e20, dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + pid_h).to(tl.float32) * 1.4426950408889634
        m_i = tl.maximum(m_i, sink)
        l_i = tl.exp2(sink - m_i)
    slope = alibi_ptr
    if alibi_ptr is not None:
        slope = tl.load(alibi_ptr + pid_h) * 1.4426950408889634
    # whole tiles that every query of the block sees need no mask: fold those first, then the others
    FIRST: tl.constexpr = 0 if PEELS and bias_ptr is None and window is None else 1
    middle = lo
    if FIRST == 0:
        middle = lo + tl.maximum(end - lo, 0) // BLOCK_N * BLOCK_N
    for part in tl.static_range(FIRST, 2):
        acc, l_i, m_i = _attend(
            acc,
            l_i,
            m_i,
            q,
            k_ptr,
            v_ptr,
            bias_ptrs,
            lo if part == 0 else middle,
            middle if part == 0 else hi,
            pos + offs_m,
            mask_m,
            window,
            stride_kn,
            stride_vn,
            slope,
            softcap,
            sm_scale,
            IS_CAUSAL,
            part == 1,
            D,
            DV,
            BLOCK_N,
            BLOCK_D,
            BLOCK_DV,
        )

    # a query that may attend to nothing gives zeros
    o = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    H = tl.num_programs(1)
    o_ptrs = o_ptr + (o_row * H + pid_h) * DV + (offs_m * (H * DV) + offs_v)
    tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=mask_m & (offs_v < DV))


@launcher
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float,
    is_causal: bool,
    window: int | None = None,
    kv_range: Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    q_range: Tensor | None = None,
    max_queries: int | None = None,
) -> Tensor:
    """softmax(cap(q kᵀ · sm_scale) + bias + alibi · (key - query position), over the keys allowed) v.

    Args:
        q: [B, H, M, D] float16|bfloat16|float32, any strides, D up to 256. Query m stands at key N - M + m.
        k: [B, G, N, D], any strides, G dividing H: query head h reads head h // (H / G).
        v: [B, G, N, Dv], any strides.
        sm_scale: factor of the scores.
        is_causal: a query sees no key after its own position.
        window: causal: a query sees itself and the window - 1 keys before it; else keys at most window away.
        kv_range: [B, 2] int32, first and one past the last valid key; what lies outside is never read.
        bias: [B or 1, H or 1, M or 1, N]; float: added to scores, -inf and finfo.min forbid; bool: allows.
        alibi: [H] float32, the slope of a bias by distance (see `alibi_slopes`).
        softcap: scores s become softcap · tanh(s / softcap), before bias and masks.
        sinks: [H], a logit that takes its share of the softmax and has no value (gpt-oss).
        q_range: [B, 2] int32; q is [1, H, T, D] and holds the queries of B sequences without padding: first
            and one past the last query of each. Together they cover all T; the last query of a sequence
            stands at its last valid key.
        max_queries: of one sequence, or more; with q_range.

    Returns:
        [B, M, H, Dv] in q.dtype, contiguous; [1, T, H, Dv] with q_range. A query that may attend to nothing
        gives zeros.

    Raises:
        ValueError: shapes or dtypes that do not fit together; q_range beside bias or without max_queries.

    Numerics:
        Scores, maximum, sum and accumulator in float32; weights are rounded to v.dtype for their product.

    Source: https://arxiv.org/abs/1805.02867, https://arxiv.org/abs/2205.14135
    """
    options = (window, kv_range, bias, alibi, softcap, sinks)
    check_packed(q, k, bias, q_range, max_queries)
    check_attention(q if q_range is None else q.expand(len(k), -1, -1, -1), k, v, *options)
    if not backend.runs_triton(q):
        return _attend_ref(q, k, v, sm_scale, is_causal, options, q_range)
    (_, H, M, D), (B, G, N, DV) = q.shape, v.shape
    o = q.new_empty((len(q), M, H, DV))
    if o.numel() == 0:
        return o
    q, k, v, bias = unit_stride(q), unit_stride(k), unit_stride(v), as_bias(bias, (B, H, M, N))
    M = M if max_queries is None else max_queries
    kv_range, q_range = (x if x is None else x.contiguous() for x in (kv_range, q_range))
    config = choose(OP, _Key(q.dtype, min(1024, next_power_of_2(M)), D, DV, bias is not None))
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides_of(bias, 3))
    tensors = (q, k, v, bias, kv_range, q_range, alibi, sinks, o)
    launched("attention")
    launch(_attention_kernel, (-(-M // config["BLOCK_M"]), H, B))(
        *tensors, M, N, H // G, window, *strides, softcap, sm_scale, is_causal, D, DV, **config
    )
    return o


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float,
    is_causal: bool,
    window: int | None = None,
    kv_range: Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    q_range: Tensor | None = None,
    max_queries: int | None = None,
) -> Tensor:
    """The truth of `attention`."""
    options = (window, kv_range, bias, alibi, softcap, sinks)
    return _attend_ref(q, k, v, sm_scale, is_causal, options, q_range)


def _attend_ref(
    q: Tensor, k: Tensor, v: Tensor, sm_scale: float, is_causal: bool, options: Any, q_range: Tensor | None
) -> Tensor:
    if q_range is None:
        return attend_ref(q, k, v, sm_scale, is_causal, *options)
    return attend_packed_ref(q, k, v, sm_scale, is_causal, options, q_range)


def _default(key: _Key) -> Config:
    block_d, block_v = (max(16, triton.next_power_of_2(n)) for n in (key.D, key.Dv))
    config = {"BLOCK_D": block_d, "BLOCK_DV": block_v, "num_warps": 4, "num_stages": 2}
    if backend.kind() != "gpu":
        # found on 2 cores with AVX-512 BF16, causal, heads of 64: small blocks waste less of a triangle, 1.2
        # times faster at 40 and 128 tokens; large ones read less, 1.1 times faster at 2048
        rows, columns = (16, 32) if key.M <= 64 else (32, 32) if key.M <= 512 else (64, 64)
        return config | {"PEELS": False, "BLOCK_M": rows, "BLOCK_N": columns}
    wide = max(block_d, block_v)
    if key.dtype == torch.float32:
        # no tensor core takes it: larger blocks spill
        rows, columns, warps = (64, 32, 8) if wide <= 64 else (16, 16, 4)
        return config | {"PEELS": True, "BLOCK_M": rows, "BLOCK_N": columns, "num_warps": warps}
    if key.M <= 64:
        columns, stages = (32, 2) if wide > 64 else (64, 3)
        block = {"BLOCK_M": max(16, key.M), "BLOCK_N": columns, "num_stages": stages}
        return config | {"PEELS": True} | block
    # compiled for sm_80, sm_90, sm_100 and gfx942: larger blocks spill, or pass the shared memory
    if wide > 128:
        rows, columns, stages = 64, 64, 2
    elif wide > 64 and key.has_bias:
        rows, columns, stages = 64, 32, 2
    elif backend.shared_bytes() < (200_000 if wide > 64 else 100_000):
        rows, columns, stages = 128, 32, 2
    else:
        rows, columns, stages = 128, 64, 3
    return config | {
        "PEELS": True,
        "BLOCK_M": rows,
        "BLOCK_N": columns,
        "num_stages": stages,
        "num_warps": 8,
    }


def _inputs(
    B: int, H: int, G: int, M: int, N: int, D: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    q = torch.randn(B, H, M, D, dtype=dtype, device=device)
    k, v = torch.randn(2, B, G, N, D, dtype=dtype, device=device)
    return {"q": q, "k": k, "v": v, "sm_scale": D**-0.5, "is_causal": True}


def _cost(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **options: Any) -> tuple[int, int]:
    (B, H, M, D), (N, DV) = q.shape, v.shape[2:]
    pairs = M * N - M * (M - 1) // 2 if is_causal else M * N
    return nbytes(q, k, v) + B * H * M * DV * q.element_size(), 2 * B * H * pairs * (D + DV)


_SPACE = tuple(
    {"BLOCK_M": m, "BLOCK_N": n, "num_warps": w, "num_stages": s}
    for m in (64, 128)
    for n in (32, 64, 128)
    for w in (4, 8)
    for s in (2, 3, 4)
)

OP = Op("attention", attention, attention_ref, _SPACE, _default, _inputs, _cost)
