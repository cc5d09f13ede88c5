"""Microseconds of a launch from its numbers alone: memory, arithmetic, and how well programs fill a device.

The same model orders what a search tries, names the floor that a row is compared with, and ranks
configurations for a GPU that is not there. Source: https://arxiv.org/abs/2512.04226 for its parts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from trinfer import backend
from trinfer.autotune.choice import pin
from trinfer.autotune.devices import Device, current
from trinfer.autotune.measure import named, tensors
from trinfer.autotune.records import Call, Config
from trinfer.backend.targets import Facts, caught

# bytes that one multiprocessor must have asked for to keep the memory of a large GPU busy
IN_FLIGHT_BYTES = 24 * 1024
REGISTERS, WARPS, BLOCKS = 65536, 64, 32
# from the first address to the first number, and from the last number to the end, of one program
PROGRAM_US = 1.2
# of starting another program in the place of one that is done, while its neighbours work on
ROUND_US = 0.05
# of one step of a loop whose loads are not ahead of it, and how many loads the assembler puts first in one
# whose sums need no matrix units
LATENCY_US, UNROLLED = 0.7, 4
# a sum on ordinary units: of each multiply-add, what is left beside loading and converting its numbers, and
# the warps of a multiprocessor that hide each other's waiting
VECTOR_SHARE, ENOUGH_WARPS = 0.2, 12
# a CPU: handing a program to a thread, and one step of its inner loop
CPU_PROGRAM_US, CPU_STEP_US = 0.3, 0.02


@dataclass(frozen=True)
class Work:
    """One launch in numbers.

    A program makes `steps` steps, each of which loads `step_bytes`; `rows` and `columns` are its tile of a
    product, 1 where it multiplies no tiles. `registers` of a thread and `shared_bytes` of a program come from
    the compiler, or from an estimate.
    """

    bytes: float
    flops: float
    programs: int
    steps: int
    step_bytes: float
    rows: int
    columns: int
    warps: int
    stages: int
    registers: int
    shared_bytes: int
    dtype: torch.dtype

    @property
    def depth(self) -> float:
        """Inner length of a tile's product."""
        return self.flops / (2 * self.rows * self.columns * self.programs)

    @property
    def ahead(self) -> int:
        """Steps whose loads are under way together: the stages of a pipeline, or what is unrolled."""
        return max(1, self.stages - 1) if self.has_tiles else UNROLLED * max(1, self.stages)

    @property
    def has_tiles(self) -> bool:
        """Matrix units may multiply."""
        return self.rows >= 16


def floor_us(call: Call, device: torch.device) -> float:
    """The time below which no kernel can come: each byte once, each operation once, nothing else."""
    constants = current()
    if device.type != "cuda":
        # weights of a small layer stay in the last cache, however the copies take turns
        constants = replace(constants, read_gbps=max(constants.read_gbps, constants.cache_gbps))
    return roofline_us(*call.op.cost(**named(call)), dtype_of(call), constants)


def roofline_us(moved: float, flops: float, dtype: torch.dtype, device: Device) -> float:
    """The longer of reading the bytes and doing the arithmetic."""
    return max(moved / device.read_gbps / 1e3, flops / device.peak_tflops(dtype) / 1e6)


def dtype_of(call: Call) -> torch.dtype:
    """What products of a call are made of."""
    dtype = getattr(call.key, "dtype", None)
    if dtype is None:
        dtype = next(
            (x.dtype for x in tensors((call.args, call.kwargs)) if x.is_floating_point()), torch.float32
        )
    return dtype


def ranked(
    call: Call,
    configs: list[Config],
    device: Device | None = None,
    facts: Callable[[Config], list[Facts] | None] = lambda config: None,
) -> list[Config]:
    """Configurations, the most promising first; those that cannot fit the device are left out.

    `facts` says what a compiler found out about a configuration, where one was asked.
    """
    device = device or current()
    works = [with_facts(work_of(call, config), facts(config)) for config in configs]
    timed = sorted((predicted_us(work, device), number) for number, work in enumerate(works))
    return [configs[number] for us, number in timed if math.isfinite(us)]


def with_facts(work: Work, facts: list[Facts] | None) -> Work:
    """The numbers of a launch with what the compiler said in place of the estimates."""
    if not facts:
        return work
    most = max(facts, key=lambda f: (f.shared_bytes, f.registers))
    # a spill is memory traffic that the model does not know: it is never promising
    registers = 256 if any(f.spilled_bytes for f in facts) else max(f.registers for f in facts)
    return replace(work, registers=registers, shared_bytes=most.shared_bytes)


def work_of(call: Call, config: Config) -> Work:
    """The numbers of a call in a configuration, by catching what its launcher would start."""
    with pin(call.op, config), caught() as launches:
        call.op.launcher(*call.args, **call.kwargs)
    programs = max((launch.programs for launch in launches), default=1)
    moved, flops = call.op.cost(**named(call))
    return shaped(call.key, config, programs, moved, flops, dtype_of(call))


