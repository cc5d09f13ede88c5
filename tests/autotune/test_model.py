"""The cost model: laws, and the winners of published searches on two GPUs among its first choices."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinfer import backend, kernels
from trinfer.autotune import collect, devices, lookup, model, ranking
from trinfer.autotune.devices import Device, named
from trinfer.autotune.rows import candidates

TABLES = json.loads((Path(__file__).parents[1] / "data" / "published_products.json").read_text())["tables"]
# the two or three constants of the model that no datasheet says were set with these tables in view
TARGETS = {"h100": ("nvidia_h100_80gb_hbm3", "sm_90"), "a100": ("sm_80", "sm_80")}


class Key(NamedTuple):
    """A product of 8-bit integers."""

    dtype: torch.dtype
    M: int
    N: int
    K: int


def device_of(table: str) -> Device:
    slug, arch = TARGETS[table.split()[0]]
    device = named(slug) or named(arch)
    assert device is not None
    return device


def predicted(key: Key, configuration: list[int], device: Device) -> float:
    rows, columns, depth, warps, stages = configuration
    config = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": depth, "num_warps": warps, "num_stages": stages}
    programs = -(-key.M // rows) * -(-key.N // columns)
    moved = key.N * key.K + key.M * key.K + 2 * key.M * key.N
    work = model.shaped(key, config, programs, moved, 2 * key.M * key.N * key.K, torch.int8)
    return model.gpu_us(work, device)


def shares(name: str, most: int = 8) -> tuple[float, float]:
    """Share of the shapes whose winner is among the model's first `most`, and that of a blind guess."""
    device, table = device_of(name), TABLES[name]
    hits = chance = 0.0
    for M, N, K, winner in table["winners"]:
        # the published search tried only what divides K
        tried = [n for n, c in enumerate(table["configurations"]) if K % c[2] == 0 or n == winner]
        key = Key(torch.int8, M, N, K)
        times = {n: predicted(key, table["configurations"][n], device) for n in tried}
        first = sorted(tried, key=lambda n: (times[n], n))[:most]
        hits += winner in first
        chance += min(1.0, most / len(tried))
    return hits / len(table["winners"]), chance / len(table["winners"])


@pytest.mark.parametrize("name", TABLES)
def test_winners_of_published_searches_are_among_the_first_8(name, record_property):
    share, chance = shares(name)
    record_property("measured", f"{name}: {share:.0%} of the winners in the top 8, {chance:.0%} by chance")
    assert share >= 0.8


def test_the_first_3_are_far_better_than_chance_for_large_products():
    share, chance = shares("h100 gemm", 3)
    assert share >= 0.6 and chance <= 0.2


sizes = st.sampled_from((1, 16, 128, 1024, 4096))
tiles = st.sampled_from([tuple(c) for c in TABLES["h100 gemm"]["configurations"]])
H100 = device_of("h100 gemm")


@given(sizes, sizes, sizes, tiles)
def test_no_prediction_is_below_the_roofline(M, N, K, tile):
    key = Key(torch.int8, M, N, K)
    us = predicted(key, list(tile), H100)
    moved = N * K + M * K + 2 * M * N
    assert us >= model.roofline_us(moved, 2 * M * N * K, torch.int8, H100) > 0


@given(sizes, sizes, sizes, tiles)
def test_a_slower_device_takes_no_less_time(M, N, K, tile):
    key = Key(torch.int8, M, N, K)
    us = predicted(key, list(tile), H100)
    slow = replace(H100, read_gbps=H100.read_gbps / 2, tflops={n: x / 2 for n, x in H100.tflops.items()})
    assert predicted(key, list(tile), slow) >= us


def test_what_does_not_fit_or_spills_is_never_promising():
    key = Key(torch.int8, 1024, 4096, 4096)
    assert predicted(key, [256, 256, 512, 8, 4], H100) == math.inf
    work = model.shaped(key, {"BLOCK_N": 64, "num_warps": 4}, 64, 1e6, 1e6, torch.int8)
    assert math.isfinite(model.gpu_us(work, H100))
    assert model.gpu_us(replace(work, registers=256), H100) == math.inf


