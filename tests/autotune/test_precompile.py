"""Configurations compiled in child processes, for a GPU that is not here."""

import pytest
import torch

from trinfer import backend, kernels
from trinfer.autotune import collect, model, precompile, ranking
from trinfer.autotune import search as searching
from trinfer.autotune.rows import candidates

pytestmark = pytest.mark.skipif(backend.kind() != "cpu", reason="as if on a GPU, from the CPU backend")


@pytest.fixture
def call():
    """A product with its norm and three segments, as a model launches it."""
    x, weights = torch.ones(1, 256), tuple(torch.ones(n, 256) for n in (256, 128, 128))
    with collect() as calls:
        kernels.gemv(x.bfloat16(), tuple(w.bfloat16() for w in weights), norm=kernels.Norm(x[0].bfloat16()))
    return next(iter(calls.values()))


def jobs_of(call, count):
    with ranking.launches_on("sm_90"):
        configs = candidates(call.op, call.key)[:count]
    return configs, [precompile.job_of(call, config, "sm_90") for config in configs]


def test_jobs_hold_shapes_and_no_numbers(call):
    _, (job,) = jobs_of(call, 1)
    weights = job.arguments["weight"]
    assert [w.shape for w in weights] == [(256, 256), (128, 256), (128, 256)]
    assert all(w.is_meta for w in weights) and job.arguments["norm"].weight.is_meta
    assert job.module == "trinfer.kernels.gemv"


def test_children_find_what_this_process_would_find_and_fill_the_cache(call, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    configs, jobs = jobs_of(call, 2)
    found = precompile.precompile(jobs, workers=1)
    assert list(tmp_path.rglob("*.cubin"))
    before = sorted(tmp_path.rglob("*"))
    for config, facts in zip(configs, found, strict=True):
        here = ranking.estimate(call, config, "sm_90").facts
        assert [(f.registers, f.shared_bytes) for f in facts] == [(f.registers, f.shared_bytes) for f in here]
    # nothing was compiled a second time
    assert sorted(tmp_path.rglob("*")) == before


def test_a_compiler_that_fails_or_aborts_costs_its_own_job(call, monkeypatch):
    _, (good, bad) = jobs_of(call, 2)
    bad.config["BLOCK_N"] = 3
    assert [facts is None for facts in precompile.precompile([bad, good], workers=1)] == [True, False]
    monkeypatch.setattr(precompile, "WORKER", "import os, sys; sys.stdin.readline(); os.abort()")
    assert precompile.precompile([good, bad], workers=1) == [None, None]


def test_exact_facts_reorder_what_is_tried(call):
    with ranking.launches_on("sm_90"):
        configs = candidates(call.op, call.key)
        device = ranking.constants("sm_90")
        first, second = model.ranked(call, configs, device)[:2]
        spilled = precompile.Facts("k", 64, 8, 0, False, False, True, 0.1)
        fits = precompile.Facts("k", 32, 0, 0, False, False, True, 0.1)
        found = model.ranked(call, configs, device, lambda c: [spilled] if c == first else [fits])
    assert first not in found and second in found


def test_a_search_on_a_gpu_compiles_beforehand_and_one_on_a_cpu_does_not(call, monkeypatch):
    assert searching._compiled([call]) == {}
    asked = []
    monkeypatch.setattr(searching, "precompile", lambda jobs: asked.extend(jobs) or [None] * len(jobs))
    monkeypatch.setattr(backend, "arch", lambda device: "sm_90")
    monkeypatch.setattr(backend, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(searching, "ranked", lambda call, configs: configs)
    monkeypatch.setattr(backend, "kind", lambda: "gpu")
    assert searching._compiled([call]) == {}
    assert len(asked) == searching.MOST_COMPILED and {job.target for job in asked} == {"sm_90"}
