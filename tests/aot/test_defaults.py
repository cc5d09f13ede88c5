"""Every shipped configuration compiles for two GPUs that are not here, fits them and does not spill."""

import pytest

from tests.aot.gate import Result, compile_all
from tests.aot.jobs import MODELS, VARIANTS, Job, arguments, defaults, space
from trinfer import backend
from trinfer.backend.targets import TARGETS, Facts
from trinfer.kernels import OPS

pytestmark = pytest.mark.skipif(not backend.has_triton(), reason="triton is not installed")


ids = [op.name for op in OPS]


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return compile_all(defaults(("sm_90", "gfx942"), ("bf16",)))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("op", ids)
def test_shipped_default_compiles_fits_and_does_not_spill(op, target, results):
    mine = [r for r in results if (r.job.op, r.job.target) == (op, target)]
    assert mine and all(r.facts or r.error for r in mine)
    faulty = [f"{result.job}: {fault}" for result in mine for fault in result.faults]
    assert not faulty, "\n".join(faulty)


# gumbel draws numbers for what it reads, and a few ids are no row to load
NARROW = {"advance", "gumbel", "routing", "sort_by_expert"}


@pytest.mark.parametrize("op", [name for name in ids if name not in NARROW])
def test_contiguous_operands_are_loaded_128_bits_at_a_time(op, results):
    plain = [r for r in results if (r.job.op, r.job.target, r.job.variant) == (op, "sm_90", "plain")]
    large = [r for r in plain if r.job.model == "llama3"]
    assert any(facts.loads_128_bits for result in large for facts in result.facts), large


def test_gate_reports_what_does_not_fit_and_what_fails():
    job = Job("matmul", "gfx942", "llama3", 512, "bf16", config={"BLOCK_M": 256, "BLOCK_N": 256})
    wrong = Job("matmul", "sm_90", "llama3", 512, "bf16", config={"BLOCK_M": 24})
    large, failed = compile_all([job, wrong], workers=1)
    assert not large.fits and "shared memory" in large.faults[0]
    assert failed.error and not failed.fits


def test_gate_outlives_a_compiler_that_ends_its_process(monkeypatch):
    monkeypatch.setattr("tests.aot.gate.WORKER", "import os, sys; sys.stdin.readline(); os.abort()")
    results = compile_all([Job("activation", "sm_90", "smollm2", 1, "bf16")] * 2, workers=2)
    assert [r.error for r in results] == ["the compiler ended its process with status -6"] * 2


def test_faults_of_a_default(monkeypatch):
    monkeypatch.setattr("tests.aot.jobs.is_pinned", lambda: True)
    fine = Facts("k", 32, 0, 1024, True, True, True, 0.1)
    job = Job("matmul", "sm_90", "llama3", 512, "bf16")
    assert Result(job, (fine,)).faults == []
    spilling = Facts("k", 255, 16, TARGETS["sm_90"].shared_bytes + 1, True, False, True, 0.1)
    assert len(Result(job, (spilling,)).faults) == 3
    assert len(Result(Job("matmul", "sm_90", "llama3", 512, "fp32"), (spilling,)).faults) == 2
    # of another Triton than the pinned one only what spills in a loop is a fault
    monkeypatch.setattr("tests.aot.jobs.is_pinned", lambda: False)
    job = Job("lm_head", "sm_90", "llama3", 1, "fp32")
    outside, inside = (Facts("k", 255, 8, 0, False, False, True, 0.1, inner_spills=n) for n in (0, 2))
    assert Result(job, (outside,)).faults == []
    assert Result(job, (inside,)).faults == ["spills 8 bytes"]


def test_jobs_cover_every_op_variant_and_configuration():
    assert set(VARIANTS) <= {op.name for op in OPS}
    assert {job.op for job in defaults(tuple(TARGETS))} == {op.name for op in OPS}
    assert len(list(space(tuple(TARGETS)))) == len(TARGETS) * sum(len(op.space) for op in OPS)
    for job in defaults(("sm_90",)):
        op = next(op for op in OPS if op.name == job.op)
        tensors = [x for x in arguments(op, job).values() if hasattr(x, "device")]
        assert tensors and all(x.device.type == "meta" for x in tensors)
        assert job.model in MODELS
