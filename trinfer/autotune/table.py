"""One JSON file of rows: read without a lock, written under one, never seen half written."""

import contextlib
import functools
import json
import os
import socket
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinfer.autotune.rows import Row, is_row

try:
    import fcntl
except ImportError:
    # no such locks on Windows: every process writes a file of its own, as on a file system without locks
    fcntl = None  # type: ignore[assignment]

SCHEMA = 1
# a table of all models one could run is far below this
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Head:
    """What all rows of a file have in common: another device or revision makes them void."""

    op: str
    revision: int
    device: Mapping[str, str | int]


class Unreadable(ValueError):
    """A file that holds no table; `is_newer` if a later trinfer wrote it, which must not be overwritten."""

    def __init__(self, why: str, is_newer: bool = False) -> None:
        super().__init__(why)
        self.is_newer = is_newer


def read(path: Path, head: Head) -> dict[str, Row]:
    """The valid rows of `path` and of the files that processes without a lock left beside it, if any.

    A file that is no table, or one of another device or revision, warns once a process and counts as empty.
    """
    return merge(_read_or_warn(file, head) for file in (path, *_shards(path)))


def _read_or_warn(path: Path, head: Head) -> dict[str, Row]:
    try:
        content = parse(path)
        _check_head(content, head)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (Unreadable, OSError) as error:
        warn_once(f"{path} is ignored: {error}")
        return {}
    return _valid(path, content["entries"])


def _valid(path: Path, entries: dict[str, Any]) -> dict[str, Row]:
    rows = {key: row for key, row in entries.items() if is_row(row)}
    if len(rows) < len(entries):
        wrong = min(entries.keys() - rows.keys())
        warn_once(
            f"{path}: {len(entries) - len(rows)} of {len(entries)} rows are ignored, first {wrong!r}: "
            "not what a row has to say"
        )
    return rows


def parse(path: Path) -> dict[str, Any]:
    """The content of a table.

    Raises:
        Unreadable: no JSON, no table, or a later schema.
    """
    if path.stat().st_size > MAX_BYTES:
        raise Unreadable(f"larger than {MAX_BYTES} bytes")
    try:
        content = json.loads(path.read_text())
    # ValueError: not JSON, not UTF-8, or a number of too many digits; RecursionError: brackets without end
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"no JSON: {str(error)[:200]}") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if type(schema) is int and schema > SCHEMA:
        raise Unreadable(f"schema {schema} is of a later trinfer, this one reads {SCHEMA}", is_newer=True)
    kinds = {"op": str, "revision": int, "device": dict, "entries": dict}
    if (
        type(schema) is not int
        or schema != SCHEMA
        or any(type(content.get(name)) is not kind for name, kind in kinds.items())
    ):
        raise Unreadable("not a table of launch configurations")
    return content


def _check_head(content: dict[str, Any], head: Head) -> None:
    if content["op"] != head.op:
        raise Unreadable(f"it holds rows of {content['op']}, not of {head.op}")
    if content["device"] != head.device:
        theirs, ours = (d.get("slug", d.get("arch")) for d in (content["device"], head.device))
        what = f"{theirs} and this is {ours}" if theirs != ours else f"another {ours}"
        raise Unreadable(f"it was measured on {what}")
    if content["revision"] != head.revision:
        raise Unreadable(
            f"it was measured with revision {content['revision']} of {head.op}, this is {head.revision}",
            is_newer=content["revision"] > head.revision,
        )


def merge(tables: Iterable[Mapping[str, Row]]) -> dict[str, Row]:
    """All rows; of two for one key the newer, then the faster. The order of the tables does not matter."""
    merged: dict[str, Row] = {}
    for table in tables:
        for key, row in table.items():
            if key not in merged or _rank(row) > _rank(merged[key]):
                merged[key] = row
    return merged


def _rank(row: Row) -> tuple[str, float, str]:
    return row["date"], -row["us"], json.dumps(row, sort_keys=True)


def write(path: Path, head: Head, rows: Mapping[str, Row]) -> bool:
    """Merge `rows` into `path`; False, with one warning, where that is not possible.

    Once this returns True the rows are on disk, whatever becomes of this process or of others that write.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path) as is_locked:
            target = path if is_locked else _shard(path)
            _replace(target, head, merge([_kept(target, head), rows]), is_locked)
    except (Unreadable, OSError) as error:
        warn_once(f"{path} cannot be written, its rows last as long as this process: {error}")
        return False
    return True


def _kept(path: Path, head: Head) -> dict[str, Row]:
    """The rows that a write has to keep; a table of a later trinfer is not touched."""
    try:
        content = parse(path)
        _check_head(content, head)
    except FileNotFoundError:
        return {}
    except Unreadable as error:
        if error.is_newer:
            raise
        warn_once(f"{path} is replaced: {error}")
        return {}
    return _valid(path, content["entries"])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a table; False where the file system has no locks."""
    if fcntl is None:
        yield False
        return
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        # closing the file releases the lock, and so does the end of the process
        yield True


def _replace(path: Path, head: Head, rows: Mapping[str, Row], is_locked: bool) -> None:
    if is_locked:
        # whoever holds the lock is the only writer: what lies there was left by one that was killed
        for left in path.parent.glob(f".{path.name}.*.tmp"):
            left.unlink(missing_ok=True)
    replace_text(path, dumps(head, rows))


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole: whoever reads it meanwhile sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def dumps(head: Head, rows: Mapping[str, Row]) -> str:
    """The text of a table: one line a value, rows and fields in order, so that a change is a short diff."""
    content = {
        "schema": SCHEMA,
        "op": head.op,
        "revision": head.revision,
        "device": dict(head.device),
        "entries": {key: rows[key] for key in sorted(rows)},
    }
    return json.dumps(content, indent=1) + "\n"


def merge_folders(sources: Iterable[Path], target: Path) -> Iterator[tuple[Path, int]]:
    """Put every table of every source into the same place below `target`; each with its number of rows.

    Tables of other devices are merged like the present one's: nothing here is run. What is no table is
    reported and left out, and so is a table of another device than its counterpart in `target`.
    """
    for file in sorted({file for source in sources for file in source.glob("*/*.json")}):
        try:
            content = parse(file)
        except (Unreadable, OSError) as error:
            warn_once(f"{file} is left out: {error}")
            continue
        head = Head(content["op"], content["revision"], content["device"])
        path = target / file.parent.name / f"{head.op}.json"
        if _of_another_device(path, head):
            warn_once(f"{file} is left out: it was measured on another device than {path}")
        elif write(path, head, _valid(file, content["entries"])):
            yield path, len(read(path, head))


def _of_another_device(path: Path, head: Head) -> bool:
    try:
        return bool(parse(path)["device"] != head.device)
    except (Unreadable, OSError):
        return False


def _shard(path: Path) -> Path:
    return path.with_name(f"{path.stem}.{socket.gethostname()}-{os.getpid()}.json")


def _shards(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.stem}.*.json"))


@functools.cache
def warn_once(message: str) -> None:
    """Warn, the first time in this process."""
    warnings.warn(message, stacklevel=3)
