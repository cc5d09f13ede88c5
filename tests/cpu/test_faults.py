"""Kernels that access what they must not or leave elements unwritten, blamed at their line; twins are not."""

import re
import sys

import pytest
import torch
import triton
import triton.language as tl

from tests.cpu.arrays import normal, poisoned
from tests.cpu.checked import check, faults, name, place
from tests.kernels.test_large_offsets import far_apart


def vectors() -> tuple[torch.Tensor, torch.Tensor, int]:
    """60 elements in and out, which 4 programs of 16 cover, the last with a tail."""
    return normal(60), poisoned(60), 60


def matrices() -> tuple[torch.Tensor, torch.Tensor, int, int, int]:
    """[4, 10] in and out with a gap between the rows, and their stride: a program a row."""
    return normal(4, 26)[:, 3:13], poisoned(4, 26)[:, 3:13], 4, 10, 26


# ---- bounds


@triton.jit
def load_past_the_end(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.program_id(0) * 16 + tl.arange(0, 16)
    x = tl.load(x_ptr + offs, mask=offs < N + WRONG, other=0)  # fault
    tl.store(y_ptr + offs, x, mask=offs < N)


@triton.jit
def load_before_the_start(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.program_id(0) * 16 + tl.arange(0, 16)
    x = tl.load(x_ptr + offs - WRONG, mask=offs < N, other=0)  # fault
    tl.store(y_ptr + offs, x, mask=offs < N)


@triton.jit
def store_past_the_end(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.program_id(0) * 16 + tl.arange(0, 16)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0)
    tl.store(y_ptr + offs, x, mask=offs < N + WRONG)  # fault


@triton.jit
def store_before_the_start(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.program_id(0) * 16 + tl.arange(0, 16) - WRONG
    x = tl.load(x_ptr + offs, mask=(offs >= 0) & (offs < N), other=0)
    tl.store(y_ptr + offs, x, mask=offs < N - WRONG)  # fault


@triton.jit
def load_without_mask(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.program_id(0) * 16 + tl.arange(0, 16)
    # no lane that is stored comes from outside: only the load itself is wrong
    x = tl.load(x_ptr + offs, mask=(offs < N) | (WRONG == 1), other=0)  # fault
    tl.store(y_ptr + offs, x, mask=offs < N)


@triton.jit
def store_without_mask(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.program_id(0) * 16 + tl.arange(0, 16)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0)
    if WRONG:
        tl.store(y_ptr + offs, x)  # fault
    else:
        tl.store(y_ptr + offs, x, mask=offs < N)


@triton.jit
def loop_runs_once_too_often(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    total = 0.0
    for i in range(N + WRONG):
        total += tl.load(x_ptr + i)  # fault
    offs = tl.program_id(0) * 16 + tl.arange(0, 16)
    tl.store(y_ptr + offs, offs * total, mask=offs < N)


@triton.jit
def loop_advances_before_it_loads(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.arange(0, 16)
    x_ptrs = x_ptr + offs + WRONG * 16
    total = tl.zeros([16], tl.float32)
    for i in range(0, N, 16):
        total += tl.load(x_ptrs, mask=offs < N - i, other=0)  # fault
        x_ptrs += 16
    offs += tl.program_id(0) * 16
    tl.store(y_ptr + offs, total, mask=offs < N)


@triton.jit
def loop_goes_down_too_far(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    i = N - 1
    offs = tl.program_id(0) * 16 + tl.arange(0, 16)
    total = tl.zeros([16], tl.float32)
    while i >= 0 - WRONG:
        total += tl.load(x_ptr + i)  # fault
        i -= 1
    tl.store(y_ptr + offs, total, mask=offs < N)


@triton.jit
def program_starts_a_block_late(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    pid = tl.program_id(0)
    offs = tl.arange(0, 16)
    mask = offs < N - pid * 16
    x = tl.load(x_ptr + (pid + WRONG) * 16 + offs, mask=mask, other=0)  # fault
    tl.store(y_ptr + pid * 16 + offs, x, mask=mask)


@triton.jit
def pointer_from_a_branch(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.program_id(0) * 16 + tl.arange(0, 16)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0)
    tl.store(y_ptr + offs, x, mask=offs < N)
    ptrs = x_ptr + offs
    if tl.program_id(0) == 3:
        ptrs = y_ptr + offs + WRONG
    x = tl.load(ptrs, mask=offs < N, other=0)  # fault
    tl.store(y_ptr + offs, x, mask=offs < N)


@triton.jit
def index_from_memory(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.program_id(0) * 16 + tl.arange(0, 16)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0)
    at = tl.where(x > -9, N - 1 + WRONG, 0)
    x = tl.load(x_ptr + at, mask=offs < N, other=0)  # fault
    tl.store(y_ptr + offs, x, mask=offs < N)


@triton.jit
def atomic_past_the_end(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.program_id(0) * 16 + tl.arange(0, 16)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0)
    tl.atomic_add(y_ptr + offs, x, mask=offs < N + WRONG)  # fault


@triton.jit
def pointers_with_new_names(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.program_id(0) * 16 + tl.arange(0, 16)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0)
    tl.store(y_ptr + offs, x, mask=offs < N)
    # Triton calls both arguments by the name of the variable
    ptr = x_ptr
    if N > 16:
        ptr = y_ptr
    tl.store(ptr + offs, x, mask=offs < N + WRONG)  # fault


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (load_past_the_end, "program 3 reads element 60 of x_ptr, which has elements 0 to 59"),
        (load_before_the_start, "program 0 reads element -1 of x_ptr"),
        (store_past_the_end, "program 3 writes element 60 of y_ptr, which has elements 0 to 59"),
        (store_before_the_start, "program 0 writes element -1 of y_ptr"),
        (load_without_mask, "program 3 reads element 60 of x_ptr"),
        (store_without_mask, "program 3 writes element 60 of y_ptr"),
        (loop_runs_once_too_often, "program 0 reads element 60 of x_ptr"),
        (loop_advances_before_it_loads, "program 0 reads element 60 of x_ptr"),
        (loop_goes_down_too_far, "program 0 reads element -1 of x_ptr"),
        (program_starts_a_block_late, "program 2 reads element 60 of x_ptr"),
        (pointer_from_a_branch, "program 3 reads element 60 of y_ptr"),
        (pointers_with_new_names, "program 3 writes element 60 of y_ptr, which"),
        (index_from_memory, "program 0 reads element 60 of x_ptr"),
        (atomic_past_the_end, "program 3 updates element 60 of y_ptr"),
    ],
    ids=name,
)
def test_bounds(kernel, what):
    def make():
        x, y, N = vectors()
        return x, y.zero_() if kernel is atomic_past_the_end else y, N

    check(kernel, what, make)


@triton.jit
def row_past_the_last(x_ptr, y_ptr, M, N, stride, WRONG: tl.constexpr):
    m, offs = tl.program_id(0), tl.arange(0, 16)
    x = tl.load(x_ptr + (m + WRONG) * stride + offs, mask=offs < N, other=0)  # fault
    tl.store(y_ptr + m * stride + offs, x, mask=offs < N)


@triton.jit
def column_past_the_last(x_ptr, y_ptr, M, N, stride, WRONG: tl.constexpr):
    m, offs = tl.program_id(0), tl.arange(0, 16)
    x = tl.load(x_ptr + m * stride + offs, mask=offs < N + WRONG, other=0)  # fault
    tl.store(y_ptr + m * stride + offs, x, mask=offs < N)


@triton.jit
def store_into_a_gap(x_ptr, y_ptr, M, N, stride, WRONG: tl.constexpr):
    m, offs = tl.program_id(0), tl.arange(0, 16)
    x = tl.load(x_ptr + m * stride + offs, mask=offs < N, other=0)
    tl.store(y_ptr + m * stride + offs, x, mask=offs < N + WRONG)  # fault


@triton.jit
def wrong_stride(x_ptr, y_ptr, M, N, stride, WRONG: tl.constexpr):
    offs_m, offs = tl.arange(0, 4)[:, None], tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + offs_m * (stride - WRONG) + offs, mask=offs < N, other=0)  # fault
    tl.store(y_ptr + offs_m * stride + offs, x, mask=offs < N)


@triton.jit
def strides_swapped(x_ptr, y_ptr, M, N, stride, WRONG: tl.constexpr):
    offs_m, offs = tl.arange(0, 4)[:, None], tl.arange(0, 16)[None, :]
    if WRONG:
        x = tl.load(x_ptr + offs_m + offs * stride, mask=offs < N, other=0)  # fault
    else:
        x = tl.load(x_ptr + offs_m * stride + offs, mask=offs < N, other=0)
    tl.store(y_ptr + offs_m * stride + offs, x, mask=offs < N)


@triton.jit
def rows_of_a_product_without_mask(x_ptr, y_ptr, M, N, stride, WRONG: tl.constexpr):
    offs_m, offs = tl.arange(0, 16), tl.arange(0, 16)
    mask = (offs_m[:, None] < M + WRONG) & (offs[None, :] < N)
    x = tl.load(x_ptr + offs_m[:, None] * stride + offs[None, :], mask=mask, other=0)  # fault
    y = tl.dot(x, tl.trans(x), input_precision="ieee")
    mask = (offs_m[:, None] < M) & (offs[None, :] < N)
    tl.store(y_ptr + offs_m[:, None] * stride + offs[None, :], y, mask=mask)


@pytest.mark.parametrize(
    ("kernel", "grid", "what"),
    [
        (row_past_the_last, 4, "program 3 reads element 104 of x_ptr"),
        (column_past_the_last, 4, r"program 0 reads element 10 of x_ptr, a gap in its shape \(4, 10\)"),
        (store_into_a_gap, 4, r"program 0 writes element 10 of y_ptr, a gap .* strides \(26, 1\)"),
        (wrong_stride, 1, "program 0 reads element 25 of x_ptr, a gap"),
        (strides_swapped, 1, "program 0 reads element 104 of x_ptr, which has elements 0 to 87"),
        (rows_of_a_product_without_mask, 1, "program 0 reads element 104 of x_ptr"),
    ],
    ids=name,
)
def test_bounds_of_rows(kernel, grid, what):
    check(kernel, what, matrices, grid)


# ---- what is not written


@triton.jit
def tail_is_left(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.program_id(0) * 16 + tl.arange(0, 16)
    tl.store(y_ptr + offs, offs, mask=offs < N - WRONG)  # fault


@triton.jit
def a_block_is_left(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    pid = tl.program_id(0)
    offs = (pid if pid > 0 else WRONG) * 16 + tl.arange(0, 16)
    tl.store(y_ptr + offs, offs, mask=offs < N)  # fault


@triton.jit
def mask_is_too_narrow(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.program_id(0) * 16 + tl.arange(0, 16)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0)
    tl.store(y_ptr + offs, x, mask=(offs < N) & ((x > 0) | (WRONG == 0)))  # fault


@triton.jit
def loop_ends_too_early(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    pid, offs = tl.program_id(0), tl.arange(0, 4)
    for i in range(0, 16 - WRONG * 4, 4):
        at = pid * 16 + i + offs
        tl.store(y_ptr + at, at, mask=at < N)  # fault


@triton.jit
def every_other_element(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.program_id(0) * 16 + tl.arange(0, 16) * (1 + WRONG)
    tl.store(y_ptr + offs, offs, mask=offs < N)  # fault


@triton.jit
def empty_program_stores_nothing(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * 16 + tl.arange(0, 16)
    if (pid < 2) | (WRONG == 0):
        tl.store(y_ptr + offs, offs, mask=offs < N)  # fault


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (tail_is_left, r"no program writes 1 elements of y_ptr, the first at \[59\]"),
        (a_block_is_left, r"no program writes 16 elements of y_ptr, the first at \[0\]"),
        (mask_is_too_narrow, r"no program writes \d+ elements of y_ptr"),
        (loop_ends_too_early, r"no program writes 12 elements of y_ptr, the first at \[12\]"),
        (every_other_element, r"no program writes 30 elements of y_ptr, the first at \[1\]"),
        (empty_program_stores_nothing, r"no program writes 28 elements of y_ptr, the first at \[32\]"),
    ],
    ids=name,
)
def test_unwritten(kernel, what):
    check(kernel, what, vectors)


@triton.jit
def stores_of_two_halves(y_ptr, N):
    offs = tl.program_id(0) * 16 + tl.arange(0, 16)
    if tl.program_id(0) < 2:
        tl.store(y_ptr + offs, offs)  # first
    else:
        tl.store(y_ptr + offs, offs, mask=offs < N - 1)  # second


def test_unwritten_output_of_two_stores():
    (found,) = faults(stores_of_two_halves, 4, poisoned(60), 60)
    first, second = (place(stores_of_two_halves, marker) for marker in ("# first", "# second"))
    assert re.match(f"kernel stores_of_two_halves, {first} and {second}: no program writes 1 elements", found)


@triton.jit
def one_of_two_outputs(y_ptr, z_cache_ptr, N):
    ptr = y_ptr
    if N > 16:
        ptr = z_cache_ptr
    tl.store(ptr + tl.arange(0, 16), 1.0)


def test_unwritten_outputs_with_new_names():
    # what is called a cache may be written in part, whatever variable its pointer is assigned to
    (found,) = faults(one_of_two_outputs, 1, poisoned(20), poisoned(20), 20)
    assert found.endswith("no program writes 20 elements of y_ptr, the first at [0]")


@triton.jit
def columns_are_left(x_ptr, y_ptr, M, N, stride, WRONG: tl.constexpr):
    m, offs = tl.program_id(0), tl.arange(0, 16)
    x = tl.load(x_ptr + m * stride + offs, mask=offs < N, other=0)
    tl.store(y_ptr + m * stride + offs, x, mask=offs < N - WRONG)  # fault


def test_unwritten_columns_of_a_view():
    check(columns_are_left, r"no program writes 4 elements of y_ptr, the first at \[0, 9\]", matrices)


# ---- offsets and addresses


@triton.jit
def offset_of_32_bits(x_ptr, y_ptr, stride, WRONG: tl.constexpr):
    m, offs = tl.program_id(0), tl.arange(0, 16)
    row = m if WRONG else m.to(tl.int64)
    x = tl.load(x_ptr + row * stride + offs)  # fault
    tl.store(y_ptr + m * 16 + offs, x)


@pytest.mark.skipif(sys.platform != "linux", reason="reserves memory without using it")
def test_offset_that_overflows():
    def make():
        return far_apart(normal(3, 16), 0, 2**30), poisoned(3, 16), 2**30

    check(offset_of_32_bits, f"program 2 reads element -{2**31} of x_ptr", make, 3)


@triton.jit
def pointers_from_memory(address_ptr, y_ptr, N):
    m, offs = tl.program_id(0), tl.arange(0, 16)
    ptr = tl.load(address_ptr + m).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr + m * 16 + offs, tl.load(ptr + offs, mask=offs < N, other=0))


def test_pointers_from_memory_may_point_anywhere():
    rows = [normal(10, seed=seed) for seed in range(3)]
    y, addresses = poisoned(3, 16), torch.tensor([row.data_ptr() for row in rows])
    assert faults(pointers_from_memory, 3, addresses, y, 10) == []
    assert torch.equal(y[:, :10], torch.stack(rows))
