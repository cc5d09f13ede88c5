"""The search: what it measures, on what, what it refuses, when it stops, and that it happens once."""

import inspect

import pytest
import torch

from tests.autotune.stubs import Stub, row
from tests.cpu import processes
from tests.kernels.test_op import as_tuple, random_inputs, tensors
from tests.strategies import assert_close, make, truth
from trinfer import autotune, backend, kernels
from trinfer.autotune import collect, lookup, measure
from trinfer.autotune import search as searching
from trinfer.autotune.measure import agree, copied, outcome
from trinfer.autotune.rows import candidates, key_text
from trinfer.autotune.search import describe, search
from trinfer.kernels import OPS

pytestmark = pytest.mark.skipif(backend.kind() != "cpu", reason="searches on the CPU backend")
ids = [op.name for op in OPS]
GEMV = next(op for op in OPS if op.name == "gemv")


def noted(launch):
    with collect() as calls:
        launch()
    return list(calls.values())


@pytest.fixture
def quick(monkeypatch):
    """Few and short samples: which configuration wins does not matter here."""
    monkeypatch.setattr(measure, "SAMPLE_S", 1e-5)
    monkeypatch.setattr(searching, "MOST_TRIED", 2)


def in_place_calls():
    """Launches that write into their arguments, and what they must leave there."""
    k, v = (make((2, 2, 24, 32), torch.float32, seed) for seed in (0, 1))
    new = tuple(make((2, 2, 1, 32), torch.float32, seed) for seed in (2, 3))
    q = make((2, 4, 1, 32), torch.float32, 4)
    kv_range = torch.tensor([[0, 20], [3, 24]], dtype=torch.int32)
    attend = {"q": q, "k": k, "v": v, "sm_scale": 0.2, "kv_range": kv_range, "new": new}
    x, w = make((1, 40), torch.float32, 5), make((24, 40), torch.float32, 6)
    residual = make((1, 24), torch.float32, 7)
    add = {"x": x, "weight": w, "residual": residual, "out": residual}
    places = torch.tensor([[5], [23]])
    heads = [make((2, n, 1, 32), torch.float32, n) for n in (4, 2, 3)]
    cache = [make((2, 2, 24, 32), torch.float32, seed) for seed in (8, 9)]
    post = dict(zip(("q", "k", "v"), (heads[0], heads[1], heads[1].clone()), strict=True))
    post |= {"k_cache": cache[0], "v_cache": cache[1], "positions": places, "prologue": kernels.Prologue()}
    return {"decode_attention": attend, "gemv": add, "qkv_post": post}


