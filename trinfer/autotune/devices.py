"""The constants of a device that time is predicted from: read from a table, or measured in a second."""

import functools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trinfer import backend
from trinfer.autotune import lookup, table

FILE = "devices.json"
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True)
class Device:
    """What a device does at best, in practice: 10^9 bytes a second from memory and from its shared cache,
    10^12 operations a second by dtype, microseconds of a launch, and what its multiprocessors have.

    `has_warpgroups`: four warps multiply together and read shared memory themselves (sm_90 and later).
    """

    read_gbps: float
    cache_gbps: float
    tflops: dict[str, float]
    launch_us: float
    multiprocessors: int
    shared_bytes: int
    has_warpgroups: bool = False

    def peak_tflops(self, dtype: torch.dtype) -> float:
        """Of products whose inputs are `dtype`; codes of 8 bits have units of their own on some devices."""
        if dtype == torch.int8 and "int8" in self.tflops:
            return self.tflops["int8"]
        return self.tflops[NAMES.get(dtype, "float16")]


def named(name: str) -> Device | None:
    """The constants of an architecture or a device slug, the user's before the shipped ones."""
    for folder in (lookup.user_folder(), lookup.packaged_folder()):
        known = _read(folder / FILE)
        if name in known:
            return known[name]
    return None


@functools.cache
def here(slug: str, threads: int) -> Device:
    """The constants of this device, measured once where no table has them and nothing is assumed of it."""
    device = lookup.device()
    if device.type == "cuda":
        known = named(slug) or named(backend.arch(device))
        return known or calibrate(device)
    name = f"{slug} threads={threads}"
    known = named(name)
    if known is None:
        known = calibrate(device)
        keep(name, known)
    return known


def current() -> Device:
    """The constants of the device that kernels run on."""
    return here(backend.device_slug(lookup.device()), torch.get_num_threads())


def keep(name: str, device: Device) -> None:
    """Put measured constants into the user's table, a device a line."""
    path = lookup.user_folder() / FILE
    content = _read(path) | {name: device}
    lines = (f" {json.dumps(known)}: {json.dumps(asdict(facts))}" for known, facts in content.items())
    table.replace_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _read(path: Path) -> dict[str, Device]:
    try:
        content = json.loads(path.read_text())
        return {name: Device(**facts) for name, facts in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        table.warn_once(f"{path} is ignored: {error}")
        return {}


def calibrate(device: torch.device) -> Device:
    """Measure the constants of `device`: sums over memory and over a cache, products, empty launches."""
    is_gpu = device.type == "cuda"
    large, small, edge = (1 << 28, 1 << 22, 8192) if is_gpu else (1 << 26, 1 << 20, 768)
    rates = {}
    for dtype, name in NAMES.items():
        a, b = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
        rates[name] = round(2 * edge**3 / _seconds(functools.partial(torch.mm, a, b)) / 1e12, 4)
    # 16-bit floats may be slow in torch on a CPU; a kernel widens them
    rates["float16"] = max(rates["float16"], rates["float32"])
    x, y = (torch.ones(n, device=device) for n in (large, small))
    one = torch.ones(1, device=device)
    sm = torch.cuda.get_device_properties(device) if is_gpu else None
    return Device(
        read_gbps=round(4 * large / _seconds(x.sum) / 1e9, 1),
        cache_gbps=round(4 * small / _seconds(y.sum) / 1e9, 1),
        tflops=rates,
        launch_us=round(_seconds(lambda: one.add_(1)) * 1e6, 2),
        multiprocessors=sm.multi_processor_count if sm else torch.get_num_threads(),
        shared_bytes=backend.shared_bytes() if is_gpu else 1 << 20,
        has_warpgroups=is_gpu and backend.arch(device) in ("sm_90", "sm_100"),
    )


def _seconds(call: Callable[[], Any], rounds: int = 8) -> float:
    """Of a call, the best of some rounds that last a few milliseconds each."""
    call()
    _wait()
    start = time.perf_counter()
    call()
    _wait()
    repeats = max(1, round(0.004 / max(1e-7, time.perf_counter() - start)))
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        _wait()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
