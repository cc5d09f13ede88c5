"""Loads, stores and what lies between: a tile is read as a whole before the next store changes anything."""

import pytest
import torch
import triton
import triton.language as tl

from tests.cpu.arrays import integers, normal, poisoned


@triton.jit
def _flip_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs_n = tl.arange(0, N)
    tl.store(y_ptr + (N - 1 - offs_n), tl.load(x_ptr + offs_n) + 1)


@triton.jit
def _shift_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs_n = tl.arange(0, N)
    tl.store(x_ptr + offs_n + 1, tl.load(x_ptr + offs_n))
    tl.store(y_ptr + offs_n, tl.load(y_ptr + offs_n + 3))


@triton.jit
def _transpose_kernel(x_ptr, y_ptr, stride_xm, stride_xn, stride_ym, stride_yn, N: tl.constexpr):
    offs_m = tl.arange(0, N)[:, None]
    offs_n = tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offs_m * stride_xm + offs_n * stride_xn)
    tl.store(y_ptr + offs_n * stride_ym + offs_m * stride_yn, x)


@triton.jit
def _trans_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y_ptr + offs, tl.trans(tl.load(x_ptr + offs)))


@triton.jit
def _scatter_kernel(x_ptr, index_ptr, y_ptr, N: tl.constexpr):
    offs_n = tl.arange(0, N)
    tl.store(y_ptr + tl.load(index_ptr + offs_n), tl.load(x_ptr + offs_n))


@triton.jit
def _exchange_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs_n = tl.arange(0, N)
    x = tl.load(x_ptr + offs_n)
    y = tl.load(y_ptr + offs_n)
    tl.store(y_ptr + offs_n, x)
    tl.store(x_ptr + offs_n, y)
    tl.store(x_ptr + offs_n, tl.load(x_ptr + offs_n) - tl.load(y_ptr + offs_n))


@pytest.mark.parametrize("in_place", [False, True])
def test_output_that_is_the_input(in_place):
    x = integers(-99, 99, 64)
    y = x.clone() if in_place else poisoned(64, dtype=torch.int32)
    _flip_kernel[(1,)](y if in_place else x, y, N=64)
    assert torch.equal(y, x.flip(0) + 1)

    square = integers(-99, 99, 16, 16)
    y = square.clone() if in_place else poisoned(16, 16, dtype=torch.int32)
    _transpose_kernel[(1,)](y if in_place else square, y, 16, 1, 16, 1, N=16)
    assert torch.equal(y, square.T)
    y = square.clone() if in_place else poisoned(16, 16, dtype=torch.int32)
    _trans_kernel[(1,)](y if in_place else square, y, N=16)
    assert torch.equal(y, square.T)

    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    y = x.clone() if in_place else poisoned(64, dtype=torch.int32)
    _scatter_kernel[(1,)](y if in_place else x, order, y, N=64)
    assert torch.equal(y[order], x)


def test_index_that_is_the_output():
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    x = y = order.clone()
    _scatter_kernel[(1,)](x, x, y, N=64)
    assert torch.equal(y[order], order)


def test_shift_within_a_tensor():
    x, y = integers(-99, 99, 80), integers(-99, 99, 80, seed=1)
    a, b = x.clone(), y.clone()
    _shift_kernel[(1,)](a, b, N=64)
    x[1:65], y[:64] = x[:64].clone(), y[3:67].clone()
    assert torch.equal(a, x) and torch.equal(b, y)


def test_tiles_exchanged_through_memory():
    x, y = integers(-99, 99, 64), integers(-99, 99, 64, seed=1)
    a, b = x.clone(), y.clone()
    _exchange_kernel[(1,)](a, b, N=64)
    assert torch.equal(a, y - x) and torch.equal(b, x)


