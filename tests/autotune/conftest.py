"""Every test of tables starts with none, and warns anew."""

import pytest

from trinfer import autotune
from trinfer.autotune import choice, lookup, table


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The user's folder and the shipped one, both empty; what was looked up before is forgotten."""
    user, shipped = tmp_path / "user", tmp_path / "shipped"
    monkeypatch.setenv("TRINFER_AUTOTUNE_CACHE", str(user))
    monkeypatch.setattr(lookup, "packaged_folder", lambda: shipped)
    monkeypatch.setattr(lookup, "_unwritten", {})
    monkeypatch.setattr(choice, "_set_aside", set())
    table.warn_once.cache_clear()
    autotune.forget()
    yield user, shipped
    autotune.forget()
