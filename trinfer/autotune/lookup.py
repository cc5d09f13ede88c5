"""Where a row is looked up: the user's tables, the shipped ones, a neighbour, the architecture's."""

import functools
import logging
import os
from pathlib import Path
from typing import Any

import torch

from trinfer import backend
from trinfer.autotune import table
from trinfer.autotune.records import Tunable
from trinfer.autotune.rows import Row, is_possible, key_text, neighbours, stale
from trinfer.autotune.table import Head

logger = logging.getLogger(__name__)
# further away than half or twice the size another row's configuration is no better than the default
MAX_DISTANCE = 1.0
# rows of this process that no file could take
_unwritten: dict[tuple[Tunable, str], Row] = {}


def user_folder() -> Path:
    """Where searches write: TRINFER_AUTOTUNE_CACHE, or a folder below the user's home."""
    named = os.environ.get("TRINFER_AUTOTUNE_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "trinfer" / "autotune"


def packaged_folder() -> Path:
    """The tables that come with trinfer: in the wheel inside the package, in a checkout beside it."""
    package = Path(__file__).parents[1]
    inside = package / "autotune_cache"
    return inside if inside.is_dir() else package.parent / "autotune_cache"


def device() -> torch.device:
    """The device whose tables count."""
    return backend.default_device()


def head(op: Tunable) -> Head:
    """What a table of this device must say of itself."""
    return Head(op.name, op.revision, backend.device_facts(device()))


def path(folder: Path, op: Tunable) -> Path:
    """The table of this device in `folder`."""
    return folder / backend.device_slug(device()) / f"{op.name}.json"


def find(op: Tunable, key: Any) -> Row | None:
    """`_find`; a row that other versions measured is used and reported."""
    row = _find(op, key)
    # what has changed is worth a moment only to somebody who reads it
    if row is not None and logger.isEnabledFor(logging.INFO) and (changed := stale(op, row)):
        logger.info("%s for %s runs in a configuration of before: %s", op.name, key, "; ".join(changed))
    return row


def _find(op: Tunable, key: Any) -> Row | None:
    """The row to run `key` with; None if no table has one.

    A row measured for exactly this key counts first, then that of the nearest sizes, then that of the
    architecture; at each step the user's table before the shipped one.
    """
    if backend.kind() not in ("gpu", "cpu"):
        return None
    mine, shipped, arch = _tables(op)
    text = key_text(key)
    exact = (_exact(op, key, text, rows) for rows in (mine, shipped))
    near = (_nearest(op, key, rows) for rows in (mine, shipped))
    shared = (step(op, key, arch) for step in (lambda o, k, r: _exact(o, k, text, r), _nearest))
    return next((row for rows in (exact, near, shared) for row in rows if row is not None), None)


def find_measured(op: Tunable, key: Any) -> Row | None:
    """The row that was measured on this device for exactly this key."""
    text = key_text(key)
    found = (_exact(op, key, text, rows) for rows in _tables(op)[:2])
    return next((row for row in found if row is not None), None)


def keep(op: Tunable, key: Any, row: Row) -> bool:
    """Put a row into the user's table; where that cannot be written, it holds in this process."""
    text = key_text(key)
    written = table.write(path(user_folder(), op), head(op), {text: row})
    if not written:
        _unwritten[op, text] = row
    _rows.cache_clear()
    return written


def forget() -> None:
    """Read the tables anew."""
    _rows.cache_clear()


def _tables(op: Tunable) -> tuple[dict[str, Row], dict[str, Row], dict[str, Row]]:
    mine = dict(_rows(path(user_folder(), op), op))
    mine.update({text: row for (owner, text), row in _unwritten.items() if owner is op})
    shared = packaged_folder() / f"arch-{backend.arch(device())}" / f"{op.name}.json"
    return mine, _rows(path(packaged_folder(), op), op), _rows(shared, op, is_shared=True)


@functools.cache
def _rows(path: Path, op: Tunable, is_shared: bool = False) -> dict[str, Row]:
    facts = {"arch": backend.arch(device())} if is_shared else backend.device_facts(device())
    return table.read(path, Head(op.name, op.revision, facts))


def _exact(op: Tunable, key: Any, text: str, rows: dict[str, Row]) -> Row | None:
    row = rows.get(text)
    return row if row is not None and _may_run(op, key, row) else None


def _nearest(op: Tunable, key: Any, rows: dict[str, Row]) -> Row | None:
    near = [pair for pair in neighbours(key, list(rows)) if pair[0] <= MAX_DISTANCE]
    possible = (rows[key_text(other)] for _, other in near if _may_run(op, other, rows[key_text(other)]))
    return next(possible, None)


def _may_run(op: Tunable, key: Any, row: Row) -> bool:
    if is_possible(op, key, row["config"]):
        return True
    table.warn_once(
        f"a row of {op.name} is ignored, {key_text(key)}: {row['config']} is no configuration of this version"
    )
    return False
