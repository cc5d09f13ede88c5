"""The Triton driver `cpu`: loads shared objects and launches their programs on torch's threads."""

import ctypes
import functools
import operator
import os
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from trinfer.cpu.check import check_library, checked_launch, is_checking
from trinfer.cpu.record import Launch, here
from trinfer.cpu.runtime import runtime

_FORMATS = {
    "i1": "i", "i8": "b", "i16": "h", "i32": "i", "i64": "q",
    "u1": "i", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp16": "f", "bf16": "f", "fp32": "f", "f32": "f", "fp64": "d", "f64": "d",
}  # fmt: skip
"""Scalar types of a kernel signature as struct formats."""


def _format(kind: str) -> str:
    if kind not in _FORMATS:
        raise NotImplementedError(
            f"a kernel argument of type {kind} is not supported by the CPU backend; allowed are tensors and "
            "numbers; a tensor descriptor can be made in the kernel: tl.make_tensor_descriptor"
        )
    return _FORMATS[kind]


def _flat(values: Sequence[Any]) -> list[Any]:
    """Arguments with tuples taken apart, as the signature of the kernel has them."""
    flat: list[Any] = []
    for value in values:
        flat += _flat(value) if isinstance(value, tuple) else [value]
    return flat


def _picker(places: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the values at these places; a launch pays it every time."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple([values[i] for i in places])


class Launcher:
    """Packs the arguments of one kernel and runs its grid."""

    def __init__(self, src: Any, metadata: Any) -> None:
        kinds = _flat(list(src.signature.values()))
        self.has_tuples = any(isinstance(kind, tuple) for kind in src.signature.values())
        self.kept = [i for i, kind in enumerate(kinds) if kind != "constexpr"]
        self.pointers = [i for i in self.kept if kinds[i][0] == "*"]
        self.numbers = [i for i in self.kept if kinds[i][0] != "*"]
        self.numbers_of = _picker(self.numbers)
        # struct task of runtime.c, with the emitted struct args
        numbers = "".join(_format(kinds[i]) for i in self.numbers)
        self.pack = struct.Struct(f"@Pqqiii{'P' * len(self.pointers)}{numbers}").pack
        self.launch = runtime().launch
        self.metadata = metadata
        self.is_checked = is_checking()

    def __call__(
        self, grid0: int, grid1: int, grid2: int, stream: int, function: int, packed: Any, metadata: Any,
        enter_hook: Any, exit_hook: Any, *args: Any,
    ) -> None:  # fmt: skip
        """Run the programs of a grid; returns when they are done."""
        if enter_hook is not None:
            enter_hook(metadata)
        values = _flat(args) if self.has_tuples else args
        try:
            addresses = [values[i].data_ptr() for i in self.pointers]
        except AttributeError:
            addresses = [_address(values[i]) for i in self.pointers]
        numbers = self.numbers_of(values)
        programs = grid0 * grid1 * grid2
        if programs > 0 and not self.is_checked and here.recording is None:
            threads = torch.get_num_threads()
            self.launch(self.pack(function, programs, threads, grid0, grid1, grid2, *addresses, *numbers))
        elif programs > 0:
            task = self.pack(function, programs, 1, grid0, grid1, grid2, *addresses, *numbers)
            self._run_or_keep(task, programs, values)
        if exit_hook is not None:
            exit_hook(metadata)

    def _run_or_keep(self, task: bytes, programs: int, values: Sequence[Any]) -> None:
        """A launch that is checked, recorded, or both; the task is for one thread."""
        checked = None
        if self.is_checked:
            pointers = [values[i] if i in self.pointers else None for i in self.kept]
            checked = functools.partial(checked_launch, self.launch, self.metadata, task, programs, pointers)
        if here.recording is not None:
            # not the tensors themselves: `tensor.data = other` frees their memory
            tensors = (value for i in self.pointers if isinstance(value := values[i], torch.Tensor))
            memory = tuple([tensor.untyped_storage() for tensor in tensors])
            here.recording.append(Launch(self.metadata.name, task, memory, checked))
        elif checked:
            checked()


def _address(value: Any) -> int:
    """The address of a pointer argument, which may be a number or None itself."""
    return 0 if value is None else value if isinstance(value, int) else value.data_ptr()


class Utils:
    """What Triton calls to load a binary."""

    def get_device_properties(self, device: Any) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30, "multiprocessor_count": torch.get_num_threads()}

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: Any
    ) -> tuple[Any, int, int, int, int]:
        """(library, address of its `programs`, registers, spills, most threads)"""
        runtime()
        if is_checking():
            check_library()
        handle, path = tempfile.mkstemp(suffix=".so")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(binary)
            library = ctypes.CDLL(path)
        finally:
            os.unlink(path)
        address = ctypes.cast(library.programs, ctypes.c_void_p).value
        assert address is not None
        return library, address, 0, 0, 1 << 20

    def unload_module(self, module: Any) -> None:
        """Libraries stay loaded: a recorded launch may still point into them."""


class CPUDriver(DriverBase):
    """What Triton asks of a driver."""

    target = GPUTarget("cpu", "native", 1)
    launcher_cls = Launcher

    def __init__(self) -> None:
        self.utils = Utils()

    @classmethod
    def is_active(cls) -> bool:
        """Never found by Triton's search: `activate` sets it, and only where no GPU driver is."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return "cpu"

    def set_current_device(self, device: Any) -> None:
        """There is one."""

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(64 << 20, dtype=torch.int8)

    def clear_cache(self, cache: torch.Tensor) -> None:
        cache.zero_()

    def get_benchmarker(self) -> Callable[..., Any]:
        return _benchmark


def _benchmark(call: Callable[[], Any], quantiles: Sequence[float] | None = None, **options: Any) -> Any:
    """Milliseconds of a call: the median, or the quantiles, of 5 runs after one that warms up."""
    call()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    times.sort()
    if quantiles is None:
        return times[len(times) // 2]
    return [times[min(len(times) - 1, int(q * len(times)))] for q in quantiles]
