"""The search: every launch that a dry run noted and no table has, in the configurations worth a try."""

import datetime
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from triton.errors import TritonError

from trinfer import backend
from trinfer.autotune import lookup
from trinfer.autotune.choice import forget, suspended
from trinfer.autotune.measure import Trial, agree, fastest, outcome, rotation
from trinfer.autotune.model import floor_us, ranked
from trinfer.autotune.precompile import job_of, precompile
from trinfer.autotune.records import Call, Config
from trinfer.autotune.rows import Row, candidates, key_text, stale, versions
from trinfer.backend.targets import TARGETS, Facts

# configurations that are measured for a key, beside the default, and those that a compiler is asked about
MOST_TRIED, MOST_COMPILED = 8, 16
# what a configuration that does not work on this device may raise
FAILURES = (TritonError, RuntimeError, NotImplementedError, AssertionError)


@dataclass(frozen=True)
class Finding:
    """What became of one key: `status` is found, stale, measured or left out."""

    call: Call
    status: str
    row: Row | None = None
    why: str = ""

    @property
    def gain(self) -> float:
        """How many times as fast as the default."""
        return self.row["default_us"] / self.row["us"] if self.row and self.row["us"] else 1.0

    @property
    def of_floor(self) -> float:
        """Share of the speed that memory and arithmetic of the device allow."""
        return self.row["floor_us"] / self.row["us"] if self.row and self.row["us"] else 0.0


def search(
    calls: Iterable[Call],
    budget_s: float = float("inf"),
    progress: Callable[[Iterable[Call]], Iterable[Call]] = iter,
    again: bool = False,
) -> list[Finding]:
    """Measure every call whose key has no fresh row, and keep the winners in the user's tables.

    Args:
        calls: what `collect` noted.
        budget_s: seconds after which no further key is begun.
        progress: wraps the calls that have to be measured, to show how far the search is.
        again: measure also those whose key has a fresh row.

    Returns:
        A finding for each call, in their order.
    """
    calls = list(calls)
    found = {id(call): _known(call) for call in calls}
    open_calls = [call for call in calls if again or found[id(call)].status != "found"]
    end = time.monotonic() + budget_s
    facts = _compiled(open_calls)
    for call in progress(open_calls):
        if time.monotonic() < end:
            found[id(call)] = _measured(call, found[id(call)], end, facts)
    if open_calls:
        forget()
    return [found[id(call)] for call in calls]


def _known(call: Call) -> Finding:
    row = lookup.find_measured(call.op, call.key)
    if row is None:
        return Finding(call, "left out", why="no time was left")
    changed = stale(call.op, row)
    if changed:
        return Finding(call, "stale", row, "; ".join(changed))
    return Finding(call, "found", row)


def _compiled(calls: list[Call]) -> dict[tuple[int, str], list[Facts]]:
    """What the compiler says of the first configurations of every call, asked on all cores at once.

    Only for a GPU: on a CPU the compiler tells nothing that the model asks for.
    """
    arch = backend.arch(lookup.device())
    if backend.kind() != "gpu" or arch not in TARGETS:
        return {}
    with suspended():
        asked = [
            (call, config)
            for call in calls
            for config in ranked(call, candidates(call.op, call.key))[:MOST_COMPILED]
        ]
    answers = precompile([job_of(call, config, arch) for call, config in asked])
    return {
        (id(call), _text(config)): facts
        for (call, config), facts in zip(asked, answers, strict=True)
        if facts is not None
    }


def _text(config: Config) -> str:
    return str(sorted(config.items()))


def _measured(call: Call, before: Finding, end: float, facts: dict[tuple[int, str], list[Facts]]) -> Finding:
    try:
        row = measure(
            call, lambda: time.monotonic() > end, lambda config: facts.get((id(call), _text(config)))
        )
    except FAILURES as error:
        return replace(before, status="left out", why=f"its default fails: {error}")
    lookup.keep(call.op, call.key, row)
    return Finding(call, "measured", row, before.why if before.status == "stale" else "")


def measure(
    call: Call,
    out_of_time: Callable[[], bool] = lambda: False,
    facts: Callable[[Config], list[Facts] | None] = lambda config: None,
) -> Row:
    """The row of one key: its default against the most promising configurations that do the same."""
    default, *others = candidates(call.op, call.key)
    with suspended():
        expected = outcome(call, default)
        copies = rotation(call)
        trials = [Trial(call, default, copies)]
        for config in ranked(call, others, facts=facts)[:MOST_TRIED]:
            if out_of_time():
                break
            trials += _tried(call, config, expected, copies)
        winner = fastest(trials, out_of_time)
    return row_of(call, winner, trials)


def _tried(call: Call, config: Config, expected: list[Any], copies: list[Any]) -> list[Trial]:
    """A trial of `config`, or none if it fails here or does something else than the default."""
    try:
        return [Trial(call, config, copies)] if agree(outcome(call, config), expected) else []
    except FAILURES:
        return []


def row_of(call: Call, winner: Trial, trials: list[Trial]) -> Row:
    """What a table says of a key."""
    return {
        "config": dict(winner.config),
        "us": round(winner.us, 3),
        "default_us": round(trials[0].us, 3),
        "floor_us": round(floor_us(call, lookup.device()), 3),
        "tried": len(trials),
        **versions(call.op),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def describe(findings: Iterable[Finding]) -> Iterator[str]:
    """A table for people: op, key, default and tuned time, gain, share of the floor, and what was done."""
    yield f"{'op':18}{'default us':>11}{'tuned us':>10}{'gain':>7}{'of floor':>10}  {'status':9} key"
    for finding in findings:
        row, name = finding.row, finding.call.op.name
        numbers = (
            f"{row['default_us']:11.1f}{row['us']:10.1f}{finding.gain:6.2f}x{finding.of_floor:10.0%}"
            if row
            else f"{'-':>11}{'-':>10}{'-':>7}{'-':>10}"
        )
        why = f"  ({finding.why})" if finding.why else ""
        yield f"{name:18}{numbers}  {finding.status:9} {key_text(finding.call.key)}{why}"
