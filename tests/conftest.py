"""Settings of all tests: hypothesis, and threads that do not spin while they wait."""

import os
import tempfile

import pytest
from hypothesis import HealthCheck, settings

# read when torch loads OpenMP: beside another busy process, threads that spin make decoding ten times slower
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# what was tuned on this machine must not decide what tests run
os.environ["TRINFER_AUTOTUNE_CACHE"] = tempfile.mkdtemp(prefix="trinfer_tests_")

settings.register_profile(
    "trinfer",
    # the first example of a shape class compiles a kernel, which no deadline should count
    deadline=None,
    # the sanitizer reports what a right result can hide: 100 examples or more in the tests of an op
    max_examples=50 if os.environ.get("TRINFER_CPU_CHECK") == "1" else 20,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("trinfer")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the numbers that tests measured, whichever process they ran in."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "measured" and report.when == "call":
                terminalreporter.write_line(str(value))
