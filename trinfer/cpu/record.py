"""Recorded launches, the CPU's counterpart of CUDA graphs: kept while recording, replayed by one call of C.

    with record() as recording:
        kernel[grid](x, y, ...)
    recording.replay()

Arguments are those of the moment of recording, contents of tensors those of the moment of the replay.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from trinfer.cpu.runtime import runtime


class Launch(NamedTuple):
    """One launch of a grid that is not empty."""

    name: str
    task: bytes
    """`struct task` of runtime.c."""
    memory: tuple[torch.UntypedStorage, ...]
    """What the task points to, but for arguments that are bare addresses."""
    checked: Callable[[], None] | None
    """Runs the launch under the sanitizer; set if the kernel was compiled with checks."""


class Recording:
    """Launches in the order in which they were made.

    A replay reads and writes the memory that the launches were given, which lives as long as the recording.
    """

    def __init__(self) -> None:
        self._launches: list[Launch] = []
        self._tasks: Any = None

    def __len__(self) -> int:
        return len(self._launches)

    @property
    def names(self) -> tuple[str, ...]:
        """The kernels, in order."""
        return tuple(launch.name for launch in self._launches)

    def append(self, launch: Launch) -> None:
        """Keep a launch; called by the driver."""
        self._launches.append(launch)

    def replay(self) -> None:
        """Run all launches on torch's threads, each after the one before it is done.

        Raises:
            CheckError: a kernel compiled with checks broke a rule; the launches after it did not run.
            RuntimeError: a recording is being made on this thread.
        """
        self._run(None)

    def profile(self) -> list[tuple[str, float]]:
        """Replay, and tell the kernel and the microseconds of each launch; those of the first include that
        threads wake up."""
        us = (ctypes.c_double * len(self))()
        self._run(us)
        return list(zip(self.names, us, strict=True))

    def _run(self, us: Any) -> None:
        if here.recording is not None:
            raise RuntimeError("replay() while recording: its launches would not be kept; replay after it")
        if any(launch.checked for launch in self._launches):
            self._run_one_by_one(us)
            return
        if self._tasks is None:
            self._tasks = (ctypes.c_char_p * len(self))(*(launch.task for launch in self._launches))
        runtime().replay(self._tasks, len(self), torch.get_num_threads(), us)

    def _run_one_by_one(self, us: Any) -> None:
        for k, launch in enumerate(self._launches):
            start = time.perf_counter()
            if launch.checked:
                launch.checked()
            else:
                runtime().launch(launch.task)
            if us is not None:
                us[k] = (time.perf_counter() - start) * 1e6


class _Here(threading.local):
    recording: Recording | None = None


here = _Here()
"""What this thread is recording."""


@contextmanager
def record() -> Iterator[Recording]:
    """Keep the launches that this thread makes inside of the block, instead of running them.

    Raises:
        RuntimeError: this thread is recording already.
    """
    if here.recording is not None:
        raise RuntimeError("record() inside of record(): one recording at a time; end the outer one first")
    here.recording = recording = Recording()
    try:
        yield recording
    finally:
        here.recording = None