def test_occupancy_is_what_the_scarcest_resource_allows():
    key = Key(torch.int8, 1024, 4096, 4096)
    work = model.shaped(key, {"BLOCK_N": 64, "num_warps": 4}, 132 * 32, 1e6, 1e6, torch.int8)
    for changes, most in (
        ({"registers": 32, "shared_bytes": 0}, 16),
        ({"registers": 128, "shared_bytes": 0}, 4),
        ({"registers": 32, "shared_bytes": 100_000}, 2),
        ({"registers": 32, "shared_bytes": 0, "warps": 1}, 32),
    ):
        assert model.occupancy(replace(work, **changes), H100) == most
    assert model.waves(replace(work, registers=128, shared_bytes=0), H100) == 8.0


@pytest.mark.skipif(backend.kind() != "cpu", reason="ranks for the CPU backend")
def test_the_order_on_a_cpu_prefers_fewer_programs_and_wide_tiles():
    x, w = torch.zeros(64, 256), torch.zeros(512, 256)
    with collect() as calls:
        kernels.matmul(x, w)
    (call,) = calls.values()
    device = Device(20.0, 60.0, {"float32": 0.1, "float16": 0.1, "bfloat16": 0.1}, 5.0, 2, 1 << 20)
    configs = candidates(call.op, call.key)
    first = model.ranked(call, configs, device)
    assert len(first) == len(configs)
    small = min(configs, key=lambda c: c["BLOCK_M"] * c["BLOCK_N"] * c["BLOCK_K"])
    assert first.index(small) > len(first) // 2


@pytest.mark.skipif(not backend.has_triton(), reason="compiles with triton")
def test_a_launch_is_estimated_from_what_the_compiler_says():
    op = next(op for op in kernels.OPS if op.name == "gemv")
    arguments = op.inputs(M=1, N=4096, K=4096, dtype=torch.bfloat16, device=torch.device("meta"))
    with ranking.launches_on("sm_90"), collect() as calls:
        op.launcher(**arguments)
    (call,) = calls.values()
    found = ranking.estimate(call, ranking.default(call, "sm_90"), "sm_90")
    assert found.work.registers == found.facts[0].registers > 0
    assert found.work.programs == 4096 // found.config["BLOCK_N"]
    assert 0 < found.floor_us < found.us < 20 * found.floor_us
    assert len(ranking.best(call, "sm_90", 8)) == 8


def test_constants_are_measured_once_and_kept(folders, monkeypatch):
    measured = Device(20.0, 60.0, {"float32": 0.1, "float16": 0.1, "bfloat16": 0.1}, 5.0, 2, 1 << 20)
    asked = []
    monkeypatch.setattr(devices, "calibrate", lambda device: asked.append(device) or measured)
    monkeypatch.setattr(backend, "default_device", lambda: torch.device("cpu"))
    devices.here.cache_clear()
    assert devices.here("cpu_x", 2) == devices.here("cpu_x", 2) == measured
    devices.here.cache_clear()
    assert devices.here("cpu_x", 2) == measured and len(asked) == 1
    devices.here.cache_clear()
    path = lookup.user_folder() / "devices.json"
    for text in ("{", "[]", '{"cpu_x threads=2": {"read_gbps": 1}}'):
        path.write_text(text)
        with pytest.warns(UserWarning, match="devices.json is ignored"):
            assert named("cpu_x threads=2") is None


def test_calibration_gives_plausible_constants(monkeypatch):
    monkeypatch.setattr(devices, "_seconds", lambda call, rounds=5: call() is None or 1e-3)
    device = devices.calibrate(torch.device("cpu"))
    assert device.read_gbps == pytest.approx(4 * (1 << 26) / 1e-3 / 1e9, rel=1e-3)
    assert device.launch_us == 1000.0 and device.tflops["float32"] == pytest.approx(
        2 * 768**3 / 1e9, rel=1e-2
    )
