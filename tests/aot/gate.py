"""Runs compile jobs in child processes, so that a compiler that aborts costs one job and not the run."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.aot.jobs import Job, faults
from trinfer.backend.targets import TARGETS, Facts

# what a child process runs
WORKER = "from tests.aot.worker import main; main()"


@dataclass(frozen=True)
class Result:
    """A job with the facts of its kernels, or the error that stopped it."""

    job: Job
    facts: tuple[Facts, ...] = ()
    error: str = ""

    @property
    def fits(self) -> bool:
        """The kernel can be launched on its target."""
        limit = TARGETS[self.job.target].shared_bytes
        return not self.error and all(f.shared_bytes <= limit for f in self.facts)

    @property
    def spills(self) -> bool:
        """Registers did not suffice."""
        return any(f.spilled_bytes for f in self.facts)

    @property
    def faults(self) -> list[str]:
        """What a shipped default must not do."""
        if self.error:
            return [self.error]
        return [fault for f in self.facts for fault in faults(self.job, f)]


class _Worker:
    """A child process that compiles; started again when it dies."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def compile(self, job: Job) -> Result:
        if self.process is None or self.process.poll() is not None:
            self.process = _start()
        answer = _ask(self.process, json.dumps(asdict(job)))
        if not answer:
            code = self.process.wait()
            return Result(job, error=f"the compiler ended its process with status {code}")
        content = json.loads(answer)
        if "error" in content:
            return Result(job, error=content["error"])
        return Result(job, tuple(Facts(**facts) for facts in content["facts"]))

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _start() -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": path, "TRITON_DEFAULT_FP_FUSION": "1"},
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


def compile_all(jobs: Iterable[Job], workers: int = os.cpu_count() or 1) -> list[Result]:
    """Compile all jobs, in their order."""
    waiting: queue.SimpleQueue[tuple[int, Job]] = queue.SimpleQueue()
    for numbered in enumerate(jobs):
        waiting.put(numbered)
    results: dict[int, Result] = {}

    def work() -> None:
        worker = _Worker()
        while True:
            try:
                number, job = waiting.get_nowait()
            except queue.Empty:
                break
            results[number] = worker.compile(job)
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in sorted(results)]
