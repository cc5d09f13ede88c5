"""Attention of one query token per sequence over a key/value cache, which may take its key and value."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.heads import (
    Prologue,
    as_heads,
    check_new_token,
    flat_heads,
    head_offsets,
    load_heads,
    new_heads,
    prologue_ref,
)
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, as_bias, nbytes, strides_of, unit_stride
from trinfer.kernels.scores import (
    attend_cache,
    attend_ref,
    check_attention,
    fold_key,
    load_range,
    scale_scores,
)
from trinfer.kernels.splits import MAX_SPLITS, as_scratch, combine_splits, share_keys

_NO_PROLOGUE = Prologue()


class _Key(NamedTuple):
    dtype: torch.dtype
    group: int
    D: int
    Dv: int
    programs: int


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
    alibi_ptr,
    sinks_ptr,
    new_k_ptr,
    new_v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    o_ptr,
    partial_ptr,
    ticket_ptr,
    N,
    group,
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
    stride_xb,
    stride_xg,
    stride_qo,
    stride_xo,
    softcap,
    sm_scale,
    Q_RUN: tl.constexpr,
    X_RUN: tl.constexpr,
    WINDOW: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    R: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One program per (block of query heads that share a kv head, split of the keys, batch)."""
    blocks = tl.cdiv(group, BLOCK_H)
    pid_g = (tl.program_id(0) // blocks).to(tl.int64)
    split = tl.program_id(1)
    pid_b = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK_H
    mask_h = first + tl.arange(0, BLOCK_H) < group
    head = pid_g * group + first + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    offs_v = tl.arange(0, BLOCK_DV)[None, :]
    k_ptr += pid_b * stride_kb + pid_g * stride_kg
    v_ptr += pid_b * stride_vb + pid_g * stride_vg
    lo, hi = load_range(kv_range_ptr, pid_b, N)
    # the query stands at the last valid key, and its row of the tables counts from the first
    pos = hi - 1
    row = tl.maximum(pos - lo, 0)
    q_ptrs = q_ptr + pid_b * stride_qb + head_offsets(head, stride_qh, stride_qo, Q_RUN)
    q = load_heads(
        q_ptrs, mask_h, q_weight_ptr, cos_ptr, sin_ptr, row, EPS, OFFSET, D, R, IS_INTERLEAVED, BLOCK_D
    ).to(q_ptr.dtype.element_ty)
    slope = None if alibi_ptr is None else tl.load(alibi_ptr + head, mask=mask_h, other=0.0)
    bias_ptrs = None if bias_ptr is None else bias_ptr + pid_b * stride_bb + head * stride_bh
    # the key of this token comes from registers: in the cache, other programs may not see it yet
    hi = hi if new_k_ptr is None else pos
    lo, hi, used = share_keys(lo, hi, pos, WINDOW, SPLITS, BLOCK_N)
    # fmt: off
    acc, l_i, m_i = attend_cache(
        q, k_ptr, v_ptr, bias_ptrs, lo, hi, pos, mask_h, slope, stride_kn, stride_vn, softcap, sm_scale,
        D, DV, BLOCK_N, BLOCK_DV,
    )
    # fmt: on
    if new_k_ptr is not None:
        is_mine = (split == 0) & (lo <= pos)
        offs_x = pid_b * stride_xb + head_offsets(pid_g, stride_xg, stride_xo, X_RUN) + tl.arange(0, 1)
        mask_x = (tl.arange(0, 1) < 1) & is_mine
        x_ptrs = new_k_ptr + offs_x
        k = load_heads(
            x_ptrs, mask_x, k_weight_ptr, cos_ptr, sin_ptr, row, EPS, OFFSET, D, R, IS_INTERLEAVED, BLOCK_D
        ).to(k_ptr.dtype.element_ty)
        v = tl.load(new_v_ptr + offs_x[:, None] + offs_v, mask=(offs_v < DV) & is_mine, other=0.0)
        s = scale_scores(tl.sum(q.to(tl.float32) * k.to(tl.float32), 1), sm_scale, softcap)
        acc, l_i, m_i = fold_key(acc, l_i, m_i, tl.where(is_mine, s, -1e30), v.to(tl.float32))
        # of the programs that share this kv head, one writes
        is_mine = is_mine & (first == 0)
        base = pos.to(tl.int64)
        tl.store(k_ptr + base * stride_kn + offs_d, k, mask=(offs_d < D) & is_mine)
        tl.store(v_ptr + base * stride_vn + offs_v, v, mask=(offs_v < DV) & is_mine)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=mask_h & (split == 0), other=float("-inf")).to(tl.float32)
        acc, l_i, m_i = fold_key(acc, l_i, m_i, sink * 1.4426950408889634, 0.0)
    H = tl.num_programs(0) // blocks * group
    if SPLITS > 1:
        ticket_ptr += pid_b * tl.num_programs(0) + tl.program_id(0)
        B = tl.num_programs(2)
        acc, l_i, is_last = combine_splits(
            acc, l_i, m_i, partial_ptr, ticket_ptr, pid_b * H + head, mask_h, used, B * H, DV, SPLITS
        )
        mask_h = mask_h & is_last
    # a query that may attend to nothing gives zeros
    o = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    o_ptrs = o_ptr + (pid_b * H + head)[:, None] * DV + offs_v
    tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=mask_h[:, None] & (offs_v < DV))


