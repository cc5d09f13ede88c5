"""Recorded launches: a replay does what the launches would have done, on the memory they were given."""

import gc
import random
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.cpu.arrays import integers, normal, poisoned
from trinfer.cpu.check import CheckError, is_checking
from trinfer.cpu.record import Recording, record


@pytest.fixture(autouse=True, params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@triton.jit
def _turn_kernel(x_ptr, y_ptr, N, by, BLOCK: tl.constexpr):
    """Reads from all of x: a program that starts before the launch before it is done reads what is old."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + (offs * 7 + by) % N, mask=offs < N)
    tl.store(y_ptr + offs, x * 3 + by, mask=offs < N)


def turn(x: Tensor, y: Tensor, by: int, block: int) -> None:
    _turn_kernel[(triton.cdiv(x.numel(), block),)](x, y, x.numel(), by, BLOCK=block)


def turn_ref(x: Tensor, by: int) -> Tensor:
    at = (torch.arange(x.numel()) * 7 + by) % x.numel()
    return x[at] * 3 + by


def chain(seed: int, n: int) -> list[tuple[int, int]]:
    """Launches of `turn`: (by, block); grids of 1 to many programs."""
    choose = random.Random(seed)
    return [(choose.randrange(100), choose.choice((16, 64, 1024))) for _ in range(n)]


def run(buffers: list[Tensor], launches: list[tuple[int, int]]) -> None:
    """Each launch reads the buffer that the one before it wrote."""
    for k, (by, block) in enumerate(launches):
        turn(buffers[k % 2], buffers[(k + 1) % 2], by, block)


def run_ref(x: Tensor, launches: list[tuple[int, int]]) -> Tensor:
    for by, _ in launches:
        x = turn_ref(x, by)
    return x


@pytest.mark.parametrize("seed", range(8))
def test_a_replay_equals_the_launches(seed):
    launches = chain(seed, 40)
    x = integers(0, 1000, 700 + seed)
    buffers = [x.clone(), torch.empty_like(x)]
    with record() as recording:
        run(buffers, launches)
    assert torch.equal(buffers[0], x), "a recorded launch ran"
    assert len(recording) == 40 and recording.names == ("_turn_kernel",) * 40
    for again in range(20):
        # what is in memory at the replay counts
        buffers[0].copy_(x + again)
        recording.replay()
        assert torch.equal(buffers[0], run_ref(x + again, launches))


def test_the_number_of_threads_is_read_at_the_replay(threads):
    launches = chain(1, 30)
    x = integers(0, 1000, 900)
    buffers = [x.clone(), torch.empty_like(x)]
    with record() as recording:
        run(buffers, launches)
    for now in (threads + 1, 1, 2):
        torch.set_num_threads(now)
        buffers[0].copy_(x)
        recording.replay()
        assert torch.equal(buffers[0], run_ref(x, launches))


@triton.jit
def _count_kernel(count_ptr, BLOCK: tl.constexpr):
    tl.atomic_add(count_ptr + tl.arange(0, BLOCK), 1)


@pytest.mark.parametrize("grid", [(1,), (2,), (3,), (7, 1, 2), (64,)])
def test_every_program_runs_once(grid):
    count = torch.zeros(4, dtype=torch.int32)
    with record() as recording:
        for _ in range(50):
            _count_kernel[grid](count, BLOCK=4)
    recording.replay()
    assert torch.equal(count, torch.full((4,), 50 * torch.Size(grid).numel(), dtype=torch.int32))


def test_launches_beside_a_recording():
    inside, outside = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)

    def launch() -> None:
        _count_kernel[(3,)](outside, BLOCK=4)

    with record() as recording:
        _count_kernel[(3,)](inside, BLOCK=4)
        # another thread is not recording
        other = threading.Thread(target=launch)
        other.start()
        other.join()
    _count_kernel[(3,)](outside, BLOCK=4)
    assert inside.tolist() == [0] * 4 and outside.tolist() == [6] * 4
    recording.replay()
    assert inside.tolist() == [3] * 4 and outside.tolist() == [6] * 4


def test_what_is_not_recorded():
    count = torch.zeros(4, dtype=torch.int32)
    with record() as recording:
        _count_kernel[(0,)](count, BLOCK=4)
        _count_kernel[(3, 0)](count, BLOCK=4)
    assert len(recording) == 0 and recording.names == () and recording.profile() == []
    recording.replay()
    assert count.tolist() == [0] * 4


def test_one_recording_at_a_time():
    count = torch.zeros(4, dtype=torch.int32)
    with record() as first:
        _count_kernel[(1,)](count, BLOCK=4)
        with pytest.raises(RuntimeError, match=r"record\(\) inside of record\(\)"), record():
            pass
        with pytest.raises(RuntimeError, match=r"replay\(\) while recording"):
            first.replay()
        # the outer one goes on
        _count_kernel[(2,)](count, BLOCK=4)
    assert len(first) == 2 and count.tolist() == [0] * 4
    first.replay()
    assert count.tolist() == [3] * 4


def test_an_exception_ends_the_recording():
    count = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(KeyError), record():
        _count_kernel[(1,)](count, BLOCK=4)
        raise KeyError
    _count_kernel[(1,)](count, BLOCK=4)
    assert count.tolist() == [1] * 4
    with record() as recording:
        pass
    assert len(recording) == 0


def fillers() -> list[Tensor]:
    """Memory that may be that of a tensor of 5000 which is free."""
    gc.collect()
    return [torch.full((5000,), -1, dtype=torch.int32) for _ in range(20)]


def recorded() -> tuple[Recording, Tensor, weakref.ref[torch.UntypedStorage]]:
    """A recording whose input is known to nobody else; its output, and a look at the input's memory."""
    x, y = integers(0, 1000, 5000), torch.empty(5000, dtype=torch.int32)
    with record() as recording:
        turn(x, y, 5, 64)
    return recording, y, weakref.ref(x.untyped_storage())


def test_memory_lives_as_long_as_the_recording():
    recording, y, memory = recorded()
    others = fillers()
    recording.replay()
    assert torch.equal(y, turn_ref(integers(0, 1000, 5000), 5)) and len(others) == 20
    del recording
    gc.collect()
    assert memory() is None


@pytest.mark.skipif(is_checking(), reason="a checked replay refuses memory that is not the tensor's any more")
def test_memory_is_that_of_the_moment_of_recording():
    x, y = integers(0, 1000, 5000), torch.empty(5000, dtype=torch.int32)
    with record() as recording:
        turn(x, y, 5, 64)
    x.data = torch.zeros_like(x)
    others = fillers()
    recording.replay()
    assert torch.equal(y, turn_ref(integers(0, 1000, 5000), 5)) and len(others) == 20


def test_replays_from_several_python_threads():
    launches = chain(3, 60)
    inputs = [integers(0, 1000, 800, seed=seed) for seed in range(4)]
    pairs = [[x.clone(), torch.empty_like(x)] for x in inputs]
    wrong: list[int] = []

    def work(k: int) -> None:
        with record() as recording:
            run(pairs[k], launches)
        for _ in range(50):
            pairs[k][0].copy_(inputs[k])
            recording.replay()
            if not torch.equal(pairs[k][0], run_ref(inputs[k], launches)):
                wrong.append(k)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


@triton.jit
def _numbers_kernel(y_ptr, pair, none_ptr, small, wide, real):
    if none_ptr is None:
        tl.store(y_ptr, tl.load(pair[0]) * pair[1])
    tl.store(y_ptr + 1, small)
    tl.store(y_ptr + 2, wide.to(tl.float64))
    tl.store(y_ptr + 3, real)


def test_arguments_of_all_kinds():
    x, y = torch.full((1,), 3.0), poisoned(4, dtype=torch.float64)
    with record() as recording:
        _numbers_kernel[(1,)](y, (x, 11), None, -7, -(1 << 40), 0.5)
    x.fill_(4.0)
    recording.replay()
    assert y.tolist() == [44.0, -7.0, -float(1 << 40), 0.5]


def test_profile():
    x = integers(0, 1000, 3_000_000)
    y, small = torch.empty_like(x), torch.zeros(4, dtype=torch.int32)
    with record() as recording:
        turn(x, y, 1, 1024)
        _count_kernel[(1,)](small, BLOCK=4)
    found = [recording.profile() for _ in range(20)]
    assert {tuple(name for name, _ in rows) for rows in found} == {("_turn_kernel", "_count_kernel")}
    large, tiny = (min(rows[k][1] for rows in found) for k in (0, 1))
    # 3,000,000 elements read in steps of 7 against 4
    assert large > 3 * tiny > 0
    assert torch.equal(y, turn_ref(x, 1)) and small.tolist() == [20] * 4


@triton.jit
def _copy_kernel(x_ptr, y_ptr, N):
    offs = tl.arange(0, 64)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < N), mask=offs < 60)


