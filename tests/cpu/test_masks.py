"""Masks of every form: the code generator cuts loops at some of them and tests others element by element."""

import ctypes
import mmap

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.cpu import sources
from tests.cpu.arrays import integers, normal, poisoned

M, N = 16, 32

KERNEL = """
@triton.jit(do_not_specialize=["low", "high", "step"])
def _mask_kernel(x_ptr, y_ptr, z_ptr, sums_ptr, best_ptr, low, high, step, M: tl.constexpr, N: tl.constexpr):
    offs_m = tl.arange(0, M)
    offs_n = tl.arange(0, N)
    m = offs_m[:, None]
    n = offs_n[None, :]
    mask = {form}
    offs = m * N + n
    x = tl.load(x_ptr + offs, mask=mask, other=-7)
    tl.store(y_ptr + offs, x, mask=mask)
    tl.store(z_ptr + offs, tl.where(mask, x * 2, x + tl.load(x_ptr + offs)))
    tl.store(sums_ptr + offs_m, tl.sum(tl.where(mask, x, 0), 1))
    tl.store(best_ptr + offs_n, tl.max(tl.load(x_ptr + offs, mask=mask, other=-99), 0))
"""

FORMS = {
    "upper": "n < high",
    "upper or equal": "n <= high",
    "turned around": "high > n",
    "lower": "n >= low",
    "both": "(n >= low) & (n < high)",
    "rows": "(m < high) & (n >= 0)",
    "rows and columns": "(m < high) & (n > low)",
    "causal": "m >= n",
    "causal from the end": "n <= m + (high - low)",
    "window": "(n <= m) & (n > m - high)",
    "antidiagonal": "m + n < high",
    "flat": "m * N + n < high * step",
    "negative": "high - n > low",
    "strided by a symbol": "n * step < high",
    "strided by a number": "(3 * n < high) & (m < 9)",
    "rows strided by a symbol": "m * step + n < high",
    "or": "(n < low) | (n >= high)",
    "or of rows and columns": "(m < low) | (n >= high)",
    "not": "~(n < high)",
    "not of both": "~((n >= low) & (n < high))",
    "exclusive or": "(n < low) ^ (m < high)",
    "equal": "n == low",
    "unequal": "(n != low) & (m < high)",
    "remainder": "n % 3 == 1",
    "scalar": "(low < high) & (n >= 0)",
    "scalar and tile": "(low < high) & (n >= low)",
    "constant": "(n < 20) & (n >= 3) & (m < 11)",
    "never": "n < 0",
    "always": "(n >= 0) & (m < 99)",
    "wide": "(n + 0 * low).to(tl.int64) < high",
}
"""Over a column of row numbers m, a row of column numbers n and three numbers; NumPy reads them alike."""

BOUNDS = [(3, 20, 2), (0, 0, 1), (5, 3, 3), (-4, 99, 5), (31, 32, 1), (0, 7, 16)]


@pytest.mark.parametrize("form", FORMS)
def test_masks(form, tmp_path):
    kernel = sources.module(tmp_path, KERNEL.format(form=FORMS[form]))._mask_kernel
    x = integers(-50, 50, M, N)
    m, n = np.arange(M)[:, None], np.arange(N)[None, :]
    for low, high, step in BOUNDS:
        y, z = poisoned(M, N, dtype=torch.int32), poisoned(M, N, dtype=torch.int32)
        sums, best = poisoned(M, dtype=torch.int32), poisoned(N, dtype=torch.int32)
        kernel[(1,)](x, y, z, sums, best, low, high, step, M=M, N=N)
        text = FORMS[form].replace(".to(tl.int64)", "")
        names = {"m": m, "n": n, "N": N, "low": low, "high": high, "step": step}
        mask = torch.from_numpy(np.broadcast_to(eval(text, names), (M, N)).copy())
        loaded, poison = torch.where(mask, x, -7), poisoned(M, N, dtype=torch.int32)
        assert torch.equal(y, torch.where(mask, x, poison))
        assert torch.equal(z, torch.where(mask, 2 * x, loaded + x))
        assert torch.equal(sums, torch.where(mask, x, 0).sum(1))
        assert torch.equal(best, torch.where(mask, x, -99).amax(0))


