"""One launch in several configurations, on copies of its arguments: first its results, then its time."""

import contextlib
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trinfer import backend
from trinfer.autotune.choice import pin
from trinfer.autotune.records import Call, Config
from trinfer.cpu.record import record

# two configurations add in another order: (RMS of the difference by that of the result, largest difference
# by |result| + that RMS); whoever forgets an entry or adds one twice is far outside
TOLERANCE = {
    torch.float32: (1e-5, 1e-4),
    torch.float16: (1e-3, 8e-3),
    torch.bfloat16: (6e-3, 6e-2),
    torch.float64: (1e-12, 1e-10),
}
# arguments that hold no result: what lies there after a launch depends on the configuration
SCRATCH = {"scratch"}
# weights come from memory, not from the cache of the launch before: copies of the arguments take turns
ROTATED_BYTES = 128 << 20
MOST_COPIES = 32
SAMPLE_S, MOST_REPEATS = 0.004, 400
# the smallest kernels take less than handing programs to threads, which takes now this long, now that
LEAST_CPU_GAIN_US = 1.0


def copied(value: Any) -> Any:
    """Arguments with tensors in memory of their own; tensors that share memory share it in the copy."""
    found = list(tensors(value))
    copies = _copies(found)
    taken = iter(copies)
    return rebuilt(value, lambda _: next(taken))


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors inside arguments, in a fixed order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)


