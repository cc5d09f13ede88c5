"""Where a row is looked up, what makes it void or stale, and what its key says."""

import json
import logging
import sys
import warnings

import pytest
import torch

from tests.autotune.stubs import Key, Stub, row
from tests.cpu import processes
from trinfer import autotune, backend
from trinfer.autotune import lookup, rows, table
from trinfer.autotune.rows import candidates, key_text, neighbours, versions
from trinfer.autotune.table import Head
from trinfer.kernels import row_elements
from trinfer.kernels.gemv import OP

pytestmark = pytest.mark.skipif(backend.kind() != "cpu", reason="tables of the CPU backend")


def put(folder, op, key, content, facts=None):
    """Write a row as a table of this device in `folder`."""
    head = lookup.head(op) if facts is None else Head(op.name, op.revision, facts)
    path = lookup.path(folder, op) if facts is None or "slug" in facts else folder / "arch-x" / "stub.json"
    assert table.write(path, head, {key_text(key): content})


def block(op, key):
    autotune.forget()
    return autotune.choose(op, key)["BLOCK_N"]


def test_order_of_the_tables(folders, monkeypatch):
    user, shipped = folders
    op, key = Stub(), Key(rows=4)
    monkeypatch.setattr(backend, "arch", lambda device: "x")
    assert block(op, key) == 64
    put(shipped, op, key, row(16), {"arch": "x"})
    assert block(op, key) == 16
    put(shipped, op, Key(rows=8), row(32))
    assert block(op, key) == 32
    put(shipped, op, key, row(16))
    assert block(op, key) == 16
    put(user, op, Key(rows=2), row(32))
    assert block(op, key) == 16
    put(user, op, key, row(64))
    assert block(op, key) == 64
    assert lookup.find_measured(op, key)["config"]["BLOCK_N"] == 64
    assert lookup.find_measured(op, Key(rows=16)) is None


def test_a_neighbour_serves_half_and_twice_the_size_and_nothing_else(folders):
    op = Stub()
    lookup.keep(op, Key(rows=8), row(16))
    served = [n for n in (1, 2, 4, 8, 16, 32) if block(op, Key(rows=n)) == 16]
    assert served == [4, 8, 16]
    for other in (Key(rows=8, N=128), Key(rows=8, gated=True), Key(torch.float16, rows=8)):
        assert block(op, other) == 64


def test_u096_the_key_says_everything_that_a_configuration_may_depend_on(monkeypatch):
    keys = [Key(), Key(torch.float16), Key(rows=2), Key(N=65), Key(gated=True)]
    texts = [key_text(key) for key in keys]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    texts.append(key_text(Key()))
    assert len(set(texts)) == 6
    assert texts[0].startswith("N=64 dtype=float32 gated=0 rows=1 threads=")