def shaped(key: Any, config: Config, programs: int, moved: float, flops: float, dtype: torch.dtype) -> Work:
    """The numbers of a launch from what its key and its configuration call things."""
    width = dtype.itemsize
    rows, columns = config.get("BLOCK_M", config.get("BLOCK_H", 1)), config.get("BLOCK_N", 1)
    warps, stages = config.get("num_warps", 4), config.get("num_stages", 1)
    work = Work(moved, flops, programs, 1, moved / programs, 1, 1, warps, stages, 32, 0, dtype)
    K, D = getattr(key, "K", 0), getattr(key, "D", 0)
    if "BLOCK_K" in config and K:
        block, weights = config["BLOCK_K"], 1 + getattr(key, "gated", False)
        bits = getattr(key, "bits", 8 * width)
        loaded = columns * block * weights * bits / 8 + (rows * block * width if rows >= 16 else 0)
        work = replace(work, rows=rows, columns=columns, steps=-(-K // block), step_bytes=loaded)
        return _sized(work, rows * columns * weights, loaded)
    if D and "BLOCK_N" in config:
        steps = flops / programs / (4 * max(1, rows) * columns * D)
        loaded = columns * (D + getattr(key, "Dv", D)) * width
        work = replace(work, rows=rows, columns=columns, steps=max(1, round(steps)), step_bytes=loaded)
        return _sized(work, rows * (columns + D), loaded)
    return work


def _sized(work: Work, accumulated: int, loaded: float) -> Work:
    """With an estimate of registers and shared memory, until a compiler tells them."""
    threads = 32 * work.warps
    if work.has_tiles:
        shared = int(max(1, work.stages - 1) * loaded)
        return replace(work, registers=min(256, 40 + accumulated // threads), shared_bytes=shared)
    held = 2 * loaded / work.dtype.itemsize * max(1, work.stages - 1)
    return replace(work, registers=min(256, 24 + int(held) // threads))


def predicted_us(work: Work, device: Device) -> float:
    """Microseconds of a launch; infinite if it cannot run."""
    return gpu_us(work, device) if backend.kind() == "gpu" else _cpu_us(work, device)


def occupancy(work: Work, device: Device) -> int:
    """Programs that one multiprocessor runs at a time."""
    by_registers = REGISTERS // (max(16, -(-work.registers // 8) * 8) * 32 * work.warps)
    by_shared = (device.shared_bytes + 1024) // (work.shared_bytes + 1024)
    return min(by_registers, by_shared, WARPS // work.warps, BLOCKS)


def waves(work: Work, device: Device) -> float:
    """How often the device is filled."""
    return work.programs / (device.multiprocessors * max(1, occupancy(work, device)))


def in_flight_bytes(work: Work, device: Device) -> float:
    """What one multiprocessor has asked for at a time."""
    programs = min(occupancy(work, device), max(1.0, work.programs / device.multiprocessors))
    return programs * work.step_bytes * min(work.ahead, work.steps)


def gpu_us(work: Work, device: Device) -> float:
    """Microseconds on a GPU; infinite if a program does not fit."""
    most = occupancy(work, device)
    if most < 1 or work.registers >= 256:
        return math.inf
    turns = math.ceil(work.programs / device.multiprocessors)
    rounds = math.ceil(turns / most)
    together = min(most, turns)
    compute = turns * _program_flops(work) / (_rate(work, device, together) / device.multiprocessors)
    cache = turns * work.steps * work.step_bytes / (device.cache_gbps * 1e3 / device.multiprocessors)
    share = min(1.0, in_flight_bytes(work, device) / IN_FLIGHT_BYTES)
    busy = min(1.0, work.programs / device.multiprocessors)
    memory = work.bytes / (device.read_gbps * 1e3 * min(1.0, share * busy))
    # what loads do not hide behind each other
    steps = rounds * work.steps * LATENCY_US / (work.ahead * (together if work.has_tiles else 1))
    return device.launch_us + PROGRAM_US + rounds * ROUND_US + max(compute, cache, memory, steps)


def _program_flops(work: Work) -> float:
    """What one program computes, the empty lanes of its tile included."""
    padded = 2 * work.rows * work.columns * max(1.0, work.depth)
    return padded if work.has_tiles else work.flops / work.programs


def _rate(work: Work, device: Device, together: int) -> float:
    """Operations in a microsecond: tiles by what feeds the matrix units, other sums by threads that wait."""
    if work.has_tiles:
        return device.peak_tflops(work.dtype) * 1e6 * _efficiency(work, device, together)
    threads = min(1.0, together * work.warps / ENOUGH_WARPS)
    return device.tflops["float32"] * 1e6 * VECTOR_SHARE * threads


def _efficiency(work: Work, device: Device, together: int) -> float:
    """Share of the peak that a tile reaches: large ones feed the matrix units, small ones wait."""
    if work.rows < 64:
        return 0.3 if work.columns < 64 else 0.45
    area = work.rows * work.columns
    if device.has_warpgroups:
        by_width = {32: 0.45, 64: 0.7, 128: 0.9}.get(work.columns, 1.0)
        return by_width * (1.0 if work.warps >= 8 or area <= 128 * 64 else 0.8)
    # each warp loads what it multiplies into registers: both sides count, and a neighbour covers the waits
    by_area = 0.55 if area < 64 * 64 else 0.75 if area < 64 * 128 else 0.9 if area < 128 * 128 else 1.0
    return by_area * (1.0 if together > 1 else 0.8)


def _cpu_us(work: Work, device: Device) -> float:
    threads = torch.get_num_threads()
    uneven = math.ceil(work.programs / threads) * threads / work.programs
    work_us = roofline_us(work.bytes, work.flops, work.dtype, device)
    steps = work.programs * work.steps
    # a vector is 16 numbers wide: a smaller tile leaves lanes empty
    empty = max(1.0, 256 / max(1, work.rows * work.columns)) if work.has_tiles else 1.0
    overhead = (work.programs * CPU_PROGRAM_US + steps * CPU_STEP_US) / threads
    return device.launch_us + uneven * (work_us * empty + overhead)
