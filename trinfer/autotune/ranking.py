"""Configurations for a GPU that is not here: compiled, so that only time is guessed, then ranked."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trinfer.autotune.choice import pin
from trinfer.autotune.compiled import as_if_on
from trinfer.autotune.devices import Device, named
from trinfer.autotune.measure import named as arguments_of
from trinfer.autotune.model import Work, dtype_of, predicted_us, ranked, roofline_us, with_facts, work_of
from trinfer.autotune.records import Call, Config
from trinfer.autotune.rows import candidates, key_text, settle
from trinfer.backend.targets import TARGETS, Facts, caught, compile_launches


@dataclass(frozen=True)
class Estimate:
    """One configuration of one call: what the compiler says of it, its numbers, predicted microseconds."""

    call: Call
    config: Config
    facts: tuple[Facts, ...]
    work: Work
    us: float
    floor_us: float


def constants(target: str) -> Device:
    """What time is predicted from for an architecture."""
    device = named(target)
    if device is None:
        raise ValueError(f"{target} has no constants in devices.json; allowed: an architecture that is there")
    return device


@contextlib.contextmanager
def launches_on(target: str) -> Iterator[None]:
    """Inside the `with` block launches are prepared as on `target`, and none runs."""
    with as_if_on(TARGETS[target]), caught():
        yield


def estimate(call: Call, config: Config, target: str) -> Estimate:
    """Compile a call in one configuration for `target` and predict its time from the exact resources."""
    device = constants(target)
    settle(call.op)
    with as_if_on(TARGETS[target]):
        with pin(call.op, config), caught() as launches:
            call.op.launcher(*call.args, **call.kwargs)
        work = work_of(call, config)
    facts = tuple(compile_launches(launches, TARGETS[target]))
    work = with_facts(work, list(facts))
    with as_if_on(TARGETS[target]):
        us = predicted_us(work, device)
    floor = roofline_us(*call.op.cost(**arguments_of(call)), dtype_of(call), device)
    return Estimate(call, config, facts, work, us, floor)


def best(call: Call, target: str, most: int = 1) -> list[Config]:
    """The most promising configurations, the default among them or not."""
    with as_if_on(TARGETS[target]):
        return ranked(call, candidates(call.op, call.key), constants(target))[:most]


def every(call: Call, target: str) -> list[Config]:
    """Every configuration, the default first."""
    with as_if_on(TARGETS[target]):
        return candidates(call.op, call.key)


def default(call: Call, target: str) -> Config:
    """What would be launched on `target` without a table."""
    with as_if_on(TARGETS[target]):
        return call.op.default(call.key)


def describe(calls: Iterable[Call], target: str) -> Iterator[str]:
    """A table for people: op, key, the default as compiled, and what the model would rather try first."""
    yield (
        f"{'op':18}{'registers':>10}{'shared':>8}{'spills':>7}{'default us':>12}{'floor us':>10}"
        f"{'best us':>9}  key"
    )
    for call in calls:
        now = estimate(call, default(call, target), target)
        first = best(call, target)
        tried = estimate(call, first[0], target).us if first else now.us
        registers = max(f.registers for f in now.facts)
        shared, spilled = (sum(getattr(f, n) for f in now.facts) for n in ("shared_bytes", "spilled_bytes"))
        with as_if_on(TARGETS[target]):
            text = key_text(call.key)
        yield (
            f"{call.op.name:18}{registers:10}{shared:8}{spilled:7}{now.us:12.1f}{now.floor_us:10.1f}"
            f"{min(tried, now.us):9.1f}  {text}"
        )
