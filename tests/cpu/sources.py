"""Kernels whose text a test puts together; it has to lie in a file, because Triton reads the source."""

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

_numbers = itertools.count()

HEADER = "import triton\nimport triton.language as tl\n\n\n"


def module(folder: Path, text: str) -> ModuleType:
    """Import a module made of `text`."""
    path = folder / f"kernels_{next(_numbers)}.py"
    path.write_text(HEADER + text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
