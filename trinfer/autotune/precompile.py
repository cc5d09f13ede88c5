"""Configurations compiled beforehand in child processes: a compiler that aborts costs one, not the engine.

The kernels land in Triton's cache, where the launch that times them finds them; what the compiler says of
registers and shared memory comes back.
"""

import base64
import importlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinfer.autotune.compiled import compile_op
from trinfer.autotune.measure import named, rebuilt
from trinfer.autotune.records import Call, Config
from trinfer.backend.targets import TARGETS, Facts

WORKER = "from trinfer.autotune.precompile import serve; serve()"
# a child takes seconds to start: for fewer jobs it is not worth it
LEAST_JOBS = 4


@dataclass(frozen=True)
class Job:
    """One launch to compile, in values that another process can read."""

    module: str
    arguments: dict[str, Any]
    config: dict[str, Any]
    target: str


def job_of(call: Call, config: Config, target: str) -> Job:
    """A call without its numbers: the shapes, dtypes and strides of its tensors."""
    arguments = rebuilt(named(call), lambda x: x.detach().to("meta"))
    return Job(call.op.launcher.__module__, arguments, dict(config), target)


def precompile(jobs: Sequence[Job], workers: int = 0) -> list[list[Facts] | None]:
    """The facts of every job, in their order; None where the compiler failed."""
    results: list[list[Facts] | None] = [None] * len(jobs)
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(jobs)):
        waiting.put(number)

    def work() -> None:
        worker = _Worker()
        while True:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                break
            results[number] = worker.compile(jobs[number])
        worker.close()

    count = min(workers or os.cpu_count() or 1, max(1, len(jobs) // LEAST_JOBS))
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class _Worker:
    """A child process that compiles; started again when it dies."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def compile(self, job: Job) -> list[Facts] | None:
        if self.process is None or self.process.poll() is not None:
            self.process = _start()
        answer = _ask(self.process, base64.b64encode(pickle.dumps(job)).decode())
        if not answer:
            self.process.wait()
            return None
        result = pickle.loads(base64.b64decode(answer))
        return result if isinstance(result, list) else None

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _start() -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); {WORKER}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _ask(process: subprocess.Popen[str], line: str) -> str:
    """The answer to one line; empty if the process died over it."""
    to_child, from_child = process.stdin, process.stdout
    assert to_child is not None and from_child is not None
    try:
        to_child.write(line + "\n")
        to_child.flush()
    except BrokenPipeError:
        return ""
    return from_child.readline()


def serve() -> None:
    """What a child does: read, compile, answer, until the input ends."""
    # importing the kernels needs triton, and so does their error
    from triton.errors import TritonError

    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        job: Job = pickle.loads(base64.b64decode(line))
        op = importlib.import_module(job.module).OP
        try:
            result: Any = compile_op(op, job.arguments, job.config, TARGETS[job.target])
        except (TritonError, RuntimeError, ValueError, AssertionError) as error:
            result = str(error)
        answers.write(base64.b64encode(pickle.dumps(result)).decode() + "\n")
        answers.flush()
