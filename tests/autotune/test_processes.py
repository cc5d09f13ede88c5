"""Eight processes write one table while some of them are killed: nothing reported written is lost."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.autotune.stubs import row
from trinfer.autotune.table import Head, parse, read, write

HEAD = Head("stub", 1, {"slug": "cpu_x"})
PROCESSES, SECONDS = 8, 6.0


def tune(path: Path, name: str, journal: int) -> None:
    """Find rows for ever; note in the journal what was reported written."""
    number = 0
    while True:
        key = f"process={name} number={number}"
        if write(path, HEAD, {key: row(us=number)}):
            os.write(journal, f"{key}\n".encode())
        number += 1


@pytest.mark.slow
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_killed_processes_lose_no_row_and_break_no_file(tmp_path, record_property):
    path, journal = tmp_path / "stub.json", tmp_path / "journal"
    log = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    fork, chance = multiprocessing.get_context("fork"), random.Random(0)
    running, kills, reads = [], 0, 0
    end = time.monotonic() + SECONDS
    try:
        # longer where other work leaves little time: without enough kills nothing is shown
        while time.monotonic() < end or (min(kills, reads) <= 20 and time.monotonic() < end + 60):
            while len(running) < PROCESSES:
                started = fork.Process(target=tune, args=(path, f"{kills}.{len(running)}", log))
                started.start()
                running.append(started)
            time.sleep(chance.random() * 0.05)
            victim = running.pop(chance.randrange(PROCESSES))
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
            kills += 1
            if path.exists():
                # raises if the file is not whole
                reads += len(parse(path)["entries"]) > 0
    finally:
        for process in running:
            process.kill()
            process.join()
        os.close(log)
    reported = journal.read_text().split("\n")[:-1]
    kept = read(path, HEAD)
    record_property(
        "measured", f"{PROCESSES} processes, {kills} kills, {reads} reads, {len(reported)} rows reported"
    )
    assert kills > 20 and reads > 20 and len(reported) > 40
    assert set(reported) <= kept.keys()
    # the next writer is not held up by what the dead ones left
    assert write(path, HEAD, {"last": row()}) and not list(tmp_path.glob(".*.tmp"))
