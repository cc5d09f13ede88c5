"""Files of rows: laws of merging, and every kind of file that one may find in a cache folder."""

import json
import os
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.autotune.stubs import row
from trinfer.autotune import table
from trinfer.autotune.table import Head, dumps, merge, parse, read, write

HEAD = Head("stub", 2, {"slug": "cpu_x", "arch": "x86_64"})

rows = st.builds(
    row,
    block=st.sampled_from((16, 32)),
    us=st.sampled_from((0.5, 1.0)),
    date=st.sampled_from(("2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00")),
    src=st.sampled_from(("a", "b")),
)
tables = st.dictionaries(st.sampled_from(("rows=1", "rows=2", "rows=4")), rows, max_size=3)


@given(tables, tables, tables)
def test_merge_laws(a, b, c):
    assert merge([a, b]) == merge([b, a])
    assert merge([merge([a, b]), c]) == merge([a, merge([b, c])])
    assert merge([a, a]) == merge([a]) == a
    assert merge([a, b]).keys() == a.keys() | b.keys()


def test_merge_takes_the_newer_then_the_faster():
    old, new = row(date="2026-01-01"), row(us=9.0, date="2026-01-02")
    assert merge([{"k": new}, {"k": old}]) == {"k": new}
    assert merge([{"k": row(us=2.0)}, {"k": row(us=1.5)}])["k"]["us"] == 1.5


@given(tables)
def test_text_of_a_table_is_read_back_and_has_one_order(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("table") / "stub.json"
    assert write(path, HEAD, content)
    assert read(path, HEAD) == content
    backwards = dict(reversed(content.items()))
    assert path.read_text() == dumps(HEAD, backwards)


def test_write_adds_to_what_is_there(tmp_path):
    path = tmp_path / "deep" / "stub.json"
    assert write(path, HEAD, {"a": row(16)}) and write(path, HEAD, {"b": row(32)})
    assert read(path, HEAD) == {"a": row(16), "b": row(32)}
    assert [p.name for p in sorted(path.parent.iterdir())] == [".stub.json.lock", "stub.json"]


def content(**changes):
    whole = json.loads(dumps(HEAD, {"rows=1": row()}))
    return json.dumps(whole | changes)


BAD = {
    "empty": "",
    "truncated": content()[:120],
    "no table": "[1, 2]",
    "wrong types": content(entries=[1]),
    "a number of 5000 digits": content().replace('"schema": 1', f'"schema": {"9" * 5000}'),
    "brackets without end": "[" * 200_000,
    "an older schema": content(schema=0),
    "a later schema": content(schema=99),
    "schema true": content(schema=True),
    "another op": content(op="other"),
    "another revision": content(revision=1),
    "a later revision": content(revision=3),
    "another device": content(device={"slug": "nvidia_h200", "arch": "sm_90"}),
    "not UTF-8": b"\xff\xfe\x00",
}
KEPT = {"a later schema", "a later revision"}


@pytest.mark.parametrize("name", BAD)
def test_u098_a_bad_file_is_ignored_with_one_warning(name, tmp_path):
    table.warn_once.cache_clear()
    path = tmp_path / "stub.json"
    path.write_bytes(BAD[name] if isinstance(BAD[name], bytes) else BAD[name].encode())
    with pytest.warns(UserWarning, match=r"stub\.json is ignored: .") as caught:
        assert [read(path, HEAD), read(path, HEAD)] == [{}, {}]
    assert len(caught) == 1
    before = path.read_bytes()
    with pytest.warns(UserWarning, match="cannot be written" if name in KEPT else "is replaced"):
        assert write(path, HEAD, {"rows=2": row()}) is (name not in KEPT)
    # what a later version wrote is not destroyed
    assert path.read_bytes() == before if name in KEPT else read(path, HEAD) == {"rows=2": row()}


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        {},
        row(us="fast"),
        row(us=True),
        row(us=-1.0),
        row(us=10**400),
        row(us=float("nan")),
        row(config=None),
        row(date=3),
        {name: value for name, value in row().items() if name != "src"},
    ],
    ids=str,
)
def test_u098_bad_rows_are_left_out_and_good_ones_kept(bad, tmp_path):
    table.warn_once.cache_clear()
    path = tmp_path / "stub.json"
    path.write_text(content(entries={"rows=1": row(), "rows=2": bad}))
    with pytest.warns(UserWarning, match="1 of 2 rows are ignored, first 'rows=2'"):
        assert read(path, HEAD) == {"rows=1": row()}
    assert write(path, HEAD, {"rows=4": row()})
    assert parse(path)["entries"].keys() == {"rows=1", "rows=4"}


def test_u098_a_folder_that_cannot_be_written_costs_one_warning(tmp_path):
    table.warn_once.cache_clear()
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="rows last as long as this process") as caught:
        assert not write(tmp_path / "file" / "stub.json", HEAD, {"a": row()})
        assert not write(tmp_path / "file" / "stub.json", HEAD, {"a": row()})
    assert len(caught) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_u098_folder_and_file_without_permission(tmp_path):
    path = tmp_path / "stub.json"
    assert write(path, HEAD, {"a": row()})
    tmp_path.chmod(0o500)
    with pytest.warns(UserWarning, match="cannot be written"):
        assert not write(path, HEAD, {"b": row()})
    assert read(path, HEAD) == {"a": row()}
    tmp_path.chmod(0o700)
    path.chmod(0)
    with pytest.warns(UserWarning, match="is ignored"):
        assert read(path, HEAD) == {}


def test_u098_a_folder_in_place_of_a_file(tmp_path):
    table.warn_once.cache_clear()
    (tmp_path / "stub.json").mkdir()
    with pytest.warns(UserWarning, match="is ignored"):
        assert read(tmp_path / "stub.json", HEAD) == {}
    with pytest.warns(UserWarning, match="cannot be written"):
        assert not write(tmp_path / "stub.json", HEAD, {"a": row()})


def test_without_locks_each_process_writes_its_own_file(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "fcntl", None)
    path = tmp_path / "stub.json"
    assert write(path, HEAD, {"a": row()}) and write(path, HEAD, {"b": row()})
    (own,) = tmp_path.glob("stub.*.json")
    assert not path.exists() and str(os.getpid()) in own.name
    monkeypatch.undo()
    assert write(path, HEAD, {"c": row()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(path, HEAD).keys() == {"a", "b", "c"}


def test_a_file_left_by_a_killed_writer_is_taken_away(tmp_path):
    path = tmp_path / "stub.json"
    (tmp_path / ".stub.json.999999.tmp").write_text("half")
    assert write(path, HEAD, {"a": row()})
    assert not list(tmp_path.glob(".*.tmp"))
