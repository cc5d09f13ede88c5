"""The cache on disk, compilers that are missing or broken, and what importing trinfer leaves alone."""

import ast
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cpu import processes
from trinfer.cpu import build

COUNTS = """
import torch, triton, triton.language as tl
from trinfer import backend, cpu

@triton.jit
def _twice_kernel(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), tl.load(x_ptr + tl.arange(0, N)) * 2)

compiled = []
cpu.compile_listeners.append(compiled.append)
backend.kind()
x = torch.ones(64)
for size in (16, 64):
    _twice_kernel[(1,)](x, N=size)
assert x.tolist() == [4.0] * 16 + [2.0] * 48
print(compiled)
"""


REFERENCE = """
import warnings
import torch
from trinfer import backend, kernels

assert backend.kind() == "reference", backend.kind()
x, w = torch.randn(3, 64), torch.randn(64)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    results = [kernels.rms_norm(x, w, 1e-6), kernels.relu(x), kernels.layer_norm(x, w, None, 1e-6)]
assert len(caught) == 1, caught
message = str(caught[0].message)
assert "slow PyTorch references" in message and "apt-get install gcc libc6-dev" in message, message
F = torch.nn.functional
expected = [F.rms_norm(x, (64,), w, 1e-6), x.relu(), F.layer_norm(x, (64,), w)]
for actual, wanted in zip(results, expected):
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
assert backend.check(torch.float32, use_triton=False).kind == "reference"
try:
    backend.check(torch.float32, use_triton=True)
except ValueError as error:
    assert "use_triton=True is not possible here" in str(error) and "CC=/path/to/cc" in str(error), error
else:
    raise AssertionError("use_triton=True was accepted")
print("reference")
"""


QUIET = """
import sys
import trinfer, trinfer.kernels
import torch
from triton.runtime.driver import driver

assert driver._active is None and driver._default is None, "importing touched a driver"
assert not torch.cuda.is_initialized()

# a driver like that of a GPU, and torch that sees the GPU
from triton.backends import backends
from triton.backends.driver import DriverBase

class FakeDriver(DriverBase):
    utils = None
    def __init__(self): pass
    @classmethod
    def is_active(cls): return True
    def map_python_to_cpp_type(self, ty): raise AssertionError
    def get_current_target(self): raise AssertionError
    def get_active_torch_device(self): raise AssertionError
    def get_benchmarker(self): raise AssertionError

fake = FakeDriver()
driver.set_active(fake)
torch.cuda.is_available = lambda: True
assert trinfer.backend.kind() == "gpu"
assert driver.active is fake and "cpu" not in backends
print("untouched")
"""


INTERPRETED = """
import torch
from trinfer import backend, kernels
from trinfer.kernels import count_launches

assert backend.kind() == "interpreter"
x, w = torch.randn(3, 16), torch.randn(16)
with count_launches() as launches:
    y = kernels.rms_norm(x, w, 1e-6)
assert launches["rms_norm"] == 1
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (16,), w, 1e-6))
print("interpreted")
"""


SCRIPTS = {
    "counts": (processes.ROOMS + COUNTS, {}),
    "counts beside it": (processes.ROOMS + COUNTS, {}),
    "missing": (processes.ROOMS + REFERENCE, {"CC": "/nowhere/cc", "PATH": "/nowhere"}),
    "failing": (processes.ROOMS + REFERENCE, {"CC": str(shutil.which("false")), "PATH": "/nowhere"}),
    "quiet": (QUIET, {}),
    "interpreted": (processes.ROOMS + INTERPRETED, {"TRITON_INTERPRET": "1"}),
}


def start(name: str, folder: Path) -> subprocess.Popen[str]:
    text, environment = SCRIPTS[name]
    script = folder / f"{name}.py"
    script.write_text(text)
    return processes.start(script, TRITON_CACHE_DIR=str(folder / "cache"), **environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


@pytest.fixture(scope="module")
def outputs(folder: Path) -> dict[str, str]:
    """What the scripts print that run side by side, because most of their time goes into imports."""
    running = {name: start(name, folder) for name in SCRIPTS}
    return {name: processes.finish(process) for name, process in running.items()}


@pytest.mark.parametrize("name", ["missing", "failing"])
def test_without_a_working_compiler_references_run(outputs, name):
    assert outputs[name] == "reference\n"


def test_importing_touches_no_driver_and_a_gpu_keeps_its_own(outputs):
    assert outputs["quiet"] == "untouched\n"


def test_a_kernel_in_the_interpreter(outputs):
    assert outputs["interpreted"] == "interpreted\n"


def test_a_later_process_compiles_nothing_after_two_that_did_at_once(outputs, folder):
    counts = [ast.literal_eval(outputs[name]) for name in ("counts", "counts beside it")]
    # two kernels: each is compiled by one process, which the other may have waited for, or by both
    assert {"_twice_kernel"} == set(counts[0] + counts[1]) and max(map(len, counts)) <= 2
    assert len(counts[0] + counts[1]) >= 2
    assert processes.finish(start("counts", folder)) == "[]\n"


@pytest.fixture
def fresh_search() -> Iterator[None]:
    build.find_compiler.cache_clear()
    yield
    build.find_compiler.cache_clear()


def test_compiler_without_headers_is_none(tmp_path, monkeypatch, fresh_search):
    path = tmp_path / "cc"
    path.write_text("#!/bin/sh\necho 'fatal error: math.h: No such file or directory' >&2\nexit 1\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.find_compiler() is None
    with pytest.raises(RuntimeError, match="no C compiler works here .* apt-get install gcc libc6-dev"):
        build.build("int x;", "x")


def test_compiler_with_arguments(monkeypatch, fresh_search):
    monkeypatch.setenv("CC", "cc -DMEANING=42")
    assert build.find_compiler() == "cc -DMEANING=42"
    assert build.build("int x = MEANING;", "x")


def test_what_the_compiler_says_is_passed_on():
    with pytest.raises(RuntimeError, match="cannot compile kernel broken(.|\\n)*undeclared_thing"):
        build.build("int x = undeclared_thing;", "broken")