def test_checked_replays(monkeypatch):
    monkeypatch.setenv("TRINFER_CPU_CHECK", "1")
    x, y, z = normal(60), poisoned(60), poisoned(60)
    with record() as right:
        _copy_kernel[(1,)](x, y, 60)
        _copy_kernel[(1,)](y, z, 60)
    assert y.isnan().all()
    right.replay()
    assert torch.equal(z, x)
    later = poisoned(60)
    with record() as wrong:
        _copy_kernel[(1,)](y, z, 60)
        _copy_kernel[(1,)](x, y, 61)
        _copy_kernel[(1,)](x, later, 60)
    z.zero_()
    with pytest.raises(CheckError, match=r"kernel _copy_kernel, .*: program 0 reads element 60 of x_ptr"):
        wrong.replay()
    # in order: what came before has run, what came after has not
    assert torch.equal(z, x) and later.isnan().all()
    assert [name for name, us in right.profile() if us > 0] == ["_copy_kernel"] * 2


def test_checked_and_unchecked_launches_keep_their_order(monkeypatch):
    x = integers(0, 1000, 500)
    buffers = [x.clone(), torch.empty_like(x)]
    turns = [3, 4, 5, 6, 7, 8]
    with record() as recording:
        for k, by in enumerate(turns):
            # kernels of their own, compiled under the setting of the moment
            monkeypatch.setenv("TRINFER_CPU_CHECK", str(k % 2))
            turn(buffers[k % 2], buffers[(k + 1) % 2], by, 128 << k % 2)
    recording.replay()
    assert torch.equal(buffers[0], run_ref(x, [(by, 0) for by in turns]))
