"""Settings of all tests: hypothesis, and threads that do not spin while they wait."""

import os

from hypothesis import HealthCheck, settings

# read when torch loads OpenMP: beside another busy process, threads that spin make decoding ten times slower
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

settings.register_profile(
    "trinfer",
    # the first example of a shape class compiles a kernel, which no deadline should count
    deadline=None,
    max_examples=30,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("trinfer")
