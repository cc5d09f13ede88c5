"""Random kernels compiled against the same source on NumPy; programs.py makes them and runs more by hand."""

import numpy as np
import pytest

from tests.cpu import oracle, programs
from tests.cpu.writer import Writer

SEEDS = range(40)


@pytest.mark.parametrize("seed", SEEDS)
def test_program(seed, tmp_path):
    programs.check(seed, tmp_path)


def test_programs_use_what_they_are_for():
    text = "".join(Writer(seed).text() for seed in SEEDS)
    needed = [
        "for ",
        "while ",
        "if ",
        "else:",
        "tl.dot",
        "tl.sum",
        "tl.max",
        "tl.trans",
        "tl.reshape",
        "tl.split",
    ]
    needed += [
        "mask=",
        "other=t",
        "atomic_add",
        "debug_barrier",
        "cumsum",
        "flip",
        "bfloat16",
        "static_range",
    ]
    assert [word for word in needed if word not in text] == []


def test_oracle_runs_programs_one_after_the_other():
    source = "def program(x_ptr, y_ptr, N):\n"
    source += "    offs = tl.program_id(0) * 4 + tl.arange(0, 4)\n"
    source += "    x = tl.load(x_ptr + offs, mask=offs < N, other=7)\n"
    source += "    tl.store(y_ptr + offs, tl.where(x < 3, x, -x) + tl.sum(x, 0), mask=offs != 1)\n"
    x, y = np.arange(8, dtype=np.int32), np.zeros(8, np.int32)
    oracle.run(source, 2, [x, y], [6])
    assert y.tolist() == [6, 0, 8, 3, 19, 18, 16, 16]
