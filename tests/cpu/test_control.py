"""Loops, branches, early returns and what they carry."""

import pytest
import torch
import triton
import triton.language as tl

from tests.cpu.arrays import integers, normal, poisoned
from tests.strategies import assert_close


@triton.jit
def _while_kernel(x_ptr, y_ptr, N):
    i = 0
    acc = 0.0
    while i < N:
        x = tl.load(x_ptr + i)
        if x > 0:
            acc += x
        else:
            acc -= x * 2
        i += 1
    tl.store(y_ptr, acc)


@pytest.mark.parametrize("size", [0, 1, 200])
def test_while_around_if(size):
    x, y = normal(200), poisoned(1)
    _while_kernel[(1,)](x, y, size)
    head = x[:size].double()
    assert_close(y, torch.where(head > 0, head, -2 * head).sum()[None], torch.float32)


@triton.jit
def _collatz_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    for n in range(N):
        x = tl.load(x_ptr + n)
        steps = 0
        while x != 1:
            if x % 2 == 0:
                while (x % 2 == 0) and (x > 1):
                    x = x // 2
                    steps += 1
            else:
                x = 3 * x + 1
                steps += 1
        tl.store(y_ptr + n, steps)


def collatz(x: int) -> int:
    steps = 0
    while x != 1:
        x, steps = (x // 2 if x % 2 == 0 else 3 * x + 1), steps + 1
    return steps


def test_while_in_if_in_while_in_for():
    x, y = integers(1, 1000, 50), poisoned(50, dtype=torch.int32)
    _collatz_kernel[(1,)](x, y, 50, BLOCK_N=1)
    assert y.tolist() == [collatz(n) for n in x.tolist()]


@triton.jit
def _tile_while_kernel(x_ptr, y_ptr, limit, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n)
    steps = 0
    while tl.max(tl.abs(x), 0) > limit:
        x = x * 0.5 - 0.125
        steps += 1
    tl.store(y_ptr + offs_n, x + steps)


def test_while_carries_a_tile():
    x, y = normal(32), poisoned(32)
    _tile_while_kernel[(1,)](x, y, 0.3, BLOCK_N=32)
    steps = 0
    while x.abs().max() > 0.3:
        x, steps = x * 0.5 - 0.125, steps + 1
    assert steps > 1
    assert_close(y, x.double() + steps, torch.float32)


@triton.jit
def _branch_kernel(x_ptr, y_ptr, flag, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n)
    kept = x
    n = 1
    if flag > 0:
        x = x + 1
        if flag > 1:
            x = x * kept
            n = 5
        else:
            kept = -x
    elif flag == 0:
        x, kept = kept * 2, x
    tl.store(y_ptr + offs_n, x + kept * n)


@pytest.mark.parametrize("flag", [-1, 0, 3, 2])
def test_tiles_out_of_branches(flag):
    x, y = normal(64), poisoned(64)
    _branch_kernel[(1,)](x, y, flag, BLOCK_N=64)
    expected = {-1: 2 * x, 0: 3 * x, 3: (x + 1) * x + 5 * x, 2: (x + 1) * x + 5 * x}[flag]
    assert_close(y, expected.double(), torch.float32)


def test_tiles_out_of_a_branch_that_is_not_taken():
    # 1 is a constant of the kernel's specialisation, so the branch is taken away while compiling
    x, y = normal(64), poisoned(64)
    _branch_kernel[(1,)](x, y, 1, BLOCK_N=64)
    assert torch.equal(y, torch.zeros(64))


@triton.jit
def _return_first_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    pid_n = tl.program_id(0)
    if pid_n * BLOCK_N >= N:
        return
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(y_ptr + offs_n, tl.load(x_ptr + offs_n) * 2)


def test_early_return_before_stores():
    x, y = normal(128), poisoned(128)
    _return_first_kernel[(8,)](x, y, 64, BLOCK_N=16)
    assert torch.equal(y[:64], 2 * x[:64]) and y[64:].isnan().all()


@triton.jit
def _return_later_kernel(x_ptr, y_ptr, flag, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n)
    n = 2
    tl.store(y_ptr + offs_n, x)
    if flag < 0:
        return
    if flag > 5:
        x = x * x
        n = 7
        if flag > 9:
            tl.store(y_ptr + offs_n, x - n)
            return
    tl.store(y_ptr + offs_n, x + n)


@pytest.mark.parametrize("flag", [-3, 3, 7, 11])
def test_early_return_after_stores_with_values_carried_over_it(flag):
    x, y = normal(64), poisoned(64)
    _return_later_kernel[(1,)](x, y, flag, BLOCK_N=64)
    expected = x if flag < 0 else x + 2 if flag == 3 else x * x + 7 if flag == 7 else x * x - 7
    assert_close(y, expected.double(), torch.float32)


@triton.jit
def _barrier_kernel(x_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    tl.store(y_ptr + offs_n, tl.load(x_ptr + offs_n))
    tl.debug_barrier()
    turned = tl.load(y_ptr + (BLOCK_N - 1 - offs_n))
    tl.debug_barrier()
    tl.store(y_ptr + offs_n, turned)


def test_debug_barrier():
    x, y = normal(64), poisoned(64)
    _barrier_kernel[(1,)](x, y, BLOCK_N=64)
    assert torch.equal(y, x.flip(0))


@triton.jit
def _pointer_loop_kernel(
    x_ptr, y_ptr, M, N, stride_xm, stride_ym, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask_m = offs_m < M
    x_ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :]
    y_ptrs = y_ptr + offs_m[:, None] * stride_ym + offs_n[None, :]
    total = tl.zeros((BLOCK_M,), tl.float32)
    for n in range(0, N, BLOCK_N):
        mask = mask_m[:, None] & (offs_n[None, :] < N - n)
        x = tl.load(x_ptrs, mask=mask, other=0.0)
        total += tl.sum(x, 1)
        tl.store(y_ptrs, x + total[:, None], mask=mask)
        x_ptrs += BLOCK_N
        y_ptrs += BLOCK_N
    # where the pointers stand behind the loop
    tl.store(y_ptrs - BLOCK_N - offs_n[None, :] + N % BLOCK_N, total[:, None], mask=mask_m[:, None])


def test_pointers_that_a_loop_advances():
    x = normal(10, 50)
    y = torch.full((10, 64), float("nan"))
    _pointer_loop_kernel[(3,)](x, y, 10, 50, 50, 64, BLOCK_M=4, BLOCK_N=16)
    blocks = sums_to_block_end(x.double(), 16)
    assert_close(y[:, :50], blocks[:, :50] + x.double(), torch.float32)
    assert_close(y[:, 50], x.double().sum(1), torch.float32)
    assert y[:, 51:].isnan().all()


def sums_to_block_end(x: torch.Tensor, size: int) -> torch.Tensor:
    """The sum of each row up to the end of the block that an element is in."""
    ends = [min((n // size + 1) * size, x.shape[1]) for n in range(x.shape[1])]
    return torch.stack([x[:, :end].sum(1) for end in ends], 1)


@triton.jit
def _index_loop_kernel(x_ptr, y_ptr, M, N, stride_xm, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    index = offs_n
    x_ptrs = x_ptr + offs_n
    last_ptrs = x_ptr + N + offs_n
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for m in range(M):
        for n in range(0, N, BLOCK_N):
            acc += tl.load(x_ptrs + n, mask=index + n < N, other=0.0) * (m + 1)
        last_ptrs = x_ptrs
        x_ptrs += stride_xm
        index = index + 0
    tl.store(y_ptr + offs_n, acc - tl.load(last_ptrs, mask=offs_n < N, other=0.0))


@pytest.mark.parametrize("rows", [1, 5])
def test_pointers_of_the_last_iteration(rows):
    x, y = normal(5, 40), poisoned(16)
    _index_loop_kernel[(1,)](x, y, rows, 40, 40, BLOCK_N=16)
    padded = torch.nn.functional.pad(x.double(), (0, 8)).view(5, 3, 16).sum(1)[:rows]
    expected = (padded * torch.arange(1.0, rows + 1)[:, None]).sum(0) - x[rows - 1, :16].double()
    assert_close(y, expected, torch.float32)


@triton.jit
def _swap_kernel(x_ptr, y_ptr, z_ptr, N, BLOCK_N: tl.constexpr):
    offs = tl.arange(0, BLOCK_N)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    a = tl.load(x_ptr + offs)
    b = tl.load(y_ptr + offs)
    c = a * 0
    for _ in range(N):
        a, b, c = tl.trans(b), a + c, a
    tl.store(x_ptr + offs, a)
    tl.store(y_ptr + offs, b)
    tl.store(z_ptr + offs, c)


@pytest.mark.parametrize("steps", [0, 2, 7])
def test_tiles_swapped_in_a_loop(steps):
    a, b = integers(-99, 99, 16, 16), integers(-99, 99, 16, 16, seed=1)
    x, y, z = a.clone(), b.clone(), poisoned(16, 16, dtype=torch.int32)
    _swap_kernel[(1,)](x, y, z, steps, BLOCK_N=16)
    c = torch.zeros_like(a)
    for _ in range(steps):
        a, b, c = b.T, a + c, a
    assert torch.equal(x, a) and torch.equal(y, b) and torch.equal(z, c)


@triton.jit
def _shift_in_loop_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    offs = tl.arange(0, BLOCK_N)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    a = tl.load(x_ptr + offs)
    for _ in range(N):
        # reads the carried tile at other places than it writes
        a = tl.trans(a) + tl.sum(a, 1)[:, None] - tl.flip(a, 1)
    tl.store(y_ptr + offs, a)


def test_carried_tile_that_reads_itself_elsewhere():
    a, y = integers(-9, 9, 16, 16), poisoned(16, 16, dtype=torch.int32)
    _shift_in_loop_kernel[(1,)](a, y, 3, BLOCK_N=16)
    for _ in range(3):
        a = (a.T + a.sum(1, dtype=torch.int32)[:, None] - a.flip(1)).to(torch.int32)
    assert torch.equal(y, a)


@triton.jit
def _countdown_kernel(y_ptr, start, stop, low):
    n = 0
    for i in range(start, stop, -3):
        tl.store(y_ptr + n, i)
        n += 1
    for j in range(low, low + 3):
        tl.store(y_ptr + n, j)
        n += 1
    for k in range(stop, start, 1):
        tl.store(y_ptr, k)


def test_loops_down_and_from_negative_bounds():
    y = poisoned(8, dtype=torch.int32)
    _countdown_kernel[(1,)](y, 10, -2, -1)
    assert y[1:7].tolist() == [7, 4, 1, -1, 0, 1] and y[0] == 9


@triton.jit
def _wide_loop_kernel(y_ptr, start, count):
    for i in range(start, start + count):
        tl.store(y_ptr + (i - start), i)


def test_loop_over_int64():
    y = poisoned(3, dtype=torch.int64)
    _wide_loop_kernel[(1,)](y, 1 << 40, 3)
    assert y.tolist() == [1 << 40, (1 << 40) + 1, (1 << 40) + 2]
