"""Kernels whose programs race: each is blamed at its line, and its correct twin is not."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl

from tests.cpu.arrays import normal, poisoned
from tests.cpu.checked import check, faults, name, place


@triton.jit
def two_programs_write_one_element(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.program_id(0) * 16 + tl.arange(0, 16)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, x)
    tl.store(y_ptr + offs % (64 - WRONG), x)  # fault


@triton.jit
def blocks_overlap(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * (16 - WRONG) + tl.arange(0, 16)
    tl.store(y_ptr + offs, offs + pid * 0.5)  # fault


@triton.jit
def reads_the_next_block(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    pid, offs = tl.program_id(0), tl.arange(0, 16)
    following = y_ptr + min(pid + WRONG, 3) * 16
    x = tl.load(following + offs)
    tl.store(y_ptr + pid * 16 + offs, x + 1)  # fault


@triton.jit
def reads_the_block_before(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    pid, offs = tl.program_id(0), tl.arange(0, 16)
    tl.store(y_ptr + pid * 16 + offs, offs + pid)
    x = tl.load(y_ptr + max(pid - WRONG, 0) * 16 + offs)  # fault
    tl.store(x_ptr + pid * 16 + offs, x)


@triton.jit
def reads_a_sum_while_others_add(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    pid = tl.program_id(0)
    x = tl.load(y_ptr if WRONG else x_ptr)  # fault
    tl.atomic_add(y_ptr, x + pid + 1)


@triton.jit
def adds_to_what_another_reads(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.store(x_ptr, tl.load(x_ptr) + tl.load(y_ptr))
    else:
        tl.atomic_add(y_ptr + 1 - WRONG, 1.0)  # fault


@triton.jit
def sum_without_atomic(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0))
    if WRONG:
        y = tl.load(y_ptr)  # fault
        tl.store(y_ptr, y + x)
    else:
        tl.atomic_add(y_ptr, x)


@triton.jit
def store_among_atomics(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    pid = tl.program_id(0)
    if pid < 3:
        tl.atomic_add(y_ptr, 1.0)
    else:
        tl.store(y_ptr + 1 - WRONG, 7.0)  # fault


@triton.jit
def shift_in_place(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    pid, offs = tl.program_id(0), tl.arange(0, 16)
    at = pid * 16 + offs
    x = tl.load(y_ptr + at - WRONG, mask=at > 0, other=0)  # fault
    tl.store(y_ptr + at, x)


@triton.jit
def row_sum_after_the_row_is_overwritten(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    pid, offs = tl.program_id(0), tl.arange(0, 64)
    # the input is overwritten, and every program needs all of it
    row = y_ptr if WRONG else x_ptr
    total = tl.sum(tl.load(row + offs))  # fault
    mask = offs // 16 == pid
    tl.store(y_ptr + offs, offs / total, mask=mask)


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (
            two_programs_write_one_element,
            "program 3 writes element 0 of y_ptr, which program 0 sets to another",
        ),
        (blocks_overlap, "program 1 writes element 15 of y_ptr, which program 0 sets to another value at"),
        (reads_the_next_block, "program 1 writes element 16 of y_ptr, which program 0 reads at"),
        (reads_the_block_before, "program 1 reads element 0 of y_ptr, which program 0 writes at"),
        (reads_a_sum_while_others_add, "program 1 reads element 0 of y_ptr, which program 0 updates at"),
        (adds_to_what_another_reads, "program 1 updates element 0 of y_ptr, which program 0 reads at"),
        (sum_without_atomic, "program 1 reads element 0 of y_ptr, which program 0 writes at"),
        (store_among_atomics, "program 3 writes element 0 of y_ptr, which program 2 updates at"),
        (shift_in_place, "program 1 reads element 15 of y_ptr, which program 0 writes at"),
        (
            row_sum_after_the_row_is_overwritten,
            "program 1 reads element 0 of y_ptr, which program 0 writes at",
        ),
    ],
    ids=name,
)
def test_races(kernel, what):
    check(kernel, what, lambda: (normal(64), normal(64, seed=1), 64))


@triton.jit
def long_copy(x_ptr, y_ptr, N, WRONG: tl.constexpr):
    offs = tl.program_id(0) * (N - WRONG) + tl.arange(0, 4096)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs) + tl.program_id(0))  # fault


def test_launches_from_two_threads(monkeypatch):
    # for both threads: each sets and resets it
    monkeypatch.setenv("TRINFER_CPU_CHECK", "1")

    def work(grid):
        return [
            check(long_copy, "program 1 writes element 4095", lambda: make(grid), grid) for _ in range(20)
        ]

    def make(grid):
        x = normal(4096 * grid)
        return x, x.clone(), 4096

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (2, 5)))


@triton.jit
def ticket_sum(
    x_ptr, part_ptr, count_ptr, y_ptr, N,
    WRONG: tl.constexpr, SEM: tl.constexpr, LATE: tl.constexpr, ELSEWHERE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    offs = pid * 16 + tl.arange(0, 16)
    total = tl.sum(tl.load(x_ptr + offs, mask=offs < N, other=0)) + tl.load(count_ptr + 2)
    if not (LATE and WRONG):
        tl.store(part_ptr + pid, total)
    tl.debug_barrier()
    at = count_ptr
    if ELSEWHERE and WRONG:
        at += pid % 2
    ticket = tl.atomic_add(at, 1, sem=SEM) if WRONG else tl.atomic_add(at, 1, sem="acq_rel")
    if LATE and WRONG:
        tl.store(part_ptr + pid, total)
    if (ticket == 3) | (ELSEWHERE and WRONG and pid == 3):
        parts = tl.load(part_ptr + tl.arange(0, 4), cache_modifier=".cg")  # fault
        tl.store(y_ptr, tl.sum(parts))
        # all programs have read the last of these, each before its ticket
        tl.store(count_ptr + tl.arange(0, 4), 5)


@pytest.mark.parametrize(
    ("sem", "late", "elsewhere"),
    [
        ("relaxed", False, False),
        ("acquire", False, False),
        ("release", False, False),
        ("acq_rel", True, False),
        ("acq_rel", False, True),
    ],
    ids=["relaxed", "acquire", "release", "publish_after_the_ticket", "two_counters"],
)
def test_tickets(sem, late, elsewhere):
    def make():
        return normal(60), poisoned(4), torch.zeros(4, dtype=torch.int32), poisoned(1), 60

    options = {"SEM": sem, "LATE": late, "ELSEWHERE": elsewhere}
    assert faults(ticket_sum, 4, *make(), WRONG=0, **options) == []
    found = faults(ticket_sum, 4, *make(), WRONG=1, **options)
    assert re.search(
        rf"{place(ticket_sum)}: program 3 reads element . of part_ptr, which program . writes", found[0]
    )