def same(a, b):
    """Equal to the last bit, nan for nan."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("name", in_place_calls())
def test_u094_tuning_leaves_what_a_kernel_writes_untouched(name, folders, quick):
    op = next(op for op in OPS if op.name == name)
    arguments = in_place_calls()[name]
    calls = noted(lambda: op.launcher(**copied(arguments)))
    # the search sees the very memory that a model goes on with
    call = autotune.Call(op, calls[0].key, (), arguments)
    expected = copied(arguments)
    results = as_tuple(truth(op.ref, **expected))
    before = [t.clone() for t in tensors(arguments)]
    (finding,) = search([call])
    assert finding.status == "measured"
    assert all(map(same, tensors(arguments), before))
    first, second = copied(arguments), copied(arguments)
    for given in (first, second):
        for actual, right in zip(as_tuple(op.launcher(**given)), results, strict=True):
            assert_close(actual, right, torch.float32)
    assert all(map(same, tensors(first), tensors(second)))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS, ids=ids)
def test_u095_every_configuration_alone_is_right(op, folders):
    arguments = random_inputs(op)
    (call,) = noted(lambda: op.launcher(**arguments))
    expected = as_tuple(truth(op.ref, **arguments))
    for config in candidates(op, call.key):
        # results are in memory that was filled with nan
        actual = outcome(autotune.Call(op, call.key, (), arguments), config)[: len(expected)]
        for a, e in zip(actual, expected, strict=True):
            if a.is_floating_point():
                assert_close(a, e, torch.float32, f"{op.name} in {config}")
            else:
                assert int((a.int() - e.int()).abs().max()) <= (a.element_size() == 1), config


def half(x, block):
    """A launcher that writes only as far as its configuration says."""
    y = x.new_empty(x.shape)
    y[:block] = x[:block]
    return y


def test_a_configuration_that_does_something_else_is_never_measured(folders, monkeypatch):
    x, w = make((1, 40), torch.float32, 0), make((24, 40), torch.float32, 1)
    (call,) = noted(lambda: kernels.gemv(x, w))
    right = outcome(call, GEMV.default(call.key))
    assert agree(right, outcome(call, candidates(GEMV, call.key)[1]))
    wrong = [t.clone() for t in right]
    wrong[0][0, 7] *= 1.01
    assert not agree(wrong, right)
    missing = [t.clone() for t in right]
    missing[0][0, 7] = float("nan")
    assert not agree(missing, right)
    # an argument that it must not write
    stray = [t.clone() for t in right]
    stray[-1][0, 0] += 1
    assert not agree(stray, right)
    other = GEMV.default(call.key) | {"BLOCK_N": 1}
    real = searching.outcome
    monkeypatch.setattr(searching, "outcome", lambda c, config: wrong if config == other else real(c, config))
    monkeypatch.setattr(searching, "candidates", lambda op, key: [op.default(key), other])
    assert searching.measure(call)["tried"] == 1


def test_a_configuration_that_fails_is_left_out(folders, quick, monkeypatch):
    x, w = make((1, 40), torch.float32, 0), make((24, 40), torch.float32, 1)
    calls = noted(lambda: kernels.gemv(x, w))
    default = GEMV.default(calls[0].key)
    bad = default | {"BLOCK_N": 24}
    monkeypatch.setattr(searching, "candidates", lambda op, key: [default, bad])
    monkeypatch.setattr(searching, "ranked", lambda call, configs, **_: configs)
    (finding,) = search(calls)
    assert finding.status == "measured" and finding.row["tried"] == 1 and finding.row["config"] == default


def test_memory_that_no_kernel_writes_is_nan_while_results_are_compared():
    x = torch.ones(8)
    call = autotune.Call(Stub(launcher=half), None, (x, 5), {})
    returned, given = outcome(call, {})
    assert returned[:5].eq(1).all() and returned[5:].isnan().all() and torch.equal(given, x)
    assert not torch.are_deterministic_algorithms_enabled()


def test_copies_share_memory_as_the_arguments_do():
    memory = torch.arange(100.0)
    x, y = memory[10:30].view(4, 5), memory[20:22]
    norm = kernels.Norm(memory[50:60], eps=0.5)
    (a, b), options = copied(((x, y), {"norm": norm, "act": "relu", "pair": [x.T, None]}))
    assert torch.equal(a, x) and torch.equal(b, y) and a.stride() == x.stride()
    assert options["norm"].eps == 0.5 and torch.equal(options["norm"].weight, norm.weight)
    assert torch.equal(options["pair"][0], x.T) and options["pair"][1] is None
    a[2, 0] = -1
    assert b[0] == -1 and options["pair"][0][0, 2] == -1 and memory.min() == 0
    # addresses keep their remainder by 16 bytes, and no more is copied than is in use
    assert (a.data_ptr() - x.data_ptr()) % 16 == 0
    assert a.untyped_storage().nbytes() < memory.untyped_storage().nbytes()


def test_a_winner_is_kept_and_launched(folders, monkeypatch):
    x, w = make((1, 40), torch.float32, 0), make((24, 40), torch.float32, 1)
    (call,) = noted(lambda: kernels.gemv(x, w))
    best = candidates(GEMV, call.key)[2]
    monkeypatch.setattr(searching, "fastest", lambda trials, _: trials[-1].sample() and trials[-1])
    monkeypatch.setattr(searching, "ranked", lambda call, configs, **_: [best])
    monkeypatch.setattr(measure.Trial, "us", 1.0)
    (finding,) = search([call])
    assert finding.row["config"] == best == autotune.choose(GEMV, call.key)
    assert (finding.status, finding.gain) == ("measured", 1.0)
    text = "\n".join(describe([finding]))
    assert "gemv" in text and key_text(call.key) in text and "measured" in text
    assert_close(kernels.gemv(x, w), truth(kernels.gemv_ref, x, w), torch.float32)


def test_the_default_leaves_only_for_a_clear_win():
    class Fake:
        def __init__(self, us):
            self.samples_us, self._us = [], us

        def sample(self):
            self.samples_us.append(self._us)
            return self._us

        @property
        def us(self):
            return self._us

    default, near, far = Fake(100.0), Fake(98.0), Fake(90.0)
    assert measure.fastest([default, near], lambda: False) is default
    assert measure.fastest([default, near, far], lambda: False) is far
    assert measure.fastest([default], lambda: False) is default


def test_a_budget_leaves_keys_for_the_next_time(folders, quick):
    x = make((1, 40), torch.float32, 0)
    calls = noted(lambda: [kernels.gemv(x, make((n, 40), torch.float32, n)) for n in (8, 16)])
    findings = search(calls, budget_s=0.0)
    assert [f.status for f in findings] == ["left out", "left out"]
    assert all("no time" in line for line in list(describe(findings))[1:])
    assert [f.status for f in search(calls[:1])] == ["measured"]
    assert [f.status for f in search(calls, budget_s=0.0)] == ["found", "left out"]


def test_only_what_is_missing_or_stale_is_measured(folders, quick):
    x = make((1, 40), torch.float32, 0)
    calls = noted(lambda: [kernels.gemv(x, make((n, 40), torch.float32, n)) for n in (8, 16)])
    lookup.keep(GEMV, calls[0].key, row(config=dict(GEMV.default(calls[0].key)), date="2020-01-01"))
    shown = []
    findings = search(calls, progress=lambda these: shown.extend(these) or iter(these))
    assert shown == calls and [f.status for f in findings] == ["measured", "measured"]
    assert "triton: 3.7.1" in findings[0].why or "src: s -> " in findings[0].why
    assert lookup.find_measured(GEMV, calls[0].key)["date"] > "2026"
    shown.clear()
    assert [f.status for f in search(calls, progress=lambda these: shown.extend(these) or iter(these))] == [
        "found",
        "found",
    ]
    assert shown == []
    # a run on a new machine measures what the tables know as well
    assert [f.status for f in search(calls, again=True)] == ["measured", "measured"]


SCRIPT = """
import time, torch
from trinfer import autotune, kernels
from trinfer.autotune import measure, search
measure.SAMPLE_S = 1e-5
timed = []
start = measure.Trial.__init__
measure.Trial.__init__ = lambda self, *a: timed.append(1) or start(self, *a)
x, w = torch.ones(1, 40), torch.ones(24, 40)
with autotune.collect() as calls:
    kernels.gemv(x, w)
