"""The choice of a launch configuration: asked once a key, overridden while pinned, noted, set aside."""

import time
import warnings

import pytest
import torch
from triton.errors import TritonError

from tests.autotune.stubs import Key, Stub, row
from tests.strategies import assert_close, make
from trinfer import backend, kernels
from trinfer.autotune import choice, choose, collect, forget, lookup, pin, suspended, tuned
from trinfer.autotune.rows import candidates

needs_kernels = pytest.mark.skipif(backend.kind() != "cpu", reason="launches on the CPU backend")


def asking(keys):
    """An op that remembers the keys its default is asked for."""
    return Stub(default=lambda key: keys.append(key) or {"BLOCK_N": 8 * key.rows, "num_warps": 4})


def test_choose_asks_once_a_key(folders):
    keys, others = [], []
    op, other = asking(keys), asking(others)
    assert [choose(op, Key(rows=n))["BLOCK_N"] for n in (1, 2, 1, 2)] == [8, 16, 8, 16]
    assert keys == [Key(rows=1), Key(rows=2)]
    assert choose(other, Key()) == choose(op, Key())
    assert others == [Key()]


def test_pin_overrides_parts_of_the_default_and_ends(folders):
    op, other = asking([]), asking([])
    with pytest.raises(RuntimeError, match="stop"), pin(op, {"BLOCK_N": 3}):
        assert choose(op, Key()) == {"BLOCK_N": 3, "num_warps": 4}
        assert choose(other, Key()) == {"BLOCK_N": 8, "num_warps": 4}
        raise RuntimeError("stop")
    assert choose(op, Key()) == {"BLOCK_N": 8, "num_warps": 4}


def test_a_row_is_chosen_until_tables_are_suspended(folders):
    op = Stub()
    lookup.keep(op, Key(), row(16))
    forget()
    assert choose(op, Key())["BLOCK_N"] == 16
    with suspended():
        assert choose(op, Key())["BLOCK_N"] == 64
        with pin(op, {"num_warps": 8}):
            assert choose(op, Key()) == {"BLOCK_N": 64, "num_warps": 8}
    assert choose(op, Key())["BLOCK_N"] == 16


@needs_kernels
def test_collect_notes_the_first_launch_of_each_key(folders):
    x, y, w = (make(shape, torch.float32, 0) for shape in ((1, 40), (1, 40), (24, 40)))
    with collect() as calls:
        kernels.gemv(x, w, act="relu")
        kernels.gemv(y, w)
        kernels.gemv(make((8, 40), torch.float32, 0), w)
        kernels.silu_mul(x, y)
    kernels.gemv(x, make((25, 40), torch.float32, 0))
    assert [(op.name, getattr(key, "rows", None)) for op, key in calls] == [
        ("gemv", 1),
        ("gemv", 8),
        ("gated_activation", None),
    ]
    first = next(iter(calls.values()))
    assert first.args[0] is x and first.args[1] is w and first.kwargs == {"act": "relu"}


def failing(op):
    """A launcher whose kernel needs more than this device has, unless its block is 64."""

    @tuned
    def launch(x):
        if choose(op, Key())["BLOCK_N"] != 64:
            raise TritonError("out of resource: shared memory")
        return x + 1

    return launch


def test_a_row_that_cannot_launch_is_set_aside_with_one_warning(folders):
    op = Stub()
    launch = failing(op)
    assert launch(1) == 2
    lookup.keep(op, Key(), row(16))
    forget()
    with pytest.warns(UserWarning, match=r"stub for Key.* is set aside") as caught:
        assert [launch(1), launch(1)] == [2, 2]
    assert len(caught) == 1
    forget()
    assert launch(1) == 2


def test_what_fails_in_its_default_or_while_it_is_tried_raises(folders):
    op = Stub()
    launch = failing(op)
    lookup.keep(op, Key(), row(16))
    forget()
    with pytest.raises(TritonError), pin(op, {"BLOCK_N": 32}):
        launch(1)
    broken = failing(Stub("broken", default=lambda key: {"BLOCK_N": 8, "num_warps": 4}))
    with warnings.catch_warnings(), pytest.raises(TritonError):
        warnings.simplefilter("error")
        broken(1)


def test_whoever_keeps_choices_hears_when_they_are_dropped(folders, monkeypatch):
    dropped = []
    monkeypatch.setattr(choice, "_forgetful", [lambda: dropped.append("now")])
    forget()
    assert dropped == ["now"]
    op = Stub()
    launch = failing(op)
    lookup.keep(op, Key(), row(16))
    forget()
    with pytest.warns(UserWarning, match="is set aside"):
        launch(1)
    assert dropped == ["now"] * 3


@needs_kernels
def test_a_row_runs_in_the_kernel_and_computes_the_same(folders):
    op, x = kernels.OPS[0], make((3000,), torch.float32, 0)
    with collect() as calls:
        op.launcher(x, "relu")
    ((_, key),) = calls
    default, other, *_ = candidates(op, key)
    lookup.keep(op, key, row(config=dict(other)))
    forget()
    assert choose(op, key) == other != default
    assert_close(op.launcher(x, "relu"), x.double().relu(), torch.float32)


@needs_kernels
def test_a_hit_adds_at_most_5_percent_to_a_launch(folders, record_property):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x, w = torch.zeros(1, 16), torch.zeros(16, 16)
    with collect() as calls:
        kernels.gemv(x, w)
    ((op, key),) = calls
    lookup.keep(op, key, row(config=dict(op.default(key))))
    forget()
    kernels.gemv(x, w)
    launches, hits = [], []
    for _ in range(15):
        for samples, call in ((launches, lambda: kernels.gemv(x, w)), (hits, lambda: choose(op, key))):
            start = time.thread_time()
            for _ in range(300):
                call()
            samples.append(time.thread_time() - start)
    torch.set_num_threads(threads)
    share = min(hits) / min(launches)
    record_property("measured", f"an autotune hit is {share:.1%} of the smallest launch")
    assert choice._found.cache_info().hits > 0
    assert share <= 0.05
