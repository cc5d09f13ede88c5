"""Where an op runs: on a GPU, compiled on the CPU, in Triton's interpreter, or as its PyTorch reference."""

import contextlib
import functools
import importlib.util
import os
import platform
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from trinfer import cpu
from trinfer.backend.operations import Operations as Operations

Kind = Literal["gpu", "cpu", "interpreter", "reference"]


@dataclass(frozen=True)
class Backend:
    """What the machine offers to one engine: the kind of execution, the device and the dtypes it can run."""

    kind: Kind
    device: torch.device
    dtypes: tuple[torch.dtype, ...]


def has_triton() -> bool:
    """True if the triton package can be imported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def kind() -> Kind:
    """The one place that decides where kernels run in this process; activates the CPU backend if that is
    it."""
    if not has_triton():
        return "reference"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter"
    if torch.cuda.is_available():
        return "gpu"
    if cpu.find_compiler() is None:
        return "reference"
    cpu.activate()
    return "cpu"


def runs_triton(x: torch.Tensor) -> bool:
    """True if a kernel on `x` runs as Triton; False (with one warning a process) if its reference runs
    instead."""
    where = kind()
    if where == "reference" or (where == "gpu" and not x.is_cuda):
        _warn_reference()
        return False
    return True


def why_reference() -> str:
    """Why kernels fall back to their references on this machine, and what to install."""
    if not has_triton():
        return "the package triton cannot be imported; install it with: pip install triton"
    if torch.cuda.is_available():
        return (
            "the tensors are on the CPU of a machine with a GPU; move the model to the GPU: model.to('cuda')"
        )
    return cpu.NO_COMPILER


@functools.cache
def _warn_reference() -> None:
    warnings.warn(f"trinfer kernels run as their slow PyTorch references: {why_reference()}", stacklevel=4)


@functools.cache
def supported_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """The floating point types that kernels can run in on `device`."""
    if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) < (8, 0):
        return (torch.float32, torch.float16)
    return (torch.float32, torch.float16, torch.bfloat16)


def free_bytes(device: torch.device) -> int:
    """Memory in bytes that a new allocation on `device` may take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as meminfo:
        available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read())
    return int(available[1]) * 1024 if available else 1 << 62


def read_gbps(device: torch.device) -> float:
    """Gigabytes a second that all of `device` together reads from its memory, the best of three."""
    x = torch.ones(1 << 28, dtype=torch.int8, device=device).view(torch.float32)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        x.sum().item()
        times.append(time.perf_counter() - start)
    return x.numel() * x.element_size() / min(times[1:]) / 1e9


def multiprocessor_count(device: torch.device) -> int:
    """SMs of a GPU, threads of torch's pool on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return torch.get_num_threads()


@functools.cache
def shared_bytes() -> int:
    """Shared memory in bytes that one block may use on the current GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # on an NVIDIA GPU more than the default is granted on request, which Triton makes
    return getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block


@functools.cache
def device_slug(device: torch.device) -> str:
    """Name of the device class as a folder name, e.g. `nvidia_h200` or `cpu_x86_64_avx512_bf16`."""
    if device.type == "cuda":
        return re.sub(r"\W+", "_", torch.cuda.get_device_name(device).lower()).strip("_")
    return "_".join(["cpu", platform.machine(), *cpu.features()])


def has_tile_registers() -> bool:
    """True if the CPU multiplies matrices of bfloat16 in registers made for them (AMX)."""
    return "amx_bf16" in cpu.features()


@contextlib.contextmanager
def as_if_on_gpu(shared: int, multiprocessors: int) -> Iterator[None]:
    """Inside the `with` block kernels are prepared for a GPU that is not there; nothing may be launched."""
    answers = {
        "kind": lambda: "gpu",
        "runs_triton": lambda x: True,
        "shared_bytes": lambda: shared,
        "multiprocessor_count": lambda device: multiprocessors,
    }
    own = {name: globals()[name] for name in answers}
    globals().update(answers)
    try:
        yield
    finally:
        globals().update(own)


def device_facts(device: torch.device) -> dict[str, str | int]:
    """What says whether numbers measured on one device hold on another."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "slug": device_slug(device),
            "arch": arch(device),
            "multiprocessors": properties.multi_processor_count,
            "shared_bytes": shared_bytes(),
        }
    return {"slug": device_slug(device), "arch": arch(device)}


@functools.cache
def arch(device: torch.device) -> str:
    """The architecture, which devices of several names share: `sm_90`, `gfx942`, `x86_64`."""
    if device.type != "cuda":
        return platform.machine()
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


@functools.cache
def triton_version() -> str:
    """Version of triton, or `none`."""
    if not has_triton():
        return "none"
    import triton

    return str(triton.__version__)


@functools.cache
def driver_version() -> str:
    """What turns compiled kernels into work: the GPU's driver and toolkit, or trinfer's own CPU backend."""
    if kind() != "gpu":
        return cpu.version()[:8]
    loaded = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module\D*([\d.]+)", loaded.read_text()) if loaded.exists() else None
    return f"{torch.version.hip or torch.version.cuda} {found[1] if found else ''}".strip()


def default_device() -> torch.device:
    """The device a model is placed on when the caller names none."""
    return torch.device("cuda", torch.cuda.current_device()) if kind() == "gpu" else torch.device("cpu")


def check(dtype: torch.dtype, use_triton: bool) -> Backend:
    """Find the backend for an engine.

    Raises:
        ValueError: `use_triton=True` where no kernel could run as Triton, or `dtype` that the device
        cannot run.
    """
    where, device = kind(), default_device()
    if use_triton and where == "reference":
        raise ValueError(
            f"use_triton=True is not possible here: {why_reference()}; or leave use_triton unset"
        )
    dtypes = supported_dtypes(device)
    if dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(
            f"dtype={dtype} cannot run on {device}; allowed here: {names}; pass one of these as dtype"
        )
    return Backend(where, device, dtypes)
