"""The interpreter as a second oracle. Triton decides for it when it decorates, so it has its own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import interpreted


@pytest.mark.parametrize("name", interpreted.CASES)
def test_interpreter_agrees(name, results):
    assert results[name] == "ok"


@pytest.fixture(scope="module")
def results():
    """What each case of `interpreted.py` says when it runs interpreted."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.kernels.interpreted"]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return dict(line.split(": ", 1) for line in run.stdout.splitlines() if ": " in line)
