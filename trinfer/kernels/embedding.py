"""Look-up of token vectors, with what a model adds to them before its first layer."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.norm_elements import Norm, norm_options, normalise_ref, normalise_row
from trinfer.kernels.op import Op, nbytes, next_power_of_2, output_of, unit_stride, wide


class Table(NamedTuple):
    """A further table with a row for each token: of its position, or of its type.

    weight: [P, N] in the dtype of the token table, rows contiguous.
    ids: int32|int64, broadcast to the shape of the token ids: the row of each token. Without ids and kv_range
        it is row `offset` for all.
    kv_range: [B, 2] int32, first and one past the last valid key, for one token a sequence that stands at its
        last key: the row is its distance from the first.
    offset: added to the row (2 for OPT).
    """

    weight: Tensor
    ids: Tensor | None = None
    kv_range: Tensor | None = None
    offset: int = 0

    def rows(self, shape: torch.Size) -> Tensor:
        """The row of each token of ids in `shape`."""
        if self.kv_range is not None:
            first, end = self.kv_range.long().unbind(1)
            rows = (end - 1 - first).clamp(min=0).view(shape)
        else:
            rows = torch.zeros((), dtype=torch.int64) if self.ids is None else self.ids.long()
        return rows.to(self.weight.device).expand(shape) + self.offset


class _Key(NamedTuple):
    dtype: torch.dtype
    N: int


@triton.jit
def _load_row(at_ptr, table_ptr, pid_m, period, offset, rows, N, stride_tv, offs_n, IS_RANGE: tl.constexpr):
    """The row of a table that belongs to a token, in float32."""
    row = tl.cast(offset, tl.int64)
    if IS_RANGE:
        first = tl.load(at_ptr + 2 * pid_m)
        row += tl.maximum(tl.load(at_ptr + 2 * pid_m + 1) - 1 - first, 0)
    elif at_ptr is not None:
        row += tl.load(at_ptr + pid_m % period)
    # an id outside the table shows as nan, whatever lies in memory there
    width = tl.where((row >= 0) & (row < rows), N, 0)
    return tl.load(table_ptr + row * stride_tv + offs_n, mask=offs_n < width, other=float("nan")).to(
        tl.float32
    )


# slices of ids start at any address, and batches have any size: neither may recompile
@triton.jit(
    do_not_specialize=["V", "T", "P", "type_period", "type_offset", "position_period", "position_offset"],
    do_not_specialize_on_alignment=["ids_ptr", "type_ids_ptr", "position_ids_ptr"],
)
def _embedding_kernel(
    ids_ptr,
    weight_ptr,
    type_ids_ptr,
    types_ptr,
    position_ids_ptr,
    positions_ptr,
    nw_ptr,
    nb_ptr,
    y_ptr,
    V,
    T,
    P,
    N,
    type_period,
    type_offset,
    position_period,
    position_offset,
    stride_wv,
    stride_tv,
    stride_pv,
    scale,
    eps,
    HAS_SCALE: tl.constexpr,
    TYPES_IN_RANGE: tl.constexpr,
    POSITIONS_IN_RANGE: tl.constexpr,
    NORM: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per token."""
    pid_m = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    y = _load_row(ids_ptr, weight_ptr, pid_m, tl.num_programs(0), 0, V, N, stride_wv, offs_n, False)
    if HAS_SCALE:
        y *= scale
    # each sum is rounded, as the tensors that models add are
    if types_ptr is not None:
        y = y.to(dtype).to(tl.float32) + _load_row(
            type_ids_ptr, types_ptr, pid_m, type_period, type_offset, T, N, stride_tv, offs_n, TYPES_IN_RANGE
        )
    if positions_ptr is not None:
        # fmt: off
        y = y.to(dtype).to(tl.float32) + _load_row(
            position_ids_ptr, positions_ptr, pid_m, position_period, position_offset, P, N, stride_pv, offs_n,
            POSITIONS_IN_RANGE,
        )
        # fmt: on
    if NORM != "none":
        y = tl.where(mask_n, y.to(dtype).to(tl.float32), 0.0)
        y = normalise_row(y, nw_ptr, nb_ptr, offs_n, mask_n, N, eps, NORM, NORM_OFFSET, dtype)
    tl.store(y_ptr + pid_m * N + offs_n, y.to(dtype), mask=mask_n)