def rebuilt(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same arguments with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: rebuilt(part, change) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [rebuilt(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _copies(found: list[Tensor]) -> list[Tensor]:
    """A copy of each tensor; of a storage only the part between the first and the last byte in use."""
    spans: dict[int, tuple[int, int]] = {}
    for x in found:
        first, last = _bytes_of(x)
        low, high = spans.get(x.untyped_storage().data_ptr(), (first, last))
        spans[x.untyped_storage().data_ptr()] = min(low, first), max(high, last)
    memory: dict[int, Tensor] = {}
    copies = []
    for x in found:
        address = x.untyped_storage().data_ptr()
        # addresses keep their remainder, which kernels are specialised for
        low = spans[address][0] // 256 * 256
        if address not in memory:
            raw = torch.empty(0, dtype=torch.uint8, device=x.device)
            raw.set_(x.untyped_storage(), low, (spans[address][1] - low,), (1,))
            memory[address] = raw.clone()
        offset = (_bytes_of(x)[0] - low) // x.element_size()
        empty = torch.empty(0, dtype=x.dtype, device=x.device)
        copies.append(empty.set_(memory[address].untyped_storage(), offset, x.shape, x.stride()))
    return copies


def _bytes_of(x: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and one past its last."""
    first = int(x.storage_offset()) * x.element_size()
    if x.numel() == 0:
        return first, first
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return first, first + (int(reach) + 1) * x.element_size()


def named(call: Call) -> dict[str, Any]:
    """The arguments of a call by name, those that were left out not among them."""
    bound = inspect.signature(call.op.launcher).bind(*call.args, **call.kwargs)
    arguments = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name, {}))
    return arguments


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """New memory holds nan: a result that a kernel does not write shows."""
    was_on = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    # part of that mode, unless torch.utils.deterministic.fill_uninitialized_memory was switched off
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)


def outcome(call: Call, config: Config) -> list[Tensor]:
    """What a launch returns and what it leaves in its arguments, started on a copy of them."""
    args, kwargs = copied((call.args, call.kwargs))
    with torch.no_grad(), _poisoned(), pin(call.op, config):
        returned = call.op.launcher(*args, **kwargs)
    arguments = named(Call(call.op, call.key, args, kwargs))
    kept = {name: value for name, value in arguments.items() if name not in SCRATCH}
    return [*tensors((returned,)), *tensors(kept)]


def agree(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """True if two configurations did the same."""
    return len(actual) == len(expected) and all(map(_is_close, actual, expected))


def _is_close(a: Tensor, e: Tensor) -> bool:
    if a.shape != e.shape or a.dtype != e.dtype:
        return False
    if a.numel() == 0 or torch.equal(a, e):
        return True
    if a.dtype not in TOLERANCE:
        # a number half way between two 8-bit codes may become either
        return a.dtype == torch.int8 and int((a.int() - e.int()).abs().max()) <= 1
    x, y = a.double(), e.double()
    same = (x == y) | (x.isnan() & y.isnan())
    if not bool((same | (x.isfinite() & y.isfinite())).all()):
        return False
    error = torch.where(same, 0.0, x - y).abs()
    finite = torch.where(y.isfinite(), y, 0.0)
    rms = finite.square().mean().sqrt() + torch.finfo(a.dtype).tiny
    rms_limit, limit = TOLERANCE[a.dtype]
    return bool(error.square().mean().sqrt() <= rms_limit * rms) and bool(
        (error <= limit * (finite.abs() + rms)).all()
    )


class Trial:
    """A launch in one configuration, ready to be timed again and again."""

    def __init__(self, call: Call, config: Config, copies: list[Any]) -> None:
        self.config, self.samples_us = config, list[float]()
        self._call, self._copies = call, copies
        # the first launch may compile
        self._run(1)
        once = min(host_seconds(self._run, 1) for _ in range(3))
        self._repeats = min(MOST_REPEATS, max(1, round(SAMPLE_S / max(once, 1e-7))))
        recorded = recorded_on_gpu if is_on_gpu(copies) else recorded_on_cpu
        self._replay = recorded(self._run, self._repeats)

    def _run(self, count: int) -> None:
        launcher, copies = self._call.op.launcher, self._copies
        with torch.no_grad(), pin(self._call.op, self.config):
            for number in range(count):
                args, kwargs = copies[number % len(copies)]
                launcher(*args, **kwargs)

    def sample(self) -> float:
        """Measure once more; microseconds of a launch."""
        seconds = self._replay() if self._replay is not None else host_seconds(self._run, self._repeats)
        self.samples_us.append(seconds / self._repeats * 1e6)
        return self.samples_us[-1]

    @property
    def us(self) -> float:
        """Microseconds of a launch, the median of all samples."""
        return statistics.median(self.samples_us)


def is_on_gpu(copies: list[Any]) -> bool:
    """True if the arguments lie on a GPU."""
    return any(x.is_cuda for x in tensors(copies[0]))


def host_seconds(run: Callable[[int], Any], count: int) -> float:
    """Seconds of `count` launches until the last is done, the host's work included."""
    if backend.kind() == "gpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run(count)
    if backend.kind() == "gpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def recorded_on_cpu(run: Callable[[int], Any], count: int) -> Callable[[], float] | None:
    """Seconds of `count` launches replayed, as steps replay them; None if there is nothing to replay."""
    if backend.kind() != "cpu":
        return None
    with record() as recording:
        run(count)
    if len(recording) < count:
        return None

    def replay() -> float:
        start = time.perf_counter()
        recording.replay()
        return time.perf_counter() - start

    replay()
    return replay


def recorded_on_gpu(run: Callable[[int], Any], count: int) -> Callable[[], float]:
    """Seconds of `count` launches on the device, without the host: they are recorded once, then replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(count)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    replay()
    return replay


def rotation(call: Call) -> list[Any]:
    """Copies of the arguments that take turns, so that no launch finds the weights of the one before."""
    arguments = call.args, call.kwargs
    size = sum(x.numel() * x.element_size() for x in tensors(arguments))
    device = next((x.device for x in tensors(arguments)), torch.device("cpu"))
    room = min(ROTATED_BYTES, backend.free_bytes(device) // 4)
    return [copied(arguments) for _ in range(max(1, min(MOST_COPIES, room // max(1, size))))]


def fastest(trials: list[Trial], out_of_time: Callable[[], bool]) -> Trial:
    """The winner of rounds in which all take turns; the first, the default, leaves only for a clear win."""
    default, running = trials[0], list(trials)
    for rounds, factor, most in ((3, 1.3, 6), (4, 1.1, 2), (5, 1.1, 1)):
        for _ in range(rounds):
            for trial in {id(t): t for t in (default, *running)}.values():
                trial.sample()
            if out_of_time():
                break
        best = min(trial.us for trial in running)
        running = sorted((t for t in running if t.us <= factor * best), key=lambda t: t.us)[:most]
    return running[0] if _wins(running[0], default) else default


def _wins(trial: Trial, default: Trial, rounds: int = 9) -> bool:
    """True if `trial` is at least 3 % faster than the default, turn by turn, by more than a launch varies."""
    if trial is default:
        return False
    trial.samples_us.clear()
    default.samples_us.clear()
    gains = [default.sample() / trial.sample() for _ in range(rounds)]
    least = LEAST_CPU_GAIN_US if backend.kind() == "cpu" else 0.0
    return statistics.median(gains) >= 1.03 and trial.us < default.us - least
