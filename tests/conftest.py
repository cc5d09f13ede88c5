"""The hypothesis profile of all tests."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "trinfer",
    # the first example of a shape class compiles a kernel, which no deadline should count
    deadline=None,
    max_examples=30,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("trinfer")
