"""The choice of a launch configuration, and who may watch or change it: searches, tests, a failed launch."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ParamSpec, TypeVar

from trinfer.autotune import lookup
from trinfer.autotune.records import Call, Config, Tunable
from trinfer.autotune.rows import settle

P = ParamSpec("P")
R = TypeVar("R")
View = Callable[[Tunable, Any, Config], Config]
# while this is empty, a launch pays one look-up
_views: list[View] = []
_suspensions: list[bool] = []
_set_aside: set[tuple[Tunable, Hashable]] = set()
# arguments of the launchers that run under `collect`, the innermost last
_running: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
_forgetful: list[Callable[[], None]] = []


def choose(op: Tunable, key: Hashable) -> Config:
    """The launch configuration of `op` for `key`, remembered: a launch pays one dictionary look-up.

    `key` holds what a configuration may depend on (dtypes, features, sizes that stay fixed while decoding)
    and nothing that changes from token to token.
    """
    return _viewed(op, key) if _views or _suspensions else _found(op, key)


def _viewed(op: Tunable, key: Hashable) -> Config:
    config = (analytic if _suspensions else _found)(op, key)
    for view in _views:
        config = view(op, key, config)
    return config


@functools.cache
def analytic(op: Tunable, key: Hashable) -> Config:
    """What `op` itself says of `key`, remembered."""
    return op.default(key)


@functools.cache
def _found(op: Tunable, key: Hashable) -> Config:
    settle(op)
    row = None if (op, key) in _set_aside else lookup.find(op, key)
    return analytic(op, key) if row is None else row["config"]


def forget() -> None:
    """Drop every remembered answer: a table or the number of threads has changed."""
    lookup.forget()
    analytic.cache_clear()
    _drop_found()


def on_forget(call: Callable[[], None]) -> None:
    """Make `call` whenever remembered answers are dropped."""
    _forgetful.append(call)


def is_watched() -> bool:
    """True if someone sees or changes choices: a search, a test, whoever suspends the tables."""
    return bool(_views or _suspensions)


def _drop_found() -> None:
    _found.cache_clear()
    for call in _forgetful:
        call()


@contextlib.contextmanager
def pin(op: Tunable, config: Config) -> Iterator[None]:
    """Run every launch of `op` inside the `with` block with `config` over its own, to time or test it."""
    with _seen_by(lambda asked, _, own: {**own, **config} if asked is op else own):
        yield


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Inside the `with` block no table is asked: every launch runs in its analytic default."""
    _suspensions.append(True)
    try:
        yield
    finally:
        _suspensions.pop()


@contextlib.contextmanager
def collect() -> Iterator[dict[tuple[Tunable, Any], Call]]:
    """Note the first launch of every op and key inside the `with` block, with its arguments."""
    calls: dict[tuple[Tunable, Any], Call] = {}

    def note(op: Tunable, key: Any, config: Config) -> Config:
        if (op, key) not in calls and _running:
            calls[op, key] = Call(op, key, *_running[-1])
        return config

    with _seen_by(note):
        yield calls


@contextlib.contextmanager
def _seen_by(view: View) -> Iterator[None]:
    _views.append(view)
    try:
        yield
    finally:
        # by identity: the same function may be open twice
        _views[:] = [v for v in _views if v is not view]


def tuned(launcher: Callable[P, R]) -> Callable[P, R]:
    """Wrap a launcher: `collect` sees its arguments, and a row that cannot launch here is set aside."""
    # kernels need triton, this room does without
    from triton.errors import TritonError

    @functools.wraps(launcher)
    def launch(*args: P.args, **kwargs: P.kwargs) -> R:
        if _views:
            return _noted(launcher, args, kwargs)
        try:
            return launcher(*args, **kwargs)
        except TritonError:
            if not _set_aside_rows(launcher, args, kwargs):
                raise
        return launcher(*args, **kwargs)

    return launch


def _noted(launcher: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
    """Under a view nothing is set aside: a configuration that is being tried has to fail."""
    _running.append((args, kwargs))
    try:
        return launcher(*args, **kwargs)
    finally:
        _running.pop()


def _set_aside_rows(launcher: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Find out what a failed launch asked for; True if some of it came from a table and now is set aside."""
    asked: list[tuple[Tunable, Hashable]] = []

    def stop(op: Tunable, key: Hashable, config: Config) -> Config:
        asked.append((op, key))
        raise _Stop

    with contextlib.suppress(_Stop), _seen_by(stop):
        launcher(*args, **kwargs)
    rows = [(op, key) for op, key in asked if _found(op, key) != analytic(op, key)]
    for op, key in rows:
        warnings.warn(
            f"the tuned configuration of {op.name} for {key} cannot be launched on this device and is set "
            "aside; run trinfer warmup to measure it again",
            stacklevel=4,
        )
    _set_aside.update(rows)
    _drop_found()
    return bool(rows)


class _Stop(Exception):
    """A launcher has said what it asks for."""
