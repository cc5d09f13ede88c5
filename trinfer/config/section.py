"""How what a caller says becomes one frozen section: aliases, moved names, two spellings that must agree."""

import difflib
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


def option(default: Any, meaning: str, *, alias: str | None = None) -> Any:
    """Declare one field; `meaning` becomes its row in the README."""
    return Field(default, alias=alias, description=meaning)


class Section(BaseModel):
    """A frozen group of fields; an unknown key, a wrong type or "auto" raises `pydantic.ValidationError`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        loc_by_alias=False,
        validate_default=True,
        arbitrary_types_allowed=True,
    )
    # old name -> dotted path of the field that took its place, None when nothing did
    moved: ClassVar[dict[str, str | None]] = {}
    # dotted path -> the top-level field that it also sets
    mirrored: ClassVar[dict[str, str]] = {}
    # True: `True` and `False` stand for {"enabled": ...}
    takes_flag: ClassVar[bool] = False
    # said after "unknown key" where a whole family of keys is left out on purpose
    left_out: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        if isinstance(given, cls):
            return given
        if not isinstance(given, dict):
            names = ", ".join(cls.model_fields)
            raise PydanticCustomError(
                "section_type",
                "{text}",
                {"text": f"{shown(given)} is no dict; allowed: a dict with the keys {names}"},
            )
        return fold(cls, {"": given})

    def at(self, path: str) -> Any:
        """The value of the field at the dotted `path`, None below an unset section."""
        value: Any = self
        for name in path.split("."):
            value = None if value is None else getattr(value, name)
        return value

    def is_set(self, path: str) -> bool:
        """True if the caller gave the field at the dotted `path`, whatever the value."""
        *parents, name = path.split(".")
        owner = self.at(".".join(parents)) if parents else self
        return owner is not None and name in owner.model_fields_set

    def explicit(self) -> dict[str, Any]:
        """The fields that the caller gave, by name, in the order of their declaration."""
        given = self.model_fields_set
        return {name: getattr(self, name) for name in type(self).model_fields if name in given}

    @classmethod
    def inner(cls, name: str) -> "type[Section] | None":
        """The section class behind the field `name`, None for an ordinary or unknown field."""
        kind: Any = cls.model_fields[name].annotation if name in cls.model_fields else None
        kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


@dataclass(frozen=True)
class Said:
    """One thing that a caller said: the field it sets, how it was spelled, and where."""

    path: tuple[str, ...]
    spelling: str
    value: Any
    source: str
    owner: type[Section]

    def meant(self) -> Any:
        """The value as the config would hold it, the raw one where it is not valid."""
        try:
            return getattr(self.owner.model_validate({self.path[-1]: self.value}), self.path[-1])
        except ValidationError:
            return self.value

    def __str__(self) -> str:
        return f"{self.spelling}={shown(self.value)}" + (f" ({self.source})" if self.source else "")


def fold(root: type[Section], sources: dict[str, dict[Any, Any]]) -> dict[str, Any]:
    """Join what several sources say into one nested dict of field names; the sources are left as they are.

    Raises:
        pydantic.ValidationError: unknown keys and "auto", all at once, with path and nearest valid key.
        ValueError: one field given twice with different meanings, whatever the spellings.
    """
    everything = [said for source, given in sources.items() for said in _walk(root, root, given, source)]
    problems = [problem for said in everything if (problem := _problem(said))]
    if problems:
        raise ValidationError.from_exception_data(root.__name__, problems)
    _warn_moved(root, everything)
    first: dict[tuple[str, ...], Said] = {}
    for said in everything:
        other = first.setdefault(said.path, said)
        if other is not said and not _agree(other, said):
            raise ValueError(
                f"Conflicting argument '{'.'.join(said.path)}': {other} against {said}; "
                "both must mean the same; give only one of them"
            )
    return _nested(said for said in first.values() if said.path[-1] not in said.owner.moved)


def shown(value: Any) -> str:
    """`value` as text that fits into an error message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _walk(
    root: type[Section],
    section: type[Section],
    given: dict[Any, Any],
    source: str,
    path: tuple[str, ...] = (),
    spelling: str = "",
) -> Iterator[Said]:
    names = {field.alias: name for name, field in section.model_fields.items() if field.alias}
    for key, raw in given.items():
        name = names.get(key, str(key))
        inner, here, spelled = section.inner(name), (*path, name), f"{spelling}{key}"
        value = raw.explicit() if inner and isinstance(raw, inner) else raw
        if inner and inner.takes_flag and isinstance(value, bool):
            value = {"enabled": value}
        if inner and isinstance(value, dict) and value:
            yield from _walk(root, inner, value, source, here, f"{spelled}.")
            continue
        said = Said(here, spelled, _copied(value), source, section)
        yield _follow(root, said, section.moved.get(name)) if name in section.moved else said
        if value is not None and ".".join(here) in root.mirrored:
            yield _follow(root, said, root.mirrored[".".join(here)])


def _follow(root: type[Section], said: Said, target: str | None) -> Said:
    path = tuple(target.split(".")) if target else said.path
    owner = root
    for name in path[:-1]:
        owner = owner.inner(name) or owner
    return Said(path, said.spelling, said.value, said.source, owner)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _problem(said: Said) -> InitErrorDetails | None:
    path, name = ".".join(said.path), said.path[-1]
    is_auto = isinstance(said.value, str) and said.value.lower() == "auto"
    if name in said.owner.moved:
        if is_auto:
            return None
        text = f"{path}={shown(said.value)} has no effect any more; allowed: 'auto'; leave {path} out"
    elif name not in said.owner.model_fields:
        nearest = ".".join([*said.path[:-1], _nearest(said.owner, name)])
        reason = f" ({said.owner.left_out})" if said.owner.left_out else ""
        text = f"unknown key {path}={shown(said.value)}{reason}; the nearest valid key is {nearest}"
    elif is_auto:
        text = f"{path}='auto' is no value; allowed: a value of its own; leave {path} out for the default"
    else:
        return None
    error = PydanticCustomError("refused_key", "{text}", {"text": text})
    return InitErrorDetails(type=error, loc=said.path, input=said.value)


def _nearest(section: type[Section], key: str) -> str:
    for name in section.model_fields:
        inner = section.inner(name)
        if inner and key in inner.model_fields:
            return f"{name}.{key}"
    aliases = [field.alias for field in section.model_fields.values() if field.alias]
    valid = [*section.model_fields, *aliases, *section.moved]
    return difflib.get_close_matches(key, valid, n=1, cutoff=0.0)[0]


def _agree(one: Said, other: Said) -> bool:
    first, second = one.meant(), other.meant()
    return first is second or bool(first == second)


def _nested(everything: Iterable[Said]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for said in everything:
        node = tree
        for name in said.path[:-1]:
            node = node.setdefault(name, {})
            # a section given as a plain value stays as it is: pydantic refuses it
            node = node if isinstance(node, dict) else {}
        if isinstance(said.value, dict) and not said.value:
            node.setdefault(said.path[-1], {})
        else:
            node[said.path[-1]] = said.value
    return tree


def _warn_moved(root: type[Section], everything: list[Said]) -> None:
    for old in dict.fromkeys(said.spelling for said in everything if said.spelling in root.moved):
        new = root.moved[old]
        remedy = f"use {new}" if new else "it has no effect; leave it out"
        warnings.warn(f"{old} is deprecated; {remedy}", DeprecationWarning, stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    depth, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("trinfer", "pydantic"):
        depth, frame = depth + 1, frame.f_back
    return depth
