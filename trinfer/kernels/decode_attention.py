"""Attention of one query token per sequence over a key/value cache."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.elements import dot, load_tile
from trinfer.kernels.op import Op, as_bias, launched, nbytes, unit_stride
from trinfer.kernels.scores import add_bias, attend_ref, check_attention, load_range


class _Key(NamedTuple):
    dtype: torch.dtype
    group: int
    D: int
    Dv: int


# the length, and the strides of a bias with it, change with every token: they must not recompile
@triton.jit(
    do_not_specialize=["N", "group", "stride_bb", "stride_bh"],
    do_not_specialize_on_alignment=["kv_range_ptr", "bias_ptr"],
)
def _decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    kv_range_ptr,
    o_ptr,
    N,
    group,
    window,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kg,
    stride_kn,
    stride_vb,
    stride_vg,
    stride_vn,
    stride_bb,
    stride_bh,
    sm_scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One program per (block of query heads that share a kv head, batch)."""
    blocks = tl.cdiv(group, BLOCK_H)
    pid_g = (tl.program_id(0) // blocks).to(tl.int64)
    pid_b = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK_H
    offs_h = first + tl.arange(0, BLOCK_H)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_DV)
    mask_h = offs_h[:, None] < group
    head = pid_g * group
    q_ptrs = q_ptr + pid_b * stride_qb + head * stride_qh + (offs_h[:, None] * stride_qh + offs_d[None, :])
    k_ptr += pid_b * stride_kb + pid_g * stride_kg
    v_ptr += pid_b * stride_vb + pid_g * stride_vg
    lo, hi = load_range(kv_range_ptr, pid_b, N)
    if window is not None:
        lo = tl.maximum(lo, N - window)
    q = tl.load(q_ptrs, mask=mask_h & (offs_d[None, :] < D), other=0.0)
    m_i = tl.full([BLOCK_H], -1e20, dtype=tl.float32)
    l_i = tl.zeros([BLOCK_H], dtype=tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], dtype=tl.float32)
    for n in range(lo, hi, BLOCK_N):
        mask_n = offs_n < hi - n
        base = tl.cast(n, tl.int64)
        if BLOCK_H == 1:
            # one head: a product of tiles would leave most of a tensor core or vector register idle
            k_ptrs = k_ptr + base * stride_kn + (offs_n[:, None] * stride_kn + offs_d[None, :])
            k = load_tile(k_ptrs, mask_n[:, None], offs_d[None, :] < D, True, BLOCK_D != D).to(tl.float32)
            s = tl.sum(k * q.to(tl.float32), 1)[None, :]
        else:
            k_ptrs = k_ptr + base * stride_kn + (offs_n[None, :] * stride_kn + offs_d[:, None])
            k = load_tile(k_ptrs, mask_n[None, :], offs_d[:, None] < D, True, BLOCK_D != D)
            s = dot(q, k, tl.zeros([BLOCK_H, BLOCK_N], dtype=tl.float32))
        s *= sm_scale * 1.4426950408889634
        keep = mask_n[None, :]
        if bias_ptr is not None:
            b_ptrs = bias_ptr + pid_b * stride_bb + head * stride_bh + base
            b_ptrs += offs_h[:, None] * stride_bh + offs_n[None, :]
            s, keep = add_bias(s, keep, b_ptrs, mask_h & mask_n[None, :])
        # far below the first maximum, so that the weight of what is not allowed is exactly zero
        s = tl.where(keep, s, -1e30)
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        v_ptrs = v_ptr + base * stride_vn + (offs_n[:, None] * stride_vn + offs_v[None, :])
        v = load_tile(v_ptrs, mask_n[:, None], offs_v[None, :] < DV, True, BLOCK_DV != DV)
        if BLOCK_H == 1:
            acc = acc * alpha[:, None] + tl.sum(v.to(tl.float32) * tl.trans(p), 0)[None, :]
        else:
            acc = dot(p.to(v.dtype), v, acc * alpha[:, None])
        m_i = m_new
    # a query that may attend to nothing gives zeros
    o = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    o_ptrs = (
        o_ptr
        + ((pid_b * (tl.num_programs(0) // blocks) + pid_g) * group + offs_h[:, None]) * DV
        + offs_v[None, :]
    )
    tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=mask_h & (offs_v[None, :] < DV))


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float,
    window: int | None = None,
    kv_range: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(q kᵀ · sm_scale + bias, over the valid keys) v for one query at the last key position.

    Args:
        q: [B, H, 1, D] float16|bfloat16|float32, any strides, D up to 256.
        k: [B, G, N, D], any strides, G dividing H: query head h reads head h // (H / G).
        v: [B, G, N, Dv], any strides.
        sm_scale: factor of the scores.
        window: only the last `window` keys are seen.
        kv_range: [B, 2] int32, first and one past the last valid key; what lies outside is never read.
        bias: [B or 1, H or 1, 1, N], float: added to the scores, -inf or finfo.min forbid; bool: allows.

    Returns:
        [B, 1, H, Dv] in q.dtype, contiguous. A query that may attend to nothing gives zeros.

    Raises:
        ValueError: shapes or dtypes that do not fit together, more than one query.

    Numerics:
        Scores, maximum, sum and accumulator in float32.

    Source: https://arxiv.org/abs/1805.02867
    """
    check_attention(q, k, v, window, kv_range, bias)
    (B, H, M, D), (G, N, DV) = q.shape, v.shape[1:]
    if M != 1:
        raise ValueError(f"q holds {M} queries - allowed: 1 - call attention for more")
    if not backend.runs_triton(q):
        return attend_ref(q, k, v, sm_scale, True, window, kv_range, bias)
    o = q.new_empty((B, 1, H, DV))
    if o.numel() == 0:
        return o
    q, k, v, bias = unit_stride(q), unit_stride(k), unit_stride(v), as_bias(bias, (B, H, 1, N))
    kv_range = kv_range if kv_range is None else kv_range.contiguous()
    group = H // G
    config = choose(OP, _Key(q.dtype, group, D, DV))
    bias_strides = (None, None) if bias is None else bias.stride()[:2]
    strides = (*q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *bias_strides)
    launched("decode_attention")
    _decode_attention_kernel[(G * -(-group // config["BLOCK_H"]), B)](
        q, k, v, bias, kv_range, o, N, group, window, *strides, sm_scale, D, DV, **config
    )
    return o


def decode_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float,
    window: int | None = None,
    kv_range: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The truth of `decode_attention`."""
    return attend_ref(q, k, v, sm_scale, True, window, kv_range, bias)


def _default(key: _Key) -> Config:
    block_d, block_v = (max(16, triton.next_power_of_2(n)) for n in (key.D, key.Dv))
    config = {"BLOCK_D": block_d, "BLOCK_DV": block_v, "BLOCK_N": 64, "num_warps": 4}
    if backend.kind() != "gpu":
        # the keys of a group stay in the cache, and a program a head divides better between few threads
        return config | {"BLOCK_H": 1, "num_stages": 1}
    if key.group == 1 and key.D <= 128:
        return config | {"BLOCK_H": 1, "BLOCK_N": 64 if block_d <= 64 else 32, "num_stages": 1}
    return config | {"BLOCK_H": 16, "num_stages": 3 if block_d <= 128 else 2}


def _inputs(
    B: int, H: int, G: int, N: int, D: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    q = torch.randn(B, H, 1, D, dtype=dtype, device=device)
    k, v = torch.randn(2, B, G, N, D, dtype=dtype, device=device)
    return {"q": q, "k": k, "v": v, "sm_scale": D**-0.5}


def _cost(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[int, int]:
    (B, H, _, D), (N, DV) = q.shape, v.shape[2:]
    return nbytes(q, k, v) + B * H * DV * q.element_size(), 2 * B * H * N * (D + DV)


_SPACE = tuple(
    {"BLOCK_N": n, "num_warps": w, "num_stages": s}
    for n in (32, 64, 128)
    for w in (2, 4, 8)
    for s in (1, 2, 3, 4)
)

OP = Op("decode_attention", decode_attention, decode_attention_ref, _SPACE, _default, _inputs, _cost)