begin = time.perf_counter()
(finding,) = search.search(calls.values())
print(len(timed) > 0, finding.status, finding.row["us"])
"""


def test_u100_the_next_process_measures_nothing(tmp_path):
    script = tmp_path / "tune.py"
    script.write_text(SCRIPT)
    folder = str(tmp_path / "cache")
    first, second = (
        processes.finish(processes.start(script, TRINFER_AUTOTUNE_CACHE=folder)).split() for _ in range(2)
    )
    assert first[:2] == ["True", "measured"]
    assert second[:2] == ["False", "found"] and first[2] == second[2]


def test_u100_shipped_rows_are_found_without_a_search(folders, monkeypatch):
    _, shipped = folders
    x, w = make((1, 40), torch.float32, 0), make((24, 40), torch.float32, 1)
    (call,) = noted(lambda: kernels.gemv(x, w))
    monkeypatch.setenv("TRINFER_AUTOTUNE_CACHE", str(shipped))
    search([call])
    monkeypatch.undo()
    monkeypatch.setattr(lookup, "packaged_folder", lambda: shipped)
    monkeypatch.setattr(searching, "Trial", lambda *_: pytest.fail("a benchmark was run"))
    autotune.forget()
    assert search([call])[0].status == "found"


@pytest.mark.parametrize("name", ["gemv", "matmul", "attention", "decode_attention", "rms_norm", "rotary"])
def test_u102_lengths_share_few_keys(name):
    """No key holds a length, a batch or a stride as it is."""
    op = next(op for op in OPS if op.name == name)
    sizes = {"B": 1, "H": 4, "G": 2, "N": 64, "K": 64, "D": 32, "R": 32}
    letter = {"decode_attention": "N", "gemv": "M"}.get(name, "M")
    lengths = range(5, 17) if name == "gemv" else range(5, 41)
    taken = inspect.signature(op.inputs).parameters
    with collect() as calls, torch.no_grad():
        for length in lengths:
            given = {n: size for n, size in (sizes | {letter: length}).items() if n in taken}
            op.launcher(**op.inputs(**given, dtype=torch.float32, device=torch.device("cpu")))
    assert 1 <= len(calls) <= 4
