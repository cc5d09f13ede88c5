"""From the heads of a product to those that attend: norm and rotation, and the write into the cache."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.heads import Prologue, check_prologue, copy_heads, prologue_ref
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, nbytes, unit_stride
from trinfer.kernels.scores import load_range


class _Key(NamedTuple):
    dtype: torch.dtype
    H: int
    D: int
    Dv: int
    R: int


# the capacity of a growing cache and the number of tokens change from call to call: they must not recompile
@triton.jit(
    do_not_specialize=["N", "rows", "stride_pb"],
    do_not_specialize_on_alignment=["positions_ptr", "rows_ptr", "kv_range_ptr"],
)
def _qkv_post_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    rows_ptr,
    kv_range_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    H,
    G,
    N,
    rows,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kg,
    stride_km,
    stride_vb,
    stride_vg,
    stride_vm,
    stride_pb,
    stride_pm,
    stride_xb,
    stride_xg,
    stride_xn,
    stride_yb,
    stride_yg,
    stride_yn,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    R: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program per (token, batch): all its query, key and value heads."""
    pid_m = tl.program_id(0).to(tl.int64)
    pid_b = tl.program_id(1).to(tl.int64)
    # where the sequence of this token lies in the cache
    cache = pid_b
    if rows_ptr is not None:
        cache = tl.load(rows_ptr + pid_m).to(tl.int64)
    is_here = (cache >= 0) & (cache < rows)
    cache = tl.where(is_here, cache, 0)
    lo, hi = load_range(kv_range_ptr, cache, N)
    at = tl.load(positions_ptr + pid_b * stride_pb + pid_m * stride_pm).to(tl.int64)
    # padding has no place in the cache; its query rotates like the first token and is never asked for
    heads = tl.where(is_here & (at >= lo) & (at < hi), G, 0)
    if cos_ptr is not None:
        row = tl.maximum(tl.minimum(at, hi - 1) - lo, 0)
        cos_ptr += row * R
        sin_ptr += row * R
    q_ptr += pid_b * stride_qb + pid_m * stride_qm
    q_out_ptr += (pid_b * tl.num_programs(0) + pid_m) * (H * D)
    k_ptr += pid_b * stride_kb + pid_m * stride_km
    k_cache_ptr += cache * stride_xb + at * stride_xn
    v_ptr += pid_b * stride_vb + pid_m * stride_vm
    v_cache_ptr += cache * stride_yb + at * stride_yn
    for part in tl.static_range(2):
        copy_heads(
            q_ptr if part == 0 else k_ptr,
            q_out_ptr if part == 0 else k_cache_ptr,
            q_weight_ptr if part == 0 else k_weight_ptr,
            cos_ptr,
            sin_ptr,
            H if part == 0 else heads,
            stride_qh if part == 0 else stride_kg,
            D if part == 0 else stride_xg,
            EPS,
            OFFSET,
            D,
            R,
            IS_INTERLEAVED,
            BLOCK_H,
            BLOCK_R,
            BLOCK_T,
        )
    offs_v = tl.arange(0, BLOCK_V)[None, :]
    for g in range(0, heads, BLOCK_H):
        offs_g = g + tl.arange(0, BLOCK_H)[:, None]
        mask = (offs_g < heads) & (offs_v < DV)
        v = tl.load(v_ptr + offs_g * stride_vg + offs_v, mask=mask, other=0.0)
        tl.store(v_cache_ptr + offs_g * stride_yg + offs_v, v, mask=mask)


@launcher
def qkv_post(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    prologue: Prologue,
    *,
    rows: Tensor | None = None,
    kv_range: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """q after its prologue; k after its prologue and v are written into the cache at their positions.

    Args:
        q: [B, H, M, D] float16|bfloat16|float32, any strides, such as a slice of the product of q, k and v.
        k: [B, G, M, D], any strides.
        v: [B, G, M, Dv], any strides.
        k_cache: [B, G, N, D], contiguous in the last dimension; changed in place.
        v_cache: [B, G, N, Dv], contiguous in the last dimension; changed in place.
        positions: [B, M] int32|int64, the place of each token in the cache, none of them twice; a token at a
            negative place, at N or above, or outside of kv_range is padding and not written.
        prologue: norm and rotation of q and k, at row `position - first valid key`.
        rows: [M] int32|int64, the row of the cache, and of kv_range, that each token belongs to: q, k, v and
            positions have one batch entry then, and hold the tokens of all sequences without padding; the
            cache has any number of rows. A token in a row that is not there is padding.
        kv_range: [B, 2] int32, first and one past the last valid key of each sequence.
        out: [B, M, H, D] contiguous, takes the result.

    Returns:
        [B, H, M, D] in q.dtype, laid out in memory as [B, M, H, D].

    Raises:
        ValueError: shapes or dtypes that do not fit together, a cache with gaps in its last dimension.

    Numerics:
        Norm and rotation in float32, rounded once.

    Source: https://arxiv.org/abs/2104.09864
    """
    _check(q, k, v, k_cache, v_cache, positions, rows, kv_range, out)
    check_prologue(prologue, q.shape[3])
    if not backend.runs_triton(q):
        places = {"rows": rows, "kv_range": kv_range}
        return qkv_post_ref(q, k, v, k_cache, v_cache, positions, prologue, **places, out=out)
    (B, H, M, D), (G, N, DV) = q.shape, v_cache.shape[1:]
    o = q.new_empty((B, M, H, D)) if out is None else out
    if o.numel():
        q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        rows, kv_range = (x if x is None else x.contiguous() for x in (rows, kv_range))
        config = choose(OP, _Key(q.dtype, H, D, DV, prologue.rotated(D)))
        strides = [x.stride()[:3] for x in (q, k, v)]
        strides += [positions.stride(), k_cache.stride()[:3], v_cache.stride()[:3]]
        tensors = (q, k, v, positions, rows, kv_range, *prologue.tables, o, k_cache, v_cache)
        sizes = (H, G, N, len(k_cache), *[n for x in strides for n in x])
        launched("qkv_post")
        launch(_qkv_post_kernel, (M, B))(*tensors, *sizes, *prologue.constants(D), D, DV, **config)
    return o.transpose(1, 2)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    rows: Tensor | None,
    kv_range: Tensor | None,
    out: Tensor | None,
) -> None:
    (B, H, M, D), (G, N, DV) = q.shape, v_cache.shape[1:]
    R = B if rows is None else len(k_cache)
    shapes = [tuple(x.shape) for x in (k, v, k_cache, v_cache, positions)]
    allowed = [(B, G, M, D), (B, G, M, DV), (R, G, N, D), (R, G, N, DV), (B, M)]
    if shapes != allowed:
        raise ValueError(
            f"q is {tuple(q.shape)}, and k, v, k_cache, v_cache, positions are {shapes} - "
            f"allowed: {allowed} - reshape them"
        )
    dtypes = {x.dtype for x in (q, k, v, k_cache, v_cache)}
    if len(dtypes) > 1 or positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"q, k, v and the cache are {sorted(map(str, dtypes))}, positions {positions.dtype} - "
            "allowed: one dtype, and torch.int32 or torch.int64 - convert them"
        )
    _check_rows(q, R, rows, kv_range)
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ValueError(
            f"k_cache has strides {k_cache.stride()}, v_cache {v_cache.stride()} - allowed: 1 in the last "
            "dimension - lay the cache out as [B, G, N, D]"
        )
    if out is not None and (out.shape != (B, M, H, D) or out.dtype != q.dtype or not out.is_contiguous()):
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} - allowed: ({B}, {M}, {H}, {D}) {q.dtype}, contiguous - "
            "leave it out"
        )


