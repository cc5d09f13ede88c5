"""Atomics of every type and operation, also from many programs at once."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.cpu.arrays import integers, normal, poisoned

INTEGERS = [torch.int32, torch.int64, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@triton.jit
def _add_kernel(x_ptr, y_ptr, old_ptr, N, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n, mask=offs_n < N)
    old = tl.atomic_add(y_ptr + offs_n % 4, x, mask=offs_n < N)
    tl.store(old_ptr + offs_n, old, mask=offs_n < N)


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
def test_add(dtype):
    # whole numbers whose sums are exact in every type
    x, y, old = integers(0, 3, 100).to(dtype), torch.zeros(4).to(dtype), poisoned(100, dtype=dtype)
    _add_kernel[(7,)](x, y, old, 100, BLOCK_N=16)
    columns = x.double().view(25, 4)
    assert torch.equal(y.double(), columns.sum(0))
    # whatever the order was, one addition found a zero, and every old value is a sum of others
    assert (old.double().view(25, 4).amin(0) == 0).all() and (old.double().view(25, 4) <= y.double()).all()


@triton.jit
def _scalar_add_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=0)
    tl.atomic_add(y_ptr, tl.sum(x, 0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float64], ids=str)
def test_add_of_a_sum_a_program(dtype):
    x, y = integers(0, 9, 4000).to(dtype), torch.zeros(1, dtype=dtype)
    _scalar_add_kernel[(16,)](x, y, 4000, BLOCK_N=256)
    assert y[0] == x.sum()


@triton.jit
def _count_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=0)
    tl.atomic_add(y_ptr + x, 1, mask=offs_n < N)


def test_histogram_of_many_programs():
    x, y = integers(0, 50, 4000), torch.zeros(50, dtype=torch.int32)
    _count_kernel[(16,)](x, y, 4000, BLOCK_N=256)
    assert torch.equal(y, torch.bincount(x, minlength=50).int())


@triton.jit
def _fold_kernel(x_ptr, y_ptr, old_ptr, N, SHARE: tl.constexpr, OP: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n, mask=offs_n < N)
    y_ptrs = y_ptr + offs_n // SHARE
    mask = offs_n < N
    if OP == "max":
        old = tl.atomic_max(y_ptrs, x, mask=mask)
    elif OP == "min":
        old = tl.atomic_min(y_ptrs, x, mask=mask)
    elif OP == "and":
        old = tl.atomic_and(y_ptrs, x, mask=mask)
    elif OP == "or":
        old = tl.atomic_or(y_ptrs, x, mask=mask)
    elif OP == "xor":
        old = tl.atomic_xor(y_ptrs, x, mask=mask)
    else:
        old = tl.atomic_xchg(y_ptrs, x, mask=mask)
    tl.store(old_ptr + offs_n, old, mask=mask)


FOLDS = {
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "xchg": lambda old, new: new,
}


@pytest.mark.parametrize("op", FOLDS)
@pytest.mark.parametrize("dtype", [*INTEGERS, torch.float32, torch.float64], ids=str)
def test_folds_in_the_order_of_lanes(op, dtype):
    if dtype.is_floating_point and op in ("and", "or", "xor"):
        pytest.skip("for integers")
    # Triton folds floats in two steps, the positive lanes first: no two lanes on one place
    count, share = 60, 1 if dtype.is_floating_point and op != "xchg" else 2
    if dtype.is_floating_point:
        x, y = normal(count, dtype=dtype), normal(64, seed=1, dtype=dtype)
    else:
        bits = np.random.default_rng(0).integers(0, 1 << 64, count + 64, np.uint64).view(np.uint8)
        x = torch.from_numpy(bits.copy()).view(dtype)[:count].clone()
        y = torch.from_numpy(bits.copy()).view(dtype)[count : count + 64].clone()
    state, old, actual = y.numpy().copy(), poisoned(64, dtype=dtype), y.clone()
    _fold_kernel[(1,)](x, actual, old, count, SHARE=share, OP=op, BLOCK_N=64)
    found = []
    for lane, value in enumerate(x.numpy()):
        found.append(state[lane // share])
        state[lane // share] = FOLDS[op](state[lane // share], value)
    assert np.array_equal(actual.numpy(), state)
    assert np.array_equal(old.numpy()[:count], np.array(found))


@triton.jit
def _cas_kernel(x_ptr, old_ptr, expected_ptr, new_ptr):
    pid = tl.program_id(0)
    old = tl.atomic_cas(x_ptr + pid, tl.load(expected_ptr + pid), tl.load(new_ptr + pid))
    tl.store(old_ptr + pid, old)


@triton.jit
def _tile_cas_kernel(x_ptr, old_ptr, expected_ptr, new_ptr, N: tl.constexpr):
    offs_n = tl.arange(0, N)
    old = tl.atomic_cas(x_ptr + offs_n, tl.load(expected_ptr + offs_n), tl.load(new_ptr + offs_n))
    tl.store(old_ptr + offs_n, old)


@pytest.mark.parametrize(
    "dtype", [torch.int16, *INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_compare_and_swap(dtype):
    x, expected, new = integers(0, 2, 16).to(dtype), integers(0, 2, 16, seed=1).to(dtype), integers(5, 9, 16)
    new = new.to(dtype)
    wanted = torch.where(x.double() == expected.double(), new.double(), x.double())
    for kernel, grid, options in ((_cas_kernel, 16, {}), (_tile_cas_kernel, 1, {"N": 16})):
        y, old = x.clone(), poisoned(16, dtype=dtype)
        kernel[(grid,)](y, old, expected, new, **options)
        assert torch.equal(y.double(), wanted)
        assert torch.equal(old.double(), x.double())


@triton.jit
def _lock_kernel(lock_ptr, x_ptr, N):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    for _ in range(N):
        tl.store(x_ptr, tl.load(x_ptr, volatile=True) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


def test_spin_lock():
    lock, x = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    _lock_kernel[(200,)](lock, x, 10)
    assert x[0] == 2000 and lock[0] == 0


@triton.jit
def _ticket_kernel(x_ptr, partial_ptr, ticket_ptr, y_ptr, N, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    pid = tl.program_id(0)
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=0.0)
    tl.store(partial_ptr + pid, tl.sum(x, 0))
    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == SPLITS - 1:
        total = tl.sum(tl.load(partial_ptr + tl.arange(0, SPLITS), cache_modifier=".cg"), 0)
        tl.store(y_ptr, total)
        tl.store(ticket_ptr, 0)


def test_ticket_of_the_last_program():
    x, partial, ticket = integers(-9, 9, 1000).float(), poisoned(16), torch.zeros(1, dtype=torch.int32)
    for _ in range(300):
        y = poisoned(1)
        _ticket_kernel[(16,)](x, partial, ticket, y, 1000, SPLITS=16, BLOCK_N=64)
        assert y[0] == x.sum() and ticket[0] == 0