def test_u096_keys_and_hashes_are_the_same_in_every_process(tmp_path):
    script = tmp_path / "keys.py"
    script.write_text(
        "import torch\n"
        "from trinfer.autotune.rows import key_text, source_hash\n"
        "from trinfer.kernels.gemv import OP, _Key\n"
        "torch.set_num_threads(2)\n"
        "print(key_text(_Key(torch.float32, 1, 2, 3, False, True, False)), source_hash(OP))\n"
    )
    running = [processes.start(script, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    first, second = map(processes.finish, running)
    assert first == second != ""


def test_u096_the_source_hash_covers_the_files_an_op_takes_functions_from(monkeypatch):
    home = sys.modules[OP.launcher.__module__]
    names = {module.__name__.rpartition(".")[2] for module in rows._reached(home, "trinfer.kernels")}
    assert {"gemv", "row_elements", "norm_elements", "elements", "op"} <= names
    assert "attention" not in names
    before = rows.source_hash(OP)
    rows.source_hash.cache_clear()
    monkeypatch.setattr(row_elements, "__file__", __file__)
    assert rows.source_hash(OP) != before
    rows.source_hash.cache_clear()


def test_the_source_hash_is_that_of_code_without_words_about_it():
    code = 'x = "# no comment"\n\n\ndef f(a):\n    return a + "\\"\\"\\""  # why\n'
    written = '"""About."""\n# more\nx = "# no comment"\n\ndef f(a):\n    """Twice,\n\n    and why."""\n'
    written += '    return a + "\\"\\"\\""\n'
    assert rows._code(written) == rows._code(code)
    assert rows._code("def f(): ...  # ...") == "def f(): ..." != rows._code("def f(): 1")
    assert rows._code('class A(B): "doc"; x = 1') != rows._code('class A(B): "doc"; x = 2')
    for before, after in (("# no", "# a"), ("a + ", "a * "), ("(a)", "(a, b=1)"), ("    return", "  return")):
        assert rows._code(code.replace(before, after)) != rows._code(code)


@pytest.mark.parametrize("change", ["revision", "device", "threads"])
def test_u096_another_device_or_revision_makes_a_row_void(change, folders, monkeypatch):
    op, key = Stub(), Key()
    lookup.keep(op, key, row(16))
    assert block(op, key) == 16
    if change == "revision":
        op = Stub(revision=2)
    elif change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    else:
        facts = lookup.head(op).device
        monkeypatch.setattr(backend, "device_facts", lambda device: facts | {"arch": "riscv64"})
    if change == "threads":
        assert block(op, key) == 64
        return
    with pytest.warns(UserWarning, match=r"stub\.json is ignored: it was measured ") as caught:
        assert [block(op, key), block(op, key)] == [64, 64]
    assert len(caught) == 1


def test_a_file_copied_from_another_device_is_ignored_with_one_warning(folders):
    op, key = Stub(), Key()
    lookup.keep(op, key, row(16))
    path = lookup.path(folders[0], op)
    content = json.loads(path.read_text())
    content["device"] = {"slug": "nvidia_h200", "arch": "sm_90", "multiprocessors": 132}
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="measured on nvidia_h200 and this is cpu_") as caught:
        assert [block(op, key), block(op, Key(rows=2))] == [64, 64]
    assert len(caught) == 1


@pytest.mark.parametrize("name", ["triton", "torch", "driver", "src"])
def test_u096_a_stale_row_is_used_and_reported(name, folders, caplog):
    op, key = Stub(), Key()
    fresh = row(16, **versions(op))
    assert rows.stale(op, fresh) == []
    lookup.keep(op, key, fresh | {name: "old"})
    with warnings.catch_warnings(), caplog.at_level(logging.INFO):
        warnings.simplefilter("error")
        assert block(op, key) == 16
    (change,) = rows.stale(op, lookup.find_measured(op, key))
    assert change.startswith(f"{name}: old -> ")
    assert "stub" in caplog.text and change in caplog.text


@pytest.mark.parametrize(
    "config",
    [
        {"BLOCK_N": 48, "num_warps": 4},
        {"BLOCK_N": 16},
        {"BLOCK_N": 16, "num_warps": 4, "BLOCK_K": 8},
        {"BLOCK_N": 16.0, "num_warps": 4},
        {"BLOCK_N": 10**30, "num_warps": 4},
        {"BLOCK_N": "16", "num_warps": 4},
        {"BLOCK_N": [16], "num_warps": 4},
    ],
    ids=str,
)
def test_u098_a_configuration_that_the_op_does_not_have_is_ignored(config, folders):
    op, key = Stub(), Key()
    lookup.keep(op, key, row(config=config))
    with pytest.warns(UserWarning, match="no configuration of this version") as caught:
        assert [block(op, key), block(op, key)] == [64, 64]
    assert len(caught) == 1


def test_rows_that_cannot_be_written_last_as_long_as_the_process(folders):
    user, _ = folders
    user.write_text("in the way")
    op, key = Stub(), Key()
    with pytest.warns(UserWarning, match="last as long as this process"):
        assert not lookup.keep(op, key, row(16))
    assert block(op, key) == 16


def test_candidates_of_a_cpu_differ_in_what_a_cpu_kernel_depends_on():
    op = Stub(space=({"num_warps": 8}, {"BLOCK_N": 16, "num_warps": 2}, {"BLOCK_N": 16}))
    assert candidates(op, Key()) == [{"BLOCK_N": 64, "num_warps": 4}, {"BLOCK_N": 16, "num_warps": 4}]
    # a space that varies a block allows others of it around the default
    op = Stub(space=({"BLOCK_N": 16}, {"BLOCK_N": 24}))
    assert [config["BLOCK_N"] for config in candidates(op, Key())] == [64, 32, 128, 16, 256, 24]


def test_foreign_texts_are_no_neighbours():
    texts = ["", "rows=0", "N=64", key_text(Key(rows=2)).replace("rows=2", "rows=two"), key_text(Key(N=65))]
    assert neighbours(Key(), texts) == []
    assert neighbours(Key(), [key_text(Key(rows=2))]) == [(1.0, Key(rows=2))]


def test_the_user_folder_is_named_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TRINFER_AUTOTUNE_CACHE", str(tmp_path))
    assert lookup.user_folder() == tmp_path
    monkeypatch.delenv("TRINFER_AUTOTUNE_CACHE")
    assert lookup.user_folder().parts[-3:] == (".cache", "trinfer", "autotune")
