"""Compile a launch for a GPU that is not there, and read what the compiler made of it.

A launcher is called with meta tensors while its launch is caught; the kernel is then compiled through
Triton's own specialisation for a driver that names a target and owns no device.
"""

import contextlib
import math
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Target:
    """A GPU architecture: how Triton names it, and the shared memory one block may use."""

    gpu: GPUTarget
    shared_bytes: int
    multiprocessors: int


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 * 1024, 108),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * 1024, 132),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * 1024, 148),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * 1024, 304),
}


@dataclass(frozen=True)
class Facts:
    """What one compiled kernel needs and uses.

    `inner_spills`: instructions in the innermost loops that move what did not fit into registers; elsewhere
    that happens once a program or once a row.
    """

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    has_dot: bool
    uses_matrix_units: bool
    loads_128_bits: bool
    seconds: float
    inner_spills: int = 0


class NoDevice(DriverBase):
    """A driver that answers what the compiler asks, for a GPU that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__()
        self.target = target

    @classmethod
    def is_active(cls) -> bool:
        """Never found by itself."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Only launchers ask, and nothing is launched."""
        raise NotImplementedError(ty)

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> Any:
        """A key of its own for the caches inside a JITFunction."""
        return self.target

    def get_current_stream(self, device: Any) -> int:
        """No work is queued."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Tensors without memory."""
        return torch.device("meta")

    def get_benchmarker(self) -> Callable[..., Any]:
        """Nothing can be timed."""
        raise NotImplementedError


@dataclass(frozen=True)
class Launch:
    """What a launcher would have started."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def programs(self) -> int:
        """Programs of the grid."""
        return math.prod(self.grid)


@contextlib.contextmanager
def caught() -> Iterator[list[Launch]]:
    """Note what is launched inside the `with` block; none of it runs."""
    launches: list[Launch] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(Launch(kernel, grid if isinstance(grid, tuple) else grid(options), args, options))

    run = JITFunction.run
    JITFunction.run = note
    try:
        yield launches
    finally:
        JITFunction.run = run


def compile_launches(launches: list[Launch], target: Target) -> list[Facts]:
    """Compile every launch for `target`; the kernels land in Triton's cache, for the day it is there."""
    previous = triton.runtime.driver.active
    triton.runtime.driver.set_active(NoDevice(target.gpu))
    try:
        return [_compile(launch) for launch in launches]
    finally:
        triton.runtime.driver.set_active(previous)


def _compile(launch: Launch) -> Facts:
    start = time.perf_counter()
    compiled = launch.kernel.run(*launch.args, grid=(1,), warmup=True, **launch.options)
    seconds = time.perf_counter() - start
    asm = compiled.asm
    if "ptx" in asm:
        registers, spilled = _cubin_resources(asm["cubin"])
        inner = _inner_spills(asm["cubin"]) if spilled else 0
        matrix = re.search(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)", asm["ptx"])
        wide = re.search(
            r"ld\.global\S*\.(v4\.\w32|v2\.\w64|v8\.\w32|v4\.\w64)|cp\.async\S+ [^;]*, 0x10", asm["ptx"]
        )
    else:
        text = asm["amdgcn"]
        registers, spilled = _number("vgpr_count", text), 4 * _number("vgpr_spill_count", text)
        inner = spilled
        matrix, wide = re.search(r"\bv_mfma", text), re.search(r"(global|buffer)_load_dwordx4", text)
    return Facts(
        kernel=launch.kernel.__name__,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=compiled.metadata.shared,
        has_dot="tt.dot" in asm["ttir"],
        uses_matrix_units=bool(matrix),
        loads_128_bits=bool(wide),
        seconds=round(seconds, 2),
        inner_spills=inner,
    )


def _number(name: str, text: str) -> int:
    found = re.search(rf"\.{name}:\s+(\d+)", text)
    return int(found[1]) if found else 0


def _cubin_resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes it keeps in local memory because they did not fit."""
    text = _cuobjdump(cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"{CUOBJDUMP} printed no resource usage: {text}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _inner_spills(cubin: bytes) -> int:
    """Loads and stores of local memory in loops that hold no other loop."""
    code = _cuobjdump(cubin, "--dump-sass")
    lines = [(int(m[1], 16), m[2]) for m in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)]
    jumps = [(at, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)) for at, text in lines]
    # the last branch of a kernel jumps to itself
    loops = [(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) < at]
    innermost = [loop for loop in loops if not any(_holds(loop, other) for other in loops)]
    spills = [at for at, text in lines if re.search(r"\b(LDL|STL)\b", text)]
    return sum(any(a <= at <= b for a, b in innermost) for at in spills)


def _holds(loop: tuple[int, int], other: tuple[int, int]) -> bool:
    return loop != other and loop[0] <= other[0] and other[1] <= loop[1]


def _cuobjdump(cubin: bytes, option: str) -> str:
    """What Triton's own cuobjdump prints of a kernel; its disassembler lies beside it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command, environment = [str(CUOBJDUMP), option, file.name], {"PATH": str(CUOBJDUMP.parent)}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