@launcher
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float,
    window: int | None = None,
    kv_range: Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
    prologue: Prologue = _NO_PROLOGUE,
    out: Tensor | None = None,
    scratch: tuple[Tensor | None, Tensor | None] | None = None,
) -> Tensor:
    """softmax(cap(q kᵀ · sm_scale) + bias + alibi · (key - query position), over the valid keys) v.

    The one query of a sequence stands at its last valid key.

    Args:
        q: [B, H, 1, D] float16|bfloat16|float32, any strides, D up to 256; or [B, O, I, 1, D], the H = O · I
            heads in runs of I.
        k: [B, G, N, D], any strides, G dividing H: query head h reads head h // (H / G).
        v: [B, G, N, Dv], any strides.
        sm_scale: factor of the scores.
        window: only the last `window` keys are seen.
        kv_range: [B, 2] int32, first and one past the last valid key; what lies outside is never read.
        bias: [B or 1, H or 1, 1, N], float: added to the scores, -inf or finfo.min forbid; bool: allows.
        alibi: [H] float32, the slope of a bias by distance (see `alibi_slopes`).
        softcap: scores s become softcap · tanh(s / softcap), before bias and masks.
        sinks: [H], a logit that takes its share of the softmax and has no value (gpt-oss).
        new: key [B, G, 1, D] and value [B, G, 1, Dv] of this token, any strides, or both in runs as q:
            written into k and v at the last valid key, the key after its prologue. A sequence without a valid
            key gets nothing written.
        prologue: norm and rotation of q and of the new key, at row `last valid key - first valid key`.
        out: [B, 1, H, Dv] contiguous, takes the result.
        scratch: what `split_scratch` gives, kept between launches; made for each launch if it is missing.

    Returns:
        [B, 1, H, Dv] in q.dtype, contiguous. A query that may attend to nothing gives zeros.

    Raises:
        ValueError: shapes or dtypes that do not fit together, more than one query.

    Numerics:
        Scores, maximum, sum and accumulator in float32; q and the new key are rounded after the prologue.

    Source: https://arxiv.org/abs/1805.02867
    """
    options = (window, kv_range, bias, alibi, softcap, sinks)
    given = (q, k, v, sm_scale, options, new, prologue, out)
    (q, q_run, stride_qo, q_runs), (new, x_run, stride_xo, x_runs) = as_heads(q), new_heads(new)
    check_attention(q, k, v, *options)
    check_new_token(q, k, v, bias, new, prologue, out)
    if not backend.runs_triton(q):
        return _attend_ref(*given)
    (B, H, _, D), (G, N, DV) = q.shape, v.shape[1:]
    o = q.new_empty((B, 1, H, DV)) if out is None else out
    if o.numel() == 0:
        return o
    q, k, v, bias = unit_stride(q), unit_stride(k), unit_stride(v), as_bias(bias, (B, H, 1, N))
    kv_range = kv_range if kv_range is None else kv_range.contiguous()
    config, x = choose(OP, _Key(q.dtype, H // G, D, DV, B * G)), None if new is None else new[0]
    memory = as_scratch(scratch, B, H, DV, config["SPLITS"], q)
    tensors = (q if q_runs is None else q_runs, k, v, bias, kv_range, alibi, sinks, *x_runs)
    strides = (*q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *strides_of(bias, 2), *strides_of(x, 2))
    scalars = (N, H // G, *strides, stride_qo, stride_xo, softcap, sm_scale, q_run, x_run, window)
    launched("decode_attention", *tensors)
    launch(_decode_attention_kernel, (G * -(-H // G // config["BLOCK_H"]), config["SPLITS"], B))(
        *tensors, *prologue.tables, o, *memory, *scalars, *prologue.constants(D), D, DV, **config
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
    alibi: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
    prologue: Prologue = _NO_PROLOGUE,
    out: Tensor | None = None,
    scratch: tuple[Tensor | None, Tensor | None] | None = None,
) -> Tensor:
    """The truth of `decode_attention`; it writes the new key and value as well."""
    options = (window, kv_range, bias, alibi, softcap, sinks)
    return _attend_ref(q, k, v, sm_scale, options, new, prologue, out)


def _attend_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sm_scale: float,
    options: Any,
    new: tuple[Tensor, Tensor] | None,
    prologue: Prologue,
    out: Tensor | None,
) -> Tensor:
    N, kv_range, q = k.shape[2], options[1], flat_heads(q)
    new = None if new is None else (flat_heads(new[0]), flat_heads(new[1]))
    valid = torch.tensor([[0, N]], device=q.device).expand(len(q), 2) if kv_range is None else kv_range
    first, position = valid[:, 0].clamp(min=0), valid[:, 1].clamp(max=N) - 1
    rows = (position - first)[:, None]
    q = prologue_ref(q, prologue.q_weight, prologue, rows)
    if new is not None:
        here = (first <= position).nonzero()[:, 0]
        key = prologue_ref(new[0], prologue.k_weight, prologue, rows)
        k[here, :, position[here]] = key[here, :, 0]
        v[here, :, position[here]] = new[1][here, :, 0]
    options = (True, *options, position[:, None])
    o = attend_ref(q, k, v, sm_scale, *options)
    return o if out is None else out.copy_(o)


def _default(key: _Key) -> Config:
    block_d, block_v = (max(16, triton.next_power_of_2(n)) for n in (key.D, key.Dv))
    config = {"SPLITS": 1, "BLOCK_D": block_d, "BLOCK_DV": block_v, "BLOCK_N": 64, "num_warps": 4}
    if backend.kind() != "gpu":
        return config | _cpu_blocks(key, max(block_d, block_v))
    # two programs an SM of a large GPU; a split without keys only takes its ticket
    splits = max(1, min(MAX_SPLITS, 256 // (key.programs * -(-key.group // 16))))
    if key.group == 1 and key.D <= 128:
        block_n = 64 if block_d <= 64 else 32
        return config | {"SPLITS": splits, "BLOCK_H": 1, "BLOCK_N": block_n, "num_stages": 1}
    # compiled for sm_80, sm_90, sm_100 and gfx942: more keys or stages spill, or pass 64 KB of shared memory
    width = max(block_d, block_v)
    if key.dtype == torch.float32:
        block_n, warps, stages = (32, 8, 1) if width <= 64 else (16, 4, 2) if width <= 128 else (16, 8, 1)
    else:
        block_n, warps, stages = (64, 4, 3) if width <= 64 else (64, 4, 2) if width <= 128 else (32, 4, 2)
    blocks = {"BLOCK_H": 16, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}
    return config | {"SPLITS": splits} | blocks


def _cpu_blocks(key: _Key, width: int) -> dict[str, Any]:
    # found on 2 cores with AVX-512 BF16, 512 and 2048 keys: as rows of a product, the heads of a group read
    # each key once, 1.2 to 2.1 times faster in float32 and 1.5 to 5 times in bfloat16 than head by head; two
    # rows of float32 gain only where they are short, one row of 16 bits is worth a second that is empty
    rows = min(16, triton.next_power_of_2(key.group))
    if rows <= 2:
        rows = 1 if key.dtype == torch.float32 and (key.group == 1 or width > 64) else 2
    programs, threads = key.programs * -(-key.group // rows), torch.get_num_threads()
    splits = 1 if programs % threads == 0 or programs >= 4 * threads else min(MAX_SPLITS, threads)
    return {"BLOCK_H": rows, "BLOCK_N": 32, "SPLITS": splits, "num_stages": 1}


def _inputs(
    B: int, H: int, G: int, N: int, D: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    q = torch.randn(B, H, 1, D, dtype=dtype, device=device)
    k, v = torch.randn(2, B, G, N, D, dtype=dtype, device=device)
    return {"q": q, "k": k, "v": v, "sm_scale": D**-0.5}


def _cost(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[int, int]:
    (B, H, _, D), (N, DV) = q.shape, v.shape[2:]
    return nbytes(q, k, v) + B * H * DV * q.element_size(), 2 * B * H * N * (D + DV)


_SPACE = (
    *(
        {"BLOCK_N": n, "num_warps": w, "num_stages": s}
        for n in (32, 64)
        for w in (2, 4, 8)
        for s in (1, 2, 3, 4)
    ),
    *({"SPLITS": s} for s in (1, 2, 4, 8, 16, 32, MAX_SPLITS)),
)

OP = Op("decode_attention", decode_attention, decode_attention_ref, _SPACE, _default, _inputs, _cost)