@triton.jit
def _loop_shift_kernel(x_ptr, N, BLOCK_N: tl.constexpr):
    x_ptrs = x_ptr + tl.arange(0, BLOCK_N)
    for _ in range(0, N, BLOCK_N // 2):
        tl.store(x_ptrs + 1, tl.load(x_ptrs) * 2)
        x_ptrs += BLOCK_N // 2


def test_shift_through_pointers_that_a_loop_advances():
    x = integers(-9, 9, 64)
    y = x.clone()
    _loop_shift_kernel[(1,)](y, 40, BLOCK_N=16)
    for n in range(0, 40, 8):
        x[n + 1 : n + 17] = 2 * x[n : n + 16].clone()
    assert torch.equal(x, y)


@triton.jit
def _late_use_kernel(x_ptr, y_ptr, flag, N: tl.constexpr):
    offs_n = tl.arange(0, N)
    before = tl.load(x_ptr + offs_n)
    if flag > 0:
        tl.store(x_ptr + offs_n, before * 0 - 7)
    for i in range(flag):
        tl.atomic_add(x_ptr + offs_n, i)
    after = tl.load(x_ptr + offs_n)
    tl.store(y_ptr + offs_n, before)
    tl.store(y_ptr + N + offs_n, after)


@pytest.mark.parametrize("flag", [0, 4])
def test_loads_stay_before_stores_in_branches_and_loops(flag):
    x, y = integers(-99, 99, 32), poisoned(2, 32, dtype=torch.int32)
    _late_use_kernel[(1,)](x.clone(), y, flag, N=32)
    assert torch.equal(y[0], x)
    assert torch.equal(y[1], torch.full_like(x, -7 + 6) if flag else x)


@triton.jit
def _self_product_kernel(x_ptr, y_ptr, z_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offs)
    acc = x * 0.5
    for _ in range(3):
        acc = tl.dot(acc, acc, acc, input_precision="ieee")
    tl.store(y_ptr + offs, acc)
    w = x + 1.0
    tl.store(z_ptr + offs, w)
    tl.store(z_ptr + offs, tl.dot(w, x, w * 2, input_precision="ieee"))


@pytest.mark.parametrize("size", [4, 16])
def test_product_of_a_tile_with_itself_on_itself(size):
    x = normal(size, size) / size
    y, z = poisoned(size, size), poisoned(size, size)
    _self_product_kernel[(1,)](x, y, z, N=size)
    acc = x.double() * 0.5
    for _ in range(3):
        acc = acc @ acc + acc
    w = x.double() + 1
    torch.testing.assert_close(y.double(), acc, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(z.double(), w @ x.double() + 2 * w, rtol=1e-5, atol=1e-6)


@triton.jit
def _first_element_kernel(x_ptr, y_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 1))
    first = x.item()
    x = x * 3 + first
    tl.store(y_ptr + tl.arange(0, 1), x)
    tl.store(y_ptr + 1 + tl.arange(0, N), tl.load(x_ptr + tl.arange(0, N)) + first)


def test_tile_of_one_element():
    x, y = normal(16), poisoned(17)
    _first_element_kernel[(1,)](x, y, N=16)
    torch.testing.assert_close(y, torch.cat([4 * x[:1], x + x[0]]))


@triton.jit
def _strided_kernel(
    x_ptr,
    y_ptr,
    M,
    N,
    stride_xm,
    stride_xn,
    stride_ym,
    stride_yn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = tl.load(x_ptr + offs_m[:, None].to(tl.int64) * stride_xm + offs_n[None, :] * stride_xn, mask=mask)
    tl.store(y_ptr + offs_m[:, None] * stride_ym + offs_n[None, :] * stride_yn, x, mask=mask)


LAYOUTS = {
    "rows": lambda x: x.contiguous(),
    "columns": lambda x: x.T.contiguous().T,
    "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "every third": lambda x: x.repeat_interleave(3, 1)[:, ::3],
    "one row": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_strides(layout, dtype):
    x = LAYOUTS[layout](normal(19, 37).mul(100).to(dtype))
    y = torch.empty_strided((19, 37), (1, 23), dtype=dtype)
    _strided_kernel[(2, 3)](x, y, 19, 37, *x.stride(), *y.stride(), BLOCK_M=16, BLOCK_N=16)
    assert torch.equal(x, y)


def test_strides_beyond_32_bits():
    # rows 2^40 elements apart, all but the first of them masked out
    x = normal(64)
    far = torch.as_strided(x, (1, 64), (1 << 40, 1))
    y = poisoned(1, 64)
    _strided_kernel[(1, 4)](far, y, 1, 64, *far.stride(), *y.stride(), BLOCK_M=16, BLOCK_N=16)
    assert torch.equal(y, far)


@triton.jit
def _far_kernel(x_ptr, y_ptr, stride_xm, BLOCK_N: tl.constexpr):
    pid_m = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    # back by as much as forward: the sum of both is small, either alone is not
    x_ptrs = x_ptr + (pid_m + 3) * stride_xm + offs_n
    tl.store(
        y_ptr + pid_m * BLOCK_N + offs_n, tl.load(x_ptrs - 3 * stride_xm - pid_m * (stride_xm - BLOCK_N))
    )


def test_offsets_beyond_32_bits():
    x, y = normal(4, 16), poisoned(4, 16)
    _far_kernel[(4,)](x, y, (1 << 37) + 1, BLOCK_N=16)
    assert torch.equal(x, y)


@triton.jit
def _table_kernel(table_ptr, y_ptr, N: tl.constexpr):
    offs_n = tl.arange(0, N)
    row = tl.program_id(0)
    x_ptr = tl.load(table_ptr + row).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr + row * N + offs_n, tl.load(x_ptr + offs_n) * 2)


def test_pointers_in_memory():
    rows = [normal(32, seed=seed) for seed in range(3)]
    table, y = torch.tensor([row.data_ptr() for row in rows]), poisoned(3, 32)
    _table_kernel[(3,)](table, y, N=32)
    assert torch.equal(y, 2 * torch.stack(rows))


@triton.jit
def _chosen_pointer_kernel(a_ptr, b_ptr, y_ptr, N: tl.constexpr):
    pid_m = tl.program_id(0)
    offs_n = tl.arange(0, N)
    x_ptr = a_ptr if pid_m % 2 == 0 else b_ptr + N
    x = tl.load(tl.where(offs_n % 3 == 0, x_ptr + offs_n, b_ptr + offs_n))
    tl.store(y_ptr + pid_m * N + offs_n, x)


def test_pointers_that_are_chosen():
    a, b, y = normal(32), normal(64, seed=1), poisoned(2, 32)
    _chosen_pointer_kernel[(2,)](a, b, y, N=32)
    third = torch.arange(32) % 3 == 0
    assert torch.equal(y, torch.stack([torch.where(third, a, b[:32]), torch.where(third, b[32:], b[:32])]))


@triton.jit
def _words_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs_n = tl.arange(0, N)
    # floats written, the same bytes read as integers
    tl.store(y_ptr + offs_n, tl.load(x_ptr + offs_n) * 2)
    words = tl.load(y_ptr.to(tl.pointer_type(tl.int32)) + offs_n)
    tl.store(y_ptr.to(tl.pointer_type(tl.int32)) + offs_n, words ^ -2147483648)
    tl.store(x_ptr + offs_n, tl.load(y_ptr + offs_n))


def test_bytes_read_as_another_type():
    x, y = normal(64), poisoned(64)
    a = x.clone()
    _words_kernel[(1,)](a, y, N=64)
    assert torch.equal(y, -2 * x) and torch.equal(a, y)


@triton.jit
def _bool_index_kernel(x_ptr, index_ptr, y_ptr, N: tl.constexpr):
    offs_n = tl.arange(0, N)
    index = tl.load(index_ptr + offs_n)
    tl.store(y_ptr + offs_n, tl.load(x_ptr + tl.where(index < 0, 0, 1)))
    tl.store(y_ptr + N + offs_n, tl.load(x_ptr + (index > 3)))
    tl.store(y_ptr + 2 * N + offs_n, tl.load(x_ptr + ((index > 3) | (index < -3)).to(tl.int64)))
    table = tl.load(x_ptr + offs_n)
    tl.store(y_ptr + 3 * N + offs_n, tl.gather(table, (index == 2).to(tl.int32), 0))


def test_comparisons_as_indices():
    x, index, y = normal(64), integers(-9, 9, 64), poisoned(4, 64)
    _bool_index_kernel[(1,)](x, index, y, N=64)
    chosen = [index >= 0, index > 3, (index > 3) | (index < -3), index == 2]
    assert torch.equal(y, torch.stack([x[c.long()] for c in chosen]))


@triton.jit
def _modifiers_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs_n = tl.max_contiguous(tl.multiple_of(tl.arange(0, N), 8), 8)
    x = tl.load(x_ptr + offs_n, cache_modifier=".cg", eviction_policy="evict_first", volatile=True)
    tl.assume(N > 0)
    tl.store(y_ptr + offs_n, x, cache_modifier=".wb", eviction_policy="evict_last")


def test_cache_modifiers_and_hints():
    x, y = normal(64), poisoned(64)
    _modifiers_kernel[(1,)](x, y, N=64)
    assert torch.equal(x, y)
