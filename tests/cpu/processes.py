"""Python in a process of its own, with the trinfer under test."""

import os
import subprocess
import sys
from pathlib import Path

import trinfer

ROOMS = f"""
import sys, types
# the rooms without the package's own imports, transformers among them, which take longer than all else here
package = sys.modules["trinfer"] = types.ModuleType("trinfer")
package.__path__ = [{str(Path(trinfer.__file__).parent)!r}]
"""
"""Put before a script that needs only rooms up to the kernels."""


def start(path: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a script; `environment` is added to the present one."""
    places = [str(Path(trinfer.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(places), **environment}
    command = [sys.executable, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)


def finish(process: subprocess.Popen[str]) -> str:
    """What a script prints; it has to succeed."""
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out
