"""`config`/`args`: what the caller says of a model in the place of the model's own configuration."""

import difflib
from typing import Any

from trinfer.architectures import ARCHITECTURES


class SeenConfig:
    """A model's configuration as the rewriting pass sees it: the caller's values first, then its own.

    The model keeps its configuration as it is. `own` is None for a model without one.
    """

    def __init__(self, own: Any, overrides: dict[str, Any] | None) -> None:
        self._own = own
        self._overrides = dict(overrides or {})
        self._read: set[str] = set()
        unknown = [name for name in self._overrides if own is not None and not hasattr(own, name)]
        if unknown:
            names = (*getattr(own, "to_dict", dict)(), *vars(own))
            known = [name for name in names if not name.startswith("_")]
            near = {name: difflib.get_close_matches(name, known, 1) for name in unknown}
            hints = ", ".join(f"{n} (did you mean {m[0]}?)" if m else n for n, m in near.items())
            raise ValueError(
                f"config/args={self._overrides} overrides {hints}, which {type(own).__name__} does not have; "
                "allowed: names in model.config; correct or leave out"
            )

        named = self._overrides.get("model_type")
        if named is not None and named not in ARCHITECTURES:
            raise ValueError(
                f"config/args={self._overrides}: model_type={named!r} names no row; allowed: "
                f"{', '.join(sorted(ARCHITECTURES))}; use one of these"
            )

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return self._overrides[name] if name in self._overrides else getattr(self._own, name)

    def refuse_unread(self) -> None:
        """Refuse overrides that changed nothing, once the plan is made.

        Raises:
            ValueError: the rewriting pass never looked at one of them.
        """
        unread = [name for name in self._overrides if name not in self._read]
        if unread:
            read = ", ".join(sorted(name for name in self._read if not name.startswith("_"))) or "nothing"
            raise ValueError(
                f"config/args={self._overrides}: nothing in the rewriting of this model reads "
                f"{', '.join(unread)}; here it reads {read} and takes the rest from the modules themselves; "
                "leave the others out"
            )
