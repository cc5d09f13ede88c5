"""The benchmark of whole models: what it writes, and when it refuses to compare."""

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from bench import compare, generate, machine, peers, run, static
from bench import tune as bench_tune
from tests.gguf_files import tiny_gguf
from trinfer import backend
from trinfer.kernels import OPS

needs_kernels = pytest.mark.skipif(backend.kind() == "reference", reason="no kernel can run on this machine")


def test_results_belong_to_the_design_of_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slug = backend.device_slug(torch.device("cpu"))
    monkeypatch.setattr(backend, "default_device", lambda: torch.device("cpu"))
    facts = {"model name": "A Processor", "cpu family": "26", "model": "2", "flags": "fpu"}
    monkeypatch.setattr(machine, "_cpu_facts", lambda: facts)
    assert machine.cpu_name() == "A Processor, family 26 model 2"
    assert machine.results_path(tmp_path) == tmp_path / f"{slug}_family_26_model_2.json"
    del facts["cpu family"]
    assert machine.cpu_name() == "A Processor"
    assert machine.results_path(tmp_path) == tmp_path / f"{slug}.json"


@pytest.fixture
def args(tmp_path: Path) -> argparse.Namespace:
    model = str(tiny_gguf(tmp_path))
    sizes = {"batch": 2, "prompt_tokens": 8, "new_tokens": 4, "repeats": 2, "competitors": 1}
    return argparse.Namespace(model=model, dtype="fp32", peers=[], **sizes)


@needs_kernels
def test_result_names_both_sides_their_ratio_and_the_machine(
    args: argparse.Namespace, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'trinfer[bench]'")
    facts = generate.machine(backend.default_device())
    for _ in range(2):
        path = generate.save(generate.compare(args), facts, tmp_path / "results")
    # asking again replaced the row
    (row,) = json.loads(path.read_text())["generate"]
    ratio = row["trinfer"]["tokens_per_s"] / row["transformers"]["tokens_per_s"]
    assert row["tokens_per_s_ratio"] == pytest.approx(ratio, abs=1e-3)
    assert row["date"] and {"device", "threads", "torch", "triton", "transformers"} <= row["machine"].keys()
    assert path.with_name(f"{path.stem}_generate.png").stat().st_size > 1000


@needs_kernels
def test_a_peer_joins_the_run_from_a_process_of_its_own(args: argparse.Namespace) -> None:
    args.peers, args.competitors = ["transformers-sdpa"], 0
    row = generate.compare(args)
    assert row["transformers-sdpa"]["tokens_per_s"] > 0
    assert {"prefill_ms", "tokens_per_s", "share_of_read"} <= row["transformers-sdpa"].keys()


@needs_kernels
def test_a_peer_that_is_not_installed_is_named(args: argparse.Namespace) -> None:
    args.peers = ["no-such-engine"]
    with pytest.raises(SystemExit, match="peer no-such-engine does not run in .*KeyError"):
        generate.compare(args)


def test_u112_different_tokens_give_no_ratio(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = iter([torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 4, 4]])])
    monkeypatch.setattr(generate, "measure", lambda *_: (next(sides), 1.0, 1.0))
    monkeypatch.setattr(generate, "count_launches", lambda: contextlib.nullcontext(Counter(gemv=1)))
    with pytest.raises(SystemExit, match="tokens differ from transformers from token 2 on"):
        generate.compare(args)