def _check_rows(q: Tensor, R: int, rows: Tensor | None, kv_range: Tensor | None) -> None:
    B, M = len(q), q.shape[2]
    if rows is not None and (B != 1 or rows.shape != (M,) or rows.dtype not in (torch.int32, torch.int64)):
        raise ValueError(
            f"rows are {tuple(rows.shape)} {rows.dtype} for q {tuple(q.shape)} - allowed: ({M},) torch.int32 "
            "or torch.int64, and [1, H, M, D] - pack the tokens of all sequences into one"
        )
    if kv_range is not None and (kv_range.shape != (R, 2) or kv_range.dtype != torch.int32):
        raise ValueError(
            f"kv_range is {tuple(kv_range.shape)} {kv_range.dtype} - allowed: ({R}, 2) torch.int32 - "
            "convert it"
        )


def qkv_post_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    prologue: Prologue,
    *,
    rows: Tensor | None = None,
    kv_range: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The truth of `qkv_post`; it changes the cache as well."""
    R, _, N, _ = k_cache.shape
    cache = (
        torch.arange(R, device=q.device)[:, None].expand_as(positions) if rows is None else rows[None].long()
    )
    is_here = (cache >= 0) & (cache < R)
    valid = positions.new_tensor([[0, N]]).expand(R, 2) if kv_range is None else kv_range.clamp(0, N)
    first, end = valid[cache.where(is_here, 0)].unbind(-1)
    turns = torch.minimum(positions, end - 1) - first
    sequence, token = (is_here & (positions >= first) & (positions < end)).nonzero(as_tuple=True)
    place = cache[sequence, token], slice(None), positions[sequence, token].long()
    key = prologue_ref(k, prologue.k_weight, prologue, turns)
    k_cache[place] = key[sequence, :, token]
    v_cache[place] = v[sequence, :, token]
    y = prologue_ref(q, prologue.q_weight, prologue, turns).transpose(1, 2)
    return (y.contiguous() if out is None else out.copy_(y)).transpose(1, 2)


def _default(key: _Key) -> Config:
    half, tail = (triton.next_power_of_2(max(1, n)) for n in (key.R // 2, key.D - key.R))
    # a GPU takes all heads of a token at once if they fit its registers; a CPU gains nothing from that
    heads = min(triton.next_power_of_2(key.H), max(1, 2048 // half)) if backend.kind() == "gpu" else 8
    return {
        "BLOCK_H": heads,
        "BLOCK_R": half,
        "BLOCK_T": tail,
        "BLOCK_V": triton.next_power_of_2(key.Dv),
        "num_warps": 4,
        "num_stages": 1,
    }


def _inputs(
    B: int, H: int, G: int, M: int, N: int, D: int, R: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    heads = torch.randn(B, M, H + 2 * G, D, dtype=dtype, device=device).transpose(1, 2)
    q, k, v = heads.split((H, G, G), 1)
    k_cache, v_cache = torch.randn(2, B, G, N, D, dtype=dtype, device=device)
    angles = torch.rand(N, R // 2, device=device).repeat(1, 2) * 6.28
    return {
        "q": q,
        "k": k,
        "v": v,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "positions": torch.arange(M, device=device).expand(B, M),
        "prologue": Prologue(cos=angles.cos(), sin=angles.sin()),
    }


def _cost(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[int, int]:
    return 2 * nbytes(q, k, v), 3 * (q.numel() + k.numel())


_SPACE = tuple({"BLOCK_H": h, "num_warps": w} for h in (1, 4, 8, 16, 32) for w in (1, 2, 4, 8))

OP = Op("qkv_post", qkv_post, qkv_post_ref, _SPACE, _default, _inputs, _cost, writes=("k_cache", "v_cache"))
