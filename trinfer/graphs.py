"""Launches recorded once per shape and replayed: a CUDA or HIP graph on a GPU, a launch list on a CPU."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from trinfer import backend
from trinfer.backend import Operations
from trinfer.cpu.record import record

logger = logging.getLogger(__name__)


class Recorded(Protocol):
    """Launches that run again, all in order."""

    def replay(self) -> None:
        """Run them; they read and write the memory they were recorded with."""


class NotRecordable(RuntimeError):
    """Something between the launches would be missing from every replay."""


class DispatchGuard(Operations):
    """Refuses every torch operation that a recording would silently drop."""

    def met(self, func: Any) -> None:
        raise NotRecordable(
            f"torch operation {func} ran while launches were recorded and would be missing from every "
            "replay; allowed: kernels of trinfer, allocations and views"
        )


class Graphs:
    """Recordings of one engine by key, the least recently used of which is dropped when there are too many.

    All recordings of a GPU share one pool of memory. A key must hold everything that changes a launch and is
    not read from device memory: shapes, dtypes, strides, host scalars.
    """

    def __init__(self, most: int = 16) -> None:
        self.most = most
        self._recorded: OrderedDict[Hashable, Recorded | None] = OrderedDict()
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._recorded)

    def __deepcopy__(self, memo: Any) -> "Graphs":
        return Graphs(self.most)

    def __reduce__(self) -> Any:
        return Graphs, (self.most,)

    def __iter__(self) -> Iterator[Hashable]:
        """Keys, the least recently used first."""
        return iter(self._recorded)

    def clear(self) -> None:
        """Forget everything: the memory that the recordings point to is no longer theirs."""
        self._recorded.clear()

    def run(self, key: Hashable, launch: Callable[[], None], state: Sequence[Tensor] = ()) -> None:
        """Replay what was recorded under `key`, or record `launch` and then replay it.

        Where recording fails, `launch` runs as it is, now and for this key from now on, with one warning.

        Args:
            key: see above.
            launch: only launches of kernels, allocations and views.
            state: tensors that `launch` changes in a way that repeating it would change again; kept through
                the warm-up before a capture.
        """
        if key in self._recorded:
            self._recorded.move_to_end(key)
        else:
            self._recorded[key] = self._record(launch, state)
            while len(self._recorded) > self.most:
                self._recorded.popitem(last=False)
        recorded = self._recorded[key]
        if recorded is None:
            launch()
        else:
            recorded.replay()

    def _record(self, launch: Callable[[], None], state: Sequence[Tensor]) -> Recorded | None:
        try:
            return self._capture(launch, state) if backend.kind() == "gpu" else _list_launches(launch)
        except RuntimeError as failure:
            logger.warning("launches could not be recorded and run one by one: %s", failure)
            return None

    def _capture(self, launch: Callable[[], None], state: Sequence[Tensor]) -> Recorded:
        """A CUDA or HIP graph of `launch`, after a run that compiles its kernels."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        kept = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, before in zip(state, kept, strict=True):
            tensor.copy_(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool), DispatchGuard():
            launch()
        return graph


def profile(launch: Callable[[], None], repeats: int) -> list[list[tuple[str, float]]]:
    """Kernel and microseconds of every launch of `launch`, in order, of `repeats` runs."""
    if backend.kind() != "gpu":
        recording = _list_launches(launch)
        return [recording.profile() for _ in range(repeats)]  # type: ignore[attr-defined]
    return [_gpu_times(launch) for _ in range(repeats)]


def _gpu_times(launch: Callable[[], None]) -> list[tuple[str, float]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        launch()
        torch.cuda.synchronize()
    kernels = [
        event for event in profiler.events() or () if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    kernels.sort(key=lambda event: event.time_range.start)
    return [(event.name, float(event.time_range.elapsed_us())) for event in kernels]


class Pieces:
    """A function of tensors, recorded once per signature of its arguments and replayed on copies of them.

    What it returns is a copy too, so no result changes with the next call. A copied or unpickled one starts
    anew.
    """

    def __init__(self, most: int = 16) -> None:
        self._graphs = Graphs(most)
        self._memory: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def __deepcopy__(self, memo: Any) -> "Pieces":
        return Pieces(self._graphs.most)

    def __reduce__(self) -> Any:
        return Pieces, (self._graphs.most,)

    def run(self, function: Callable[..., Tensor], arguments: Any, key: Hashable) -> Tensor:
        """function(arguments), launches alone; `arguments` is a tuple, dict or tensor, nested.

        Args:
            function: its launches depend on `key`, the shapes of tensors, and what else is in `arguments`.
            arguments: as `signature` knows them.
            key: what else a recording depends on, such as the addresses of parameters.
        """
        key = (signature(arguments), key)
        tensors = list(_tensors(arguments))
        if key not in self._memory:
            self._memory[key] = [tensor.clone() for tensor in tensors], []
        kept, results = self._memory[key]
        for tensor, given in zip(kept, tensors, strict=True):
            tensor.copy_(given)
        inputs = _with_tensors(arguments, iter(kept))
        self._graphs.run(key, lambda: results.__setitem__(slice(None), [function(inputs)]))
        self._memory = {held: self._memory[held] for held in self._graphs}
        return results[0].clone()


def signature(arguments: Any) -> Hashable:
    """Shapes and dtypes of the tensors in nested tuples and dicts, and everything else as it is.

    Raises:
        NotRecordable: something in it is none of these.
    """
    if isinstance(arguments, Tensor):
        return tuple(arguments.shape), arguments.dtype, str(arguments.device)
    if isinstance(arguments, tuple):
        return tuple(signature(part) for part in arguments)
    if isinstance(arguments, dict):
        return tuple((name, signature(part)) for name, part in sorted(arguments.items()))
    if arguments is None or isinstance(arguments, bool | int | float | str):
        return type(arguments).__name__, arguments
    raise NotRecordable(f"an argument of type {type(arguments).__name__} cannot be part of a recording")


def _tensors(arguments: Any) -> Iterator[Tensor]:
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, tuple | dict):
        for part in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from _tensors(part)


def _with_tensors(arguments: Any, tensors: Iterator[Tensor]) -> Any:
    """The same arguments with other tensors in them."""
    if isinstance(arguments, Tensor):
        return next(tensors)
    if isinstance(arguments, tuple):
        return tuple([_with_tensors(part, tensors) for part in arguments])
    if isinstance(arguments, dict):
        return {name: _with_tensors(part, tensors) for name, part in arguments.items()}
    return arguments


def _list_launches(launch: Callable[[], None]) -> Recorded:
    """The launches of `launch` as a list for the CPU, compiled as they are met; nothing runs yet."""
    with record() as recording, DispatchGuard():
        launch()
    return recording