@needs_kernels
def test_16_bits_may_choose_other_tokens_of_equal_likelihood(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    args.dtype = "bf16"
    result = generate.compare(args)
    assert 0 <= result["perplexity_difference"] <= generate.PERPLEXITY_LIMIT
    likelihoods = iter([1.0, 1.006])
    monkeypatch.setattr(generate, "mean_nll", lambda *_: next(likelihoods))
    with pytest.raises(SystemExit, match=r"perplexity differs from transformers' by 0\.60%"):
        generate.compare(args)


def test_u112_no_launch_gives_no_ratio(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "measure", lambda *_: (torch.tensor([[1]]), 1.0, 1.0))
    monkeypatch.setattr(generate, "count_launches", lambda: contextlib.nullcontext(Counter()))
    with pytest.raises(SystemExit, match="no kernel of trinfer was launched"):
        generate.compare(args)


@needs_kernels
def test_every_kernel_has_a_row_with_bytes_and_operations(tmp_path: Path) -> None:
    questions = argparse.Namespace(ops=None, models=["smollm2"], dtypes=["fp32"])
    asked = list(run.questions(questions))
    assert {op.name for op, *_ in asked} == {op.name for op in OPS}
    op = next(op for op in OPS if op.name == "rms_norm")
    row = run.measure(op, "smollm2", 1, "fp32", 3)
    moved, operations = op.cost(**run.inputs(op, "smollm2", 1, torch.float32, backend.default_device()))
    assert row["gb_per_s"] == pytest.approx(moved / row["us"] / 1e3, rel=0.02, abs=0.01)
    assert row["gflop_per_s"] == pytest.approx(operations / row["us"] / 1e3, rel=0.02, abs=0.01)
    for _ in range(2):
        path = run.save([row], {"device": "this one"}, tmp_path)
    assert len(json.loads(path.read_text())["kernels"]) == 1


@needs_kernels
@pytest.mark.parametrize("comparison", compare.COMPARISONS, ids=[c.name for c in compare.COMPARISONS])
def test_both_sides_of_a_comparison_compute_the_same(comparison: compare.Comparison) -> None:
    results = [call() for call in comparison.sides().values()]
    ours, theirs = (x.float() for x in results)
    if ours.shape != theirs.shape:
        # torch keeps heads before tokens
        theirs = theirs.transpose(1, 2)
    limit = 0.2 if "int4" in comparison.name else 0.02
    assert float((ours - theirs).norm() / theirs.norm()) < limit


def test_ratio_is_the_median_over_rounds() -> None:
    times = {"trinfer": [1.0, 2.0, 4.0], "torch": [2.0, 2.0, 12.0]}
    assert run.ratio(times, "trinfer", "torch") == 2.0


@pytest.mark.skipif(not backend.has_triton(), reason="compiles with triton")
def test_static_report_of_a_device_that_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'trinfer[bench]'")
    found = static.main(
        [*["--ops", "activation", "gemv", "--models", "smollm2", "--most", "1", "--results"], str(tmp_path)]
    )
    out, _ = capsys.readouterr()
    lines = [line for line in out.split("\n") if line.startswith(("activation", "gemv"))]
    assert len(lines) == len(found) and sum("shipped: BLOCK_" in line for line in lines) == 2
    for model, _, _, one in found:
        assert model == "smollm2" and one.us >= one.floor_us > 0 and one.facts[0].registers > 0
    assert "predicted" in out.strip().split("\n")[-1]
    assert (tmp_path / "static_sm_90.png").stat().st_size > 10_000


@needs_kernels
@pytest.mark.slow
def test_gpu_run_is_rehearsed_from_end_to_end(tmp_path: Path) -> None:
    root, out = Path(__file__).parent.parent, tmp_path / "out"
    environment = {**os.environ, "PYTHON": sys.executable}
    environment.pop("TRINFER_AUTOTUNE_CACHE")
    command = ["bash", "bench/gpu_run.sh", str(out), "--small"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = dict(line.split(" ", 1) for line in (out / "steps.txt").read_text().split("\n") if line)
    assert list(steps) == ["calibrate", "tune", "peers", "models", "tests"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["calibrate"]["constants"]["read_gbps"] > 0
    assert summary["tune"]["measured"] == summary["tune"]["keys"] > 3
    assert summary["models"]["tiny"]["decode_ratio"] > 0 and summary["models"]["tiny"]["difference"] < 1e-3
    assert [row for row in summary["peers"] if "refused" in row] == []
    assert list((out / "autotune_cache").glob("*/gemv.json"))
    assert not list(root.glob("autotune_cache/*/.*"))


def test_gpu_run_says_what_it_needs(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    for arguments, words in (
        ([], "usage: bash bench/gpu_run.sh"),
        ([str(tmp_path / "o")], "missing packages:"),
    ):
        done = subprocess.run(
            ["bash", "bench/gpu_run.sh", *arguments],
            cwd=root,
            env={**os.environ, "PYTHON": str(fake)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and words in done.stderr


def test_u112_peers_that_differ_get_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = next(p for p in peers.PEERS if p.op == "softmax")
    sizes = {"N": 64}
    assert peers.measure(peer, sizes, "fp32", 1)["ratio"] > 0
    wrong = dataclasses.replace(peer, theirs=lambda x: torch.softmax(x, -1) * 1.01)
    row = peers.measure(wrong, sizes, "fp32", 1)
    assert "ratio" not in row and row["refused"] == "the results differ"
    assert "no ratio" in peers.line({"model": "m"} | row)


@needs_kernels
def test_tuned_against_default_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINFER_AUTOTUNE_CACHE", str(tmp_path))
    threads = torch.get_num_threads()
    options = ["--ops", "rms_norm", "activation", "--dtypes", "fp32", "--rounds", "3"]
    assert bench_tune.main([*options, "--results", str(tmp_path)]) in (0, 1)
    torch.set_num_threads(threads)
    (path,) = tmp_path.glob("*.json")
    content = json.loads(path.read_text())["tune"]
    assert {row["op"] for row in content["rows"]} == {"rms_norm", "activation"}
    assert content["a hit is at most 5 % of a launch"] and content["machine"]["triton"]


def test_verdict_of_tuning_names_each_line_that_fails() -> None:
    def lines(*gains: float, hit: float = 0.01) -> list[bool]:
        result = bench_tune.verdict([{"gain": gain} for gain in gains], hit)
        return [value for value in result.values() if isinstance(value, bool)]

    assert lines(1.0, 1.05) == [True, True, True]
    assert lines(0.96, 1.05) == [False, True, True]
    assert lines(1.0, 1.3) == [True, False, True]
    assert lines(1.0, 1.0, 1.0, 1.0, 1.6) == [True, False, True]
    assert lines(1.0, hit=0.06) == [True, True, False]
