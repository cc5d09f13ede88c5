"""Kernels with a planted fault under the sanitizer.

A kernel launched with WRONG=1 has its fault in the line marked with `# fault`, with WRONG=0 it has none.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import triton

from trinfer.cpu.check import CheckError


def faults(kernel: Any, grid: int, *args: Any, **meta: Any) -> list[str]:
    """What a launch is blamed for, a line each."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRINFER_CPU_CHECK", "1")
        try:
            kernel[(grid,)](*args, **meta)
        except CheckError as error:
            return str(error).splitlines()
    return []


def place(kernel: Any, marker: str = "# fault") -> str:
    """A regular expression for `file:line` of the marked line of a kernel.

    Without the folder: a kernel may have been compiled from a copy of this file, for the same cache.
    """
    lines, first = inspect.getsourcelines(kernel.fn)
    (line,) = [first + k for k, text in enumerate(lines) if text.rstrip().endswith(marker)]
    return rf"\S*/{re.escape(Path(inspect.getfile(kernel.fn)).name)}:{line}"


def check(kernel: Any, what: str, make: Any, grid: int = 4, **meta: Any) -> None:
    """The faulty kernel is blamed first for `what` (a regular expression) at its marked line; its twin never.

    What else is said is about the same line, or the same race seen from its other side.
    """
    assert faults(kernel, grid, *make(), WRONG=0, **meta) == []
    found = faults(kernel, grid, *make(), WRONG=1, **meta)
    head = f"kernel {kernel.fn.__name__}, {place(kernel)}: "
    assert found and re.match(head + what, found[0]), "\n".join([*found, f"expected: {head}{what}"])
    assert all(re.match(head, line) or line.endswith(" orders them") for line in found[1:]), "\n".join(found)


def name(value: Any) -> str | None:
    """The name of a kernel as a test's."""
    return value.fn.__name__ if isinstance(value, triton.JITFunction) else ""
