"""The interpreter as a second oracle. Triton decides for it when it decorates, so it has its own process."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import triton

from tests.kernels import interpreted

# numpy 2.4 stopped turning one-element arrays into integers, which triton 3.6 counts on in its loops; a mask
# that a kernel hands to a function arrives there as int32 in triton 3.9, and no load takes it
HAS_NEW_NUMPY = tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4)
IS_BROKEN = triton.__version__.startswith("3.9.") or (triton.__version__.startswith("3.6.") and HAS_NEW_NUMPY)


@pytest.mark.skipif(IS_BROKEN, reason="this interpreter needs numpy below 2.4, or hands masks on as integers")
@pytest.mark.parametrize("name", interpreted.CASES)
def test_u106_interpreter_agrees(name, results):
    assert results[name] == "ok"


@pytest.fixture(scope="module")
def results():
    """What each case of `interpreted.py` says when it runs interpreted."""
    printed = run_python("-m", "tests.kernels.interpreted", TRITON_INTERPRET="1")
    return dict(line.split(": ", 1) for line in printed.splitlines() if ": " in line)


def run_python(*arguments, **variables):
    """What a process of its own prints."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | variables | {"PYTHONPATH": path}
    command = [sys.executable, *arguments]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_u105_kernels_import_and_run_where_no_gpu_is_seen():
    code = (
        "import torch, trinfer.kernels as k; print(k.activation(torch.tensor([-1.0, 2.0]), 'relu').tolist())"
    )
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    assert run_python("-c", code, **hidden).strip() == "[0.0, 2.0]"