@triton.jit
def _three_masks_kernel(a_ptr, b_ptr, y_ptr, A, B, Y, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    a = tl.load(a_ptr + offs_n, mask=offs_n < A, other=1.0)
    b = tl.load(b_ptr + offs_n, mask=offs_n >= B, other=a)
    c = tl.load(b_ptr + offs_n, mask=(offs_n < A) & (offs_n >= B), other=3.0)
    tl.store(y_ptr + offs_n, a * b + c, mask=offs_n < Y)


@pytest.mark.parametrize("bounds", [(20, 10, 30), (10, 20, 30), (5, 0, 40), (64, 64, 64), (64, 0, 7)])
def test_loads_and_store_with_different_masks(bounds):
    a, b, y = normal(64), normal(64, seed=1), poisoned(64)
    _three_masks_kernel[(1,)](a, b, y, *bounds, BLOCK_N=64)
    n = torch.arange(64)
    first = torch.where(n < bounds[0], a, 1.0)
    second = torch.where(n >= bounds[1], b, first)
    third = torch.where((n < bounds[0]) & (n >= bounds[1]), b, 3.0)
    torch.testing.assert_close(y[: bounds[2]], (first * second + third)[: bounds[2]])
    assert y[bounds[2] :].isnan().all()


@triton.jit
def _loaded_mask_kernel(x_ptr, mask_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    mask = tl.load(mask_ptr + offs_n)
    tl.store(y_ptr + offs_n, tl.load(x_ptr + offs_n, mask=mask, other=5.0), mask=mask | (offs_n == 3))


def test_mask_from_memory():
    x, mask, y = normal(64), integers(0, 2, 64, dtype=torch.bool), poisoned(64)
    mask[3] = False
    _loaded_mask_kernel[(1,)](x, mask, y, BLOCK_N=64)
    assert torch.equal(y[mask], x[mask]) and y[3] == 5 and y[~mask].isnan().sum() == (~mask).sum() - 1


@triton.jit(do_not_specialize=["flag"])
def _scalar_mask_kernel(x_ptr, y_ptr, flag):
    x = tl.load(x_ptr, mask=flag > 0, other=-1.0)
    tl.store(y_ptr, x)
    tl.store(y_ptr + 1, x, mask=flag > 1)
    z = tl.load(x_ptr + tl.arange(0, 16), mask=flag > 2)
    tl.store(y_ptr + 2 + tl.arange(0, 16), z, mask=flag > 2)


class Nothing:
    """A tensor at address 0: reading it faults."""

    dtype = torch.float32

    def data_ptr(self) -> int:
        return 0


@pytest.mark.parametrize("flag", [0, 1, 2, 3])
def test_scalar_masks(flag):
    x, y = normal(16), poisoned(18)
    _scalar_mask_kernel[(1,)](x if flag else Nothing(), y, flag)
    assert y[0] == (x[0] if flag else -1)
    assert y[1] == x[0] if flag > 1 else y[1].isnan()
    assert torch.equal(y[2:], x) if flag > 2 else y[2:].isnan().all()


class Fenced:
    """Memory between two pages that fault when they are touched."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        page = mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        private_anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = libc.mmap(None, 3 * page, mmap.PROT_READ | mmap.PROT_WRITE, private_anonymous, -1, 0)
        for fence in (start, start + 2 * page):
            assert libc.mprotect(fence, page, 0) == 0
        size = count * dtype.itemsize
        first = (ctypes.c_char * size).from_address(start + page)
        last = (ctypes.c_char * size).from_address(start + 2 * page - size)
        self.at_start = torch.frombuffer(first, dtype=dtype)
        self.at_end = torch.frombuffer(last, dtype=dtype)


@triton.jit
def _fenced_kernel(x_ptr, y_ptr, low, high, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N) - BLOCK_N // 2
    mask = (offs_n >= low) & (offs_n < high)
    x = tl.load(x_ptr + offs_n, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs_n, x * 2, mask=mask)


@triton.jit
def _fenced_rows_kernel(x_ptr, y_ptr, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_m = tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < rows) & (offs_n < columns)
    # the row start has a mask of its own, and its address does not depend on the column
    first = tl.load(x_ptr + offs_m * columns + offs_n * 0, mask=mask, other=0.0)
    odd = tl.load(x_ptr + offs_m * columns + offs_n, mask=mask & (offs_n % 2 == 1), other=0.0)
    tl.store(y_ptr + offs_m * columns + offs_n, first + odd, mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_masked_lanes_do_not_touch_memory(dtype):
    source, target = Fenced(40, dtype), Fenced(40, dtype)
    for x, y, low, high in [
        (source.at_end, target.at_end, 0, 40),
        (source.at_start, target.at_start, 0, 40),
        (source.at_end[20:], target.at_end[20:], -20, 20),
    ]:
        values = normal(high - low, dtype=dtype)
        x.as_strided((high - low,), (1,), x.storage_offset() + low).copy_(values)
        _fenced_kernel[(1,)](x, y, low, high, BLOCK_N=128)
        assert torch.equal(y.as_strided((high - low,), (1,), y.storage_offset() + low), 2 * values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_rows_do_not_touch_memory(dtype):
    source, target = Fenced(9 * 5, dtype), Fenced(9 * 5, dtype)
    values = normal(9, 5, dtype=dtype)
    source.at_end.view(9, 5).copy_(values)
    _fenced_rows_kernel[(1,)](source.at_end, target.at_end, 9, 5, BLOCK_M=16, BLOCK_N=64)
    odd = torch.arange(5) % 2 == 1
    assert torch.equal(target.at_end.view(9, 5), values[:, :1] + torch.where(odd, values, 0))


@triton.jit
def _gathered_rows_kernel(
    x_ptr, row_ptr, y_ptr, M, N: tl.constexpr, BLOCK_M: tl.constexpr, MASKS: tl.constexpr
):
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, N)
    if MASKS:
        rows = tl.load(row_ptr + offs_m, mask=offs_m < M, other=0)
        x = tl.load(x_ptr + rows[:, None] * N + offs_n[None, :], mask=(offs_m < M)[:, None], other=0.0)
    else:
        rows = tl.load(row_ptr + offs_m)
        x = tl.load(x_ptr + rows[:, None] * N + offs_n[None, :])
    tl.store(y_ptr + offs_m, tl.sum(x.to(tl.float32), 1), mask=offs_m < M)


@pytest.mark.parametrize("has_masks", [False, True])
def test_row_numbers_are_read_only_where_they_are(has_masks):
    # long narrow rows are fetched ahead: the row numbers of rows to come must not be read ahead with them
    size = 16 if not has_masks else 11
    x, y = normal(4, 256, dtype=torch.bfloat16), poisoned(16)
    rows = Fenced(size, torch.int64).at_end
    rows.copy_(integers(0, 4, size))
    _gathered_rows_kernel[(1,)](x, rows, y, size, N=256, BLOCK_M=16, MASKS=has_masks)
    torch.testing.assert_close(y[:size], x[rows].float().sum(1), rtol=1e-5, atol=1e-4)
