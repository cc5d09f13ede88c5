"""A launch in one configuration, compiled for a GPU that need not be there."""

import contextlib
from collections.abc import Iterator
from typing import Any

from trinfer import backend
from trinfer.autotune.choice import analytic, pin, suspended
from trinfer.autotune.records import Config, Tunable
from trinfer.autotune.rows import settle
from trinfer.backend.targets import Facts, Target, caught, compile_launches


@contextlib.contextmanager
def as_if_on(target: Target) -> Iterator[None]:
    """Launchers inside the `with` block believe in a GPU of `target`, for which no table is asked."""
    # activates the driver of this machine, to come back to
    backend.kind()
    # the rule for a key is remembered, and here it answers for another machine
    analytic.cache_clear()
    try:
        with backend.as_if_on_gpu(target.shared_bytes, target.multiprocessors), suspended():
            yield
    finally:
        analytic.cache_clear()


def compile_op(op: Tunable, arguments: dict[str, Any], config: Config | None, target: Target) -> list[Facts]:
    """Compile the launch of `op` with meta tensors `arguments`; `config` overrides the default."""
    settle(op)
    with as_if_on(target), pin(op, config or {}), caught() as launches:
        op.launcher(**arguments)
    return compile_launches(launches, target)