@launcher
def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    scale: float = 1.0,
    types: Table | None = None,
    positions: Table | None = None,
    norm: Norm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = norm(weight[ids] · scale + types + positions).

    Args:
        ids: [...] int32|int64, any strides; copied if not contiguous.
        weight: [V, N] float16|bfloat16|float32, rows contiguous.
        scale: factor of every entry of weight (Gemma).
        types: a `Table`, added first (BERT).
        positions: a `Table`, added second (GPT-2, OPT, BERT).
        norm: a `Norm` of the sum (BERT, BLOOM).
        out: [..., N] contiguous, takes the result.

    Returns:
        [..., N] in weight.dtype. An id outside of its table gives a row of nan, never foreign memory.

    Raises:
        ValueError: weight is not a matrix, ids are not integers, or a table, norm or `out` does not fit.

    Numerics:
        Exact for a row alone; product, every sum and the norm in float32, each rounded once.
    """
    tables = [table for table in (types, positions) if table is not None]
    _check(ids, weight, tables)
    norm_tensors, norm_constants = norm_options(weight, norm)
    V, N = weight.shape
    read = (ids, weight, *(x for table in tables for x in table[:3]))
    y = output_of((*ids.shape, N), out, weight, read)
    if not backend.runs_triton(weight):
        return embedding_ref(ids, weight, scale=scale, types=types, positions=positions, norm=norm, out=y)
    M = ids.numel()
    if M:
        weight = unit_stride(weight)
        type_ids, type_rows, T, *type_at, type_stride, is_type_range = _arguments(types, ids.shape)
        position_ids, position_rows, P, *position_at, position_stride, is_range = _arguments(
            positions, ids.shape
        )
        config = choose(OP, _Key(weight.dtype, N))
        launched("embedding")
        pointers = (ids.contiguous(), weight, type_ids, type_rows, position_ids, position_rows)
        strides = (weight.stride(0), type_stride, position_stride)
        options = (float(scale), norm_tensors[2], scale != 1.0, is_type_range, is_range, *norm_constants)
        launch(_embedding_kernel, (M,))(
            *pointers, *norm_tensors[:2], y, V, T, P, N, *type_at, *position_at, *strides, *options, **config
        )
    return y


def _arguments(
    table: Table | None, shape: torch.Size
) -> tuple[Tensor | None, Tensor | None, int, int, int, int, bool]:
    """What a kernel reads for a table: where rows are named, the rows, how many, period, offset, stride."""
    if table is None:
        return None, None, 0, 1, 0, 0, False
    weight, at, period = unit_stride(table.weight), table.kv_range, 1
    if table.ids is not None:
        at = table.ids
        # the same ids for every sequence repeat; they need no copies
        while at.dim() and len(at) == 1:
            at = at[0]
        at = at if at.shape == shape[len(shape) - at.dim() :] else at.expand(shape)
        period = at.numel()
    at = at if at is None else at.contiguous()
    return at, weight, len(weight), period, table.offset, weight.stride(0), table.kv_range is not None


def _check(ids: Tensor, weight: Tensor, tables: list[Table]) -> None:
    integers = (torch.int32, torch.int64)
    if weight.dim() != 2 or ids.dtype not in integers:
        raise ValueError(
            f"ids are {ids.dtype}, weight has shape {tuple(weight.shape)} - "
            "allowed: int32 or int64 ids, a matrix [V, N] - convert them"
        )
    for rows, at, kv_range, _ in tables:
        if rows.dim() != 2 or rows.shape[1] != weight.shape[1] or rows.dtype != weight.dtype:
            raise ValueError(
                f"a table is {tuple(rows.shape)} {rows.dtype} - allowed: [P, {weight.shape[1]}] "
                f"{weight.dtype}, as the token table - convert it"
            )
        if at is not None and (kv_range is not None or at.dtype not in integers or not _fits(at, ids)):
            also = "" if kv_range is None else ", beside kv_range"
            raise ValueError(
                f"ids of a table are {tuple(at.shape)} {at.dtype}{also} - allowed: int32 or int64 ids, "
                f"broadcast to {tuple(ids.shape)}, or kv_range instead - convert them"
            )
        if kv_range is not None and (kv_range.shape != (ids.numel(), 2) or kv_range.dtype != torch.int32):
            raise ValueError(
                f"kv_range is {tuple(kv_range.shape)} {kv_range.dtype} - allowed: ({ids.numel()}, 2) "
                "torch.int32, for one token a sequence - pass ids of positions for more"
            )


def _fits(at: Tensor, ids: Tensor) -> bool:
    """True if `at` can be broadcast to the shape of ids."""
    sizes = zip(reversed(at.shape), reversed(ids.shape), strict=False)
    return at.dim() <= ids.dim() and all(n in (1, whole) for n, whole in sizes)


def embedding_ref(
    ids: Tensor,
    weight: Tensor,
    *,
    scale: float = 1.0,
    types: Table | None = None,
    positions: Table | None = None,
    norm: Norm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The truth of `embedding`."""
    y, is_valid = _look_up(weight, ids)
    y = y if scale == 1.0 else (y.to(wide(y)) * scale).to(y.dtype)
    for table in (types, positions):
        if table is not None:
            rows, is_here = _look_up(table.weight, table.rows(ids.shape))
            y, is_valid = y + rows, is_valid & is_here
    y = normalise_ref(y, norm).masked_fill(~is_valid[..., None], float("nan"))
    return y if out is None else out.copy_(y)


def _look_up(weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a table, and which of the ids are inside it."""
    is_valid = (ids >= 0) & (ids < len(weight))
    return weight[ids.masked_fill(~is_valid, 0)], is_valid


def _default(key: _Key) -> Config:
    block = max(16, next_power_of_2(key.N))
    return {"BLOCK_N": block, "num_warps": min(8, max(1, block // 512)), "num_stages": 1}


def _inputs(M: int, V: int, N: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {
        "ids": torch.randint(V, (M,), device=device),
        "weight": torch.randn(V, N, dtype=dtype, device=device),
    }


def _cost(
    ids: Tensor,
    weight: Tensor,
    types: Table | None = None,
    positions: Table | None = None,
    **options: Any,
) -> tuple[int, int]:
    entries = ids.numel() * weight.shape[1]
    tables = 1 + (types is not None) + (positions is not None)
    return nbytes(ids) + (1 + tables) * entries * weight.element_size(), tables * entries


_SPACE = tuple({"num_warps": w} for w in (1, 2, 4, 8))

OP = Op("embedding", embedding, embedding_ref, _SPACE, _default, _inputs, _cost)
