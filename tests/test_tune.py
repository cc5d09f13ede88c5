"""Tuning a whole model: what a dry run meets, triton_autotune=True, and the warm-up command."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import trinfer
from tests import models
from tests.gguf_files import tiny_gguf
from trinfer import autotune, backend, tune, warmup
from trinfer.__main__ import main
from trinfer.autotune import choice, lookup, measure, table
from trinfer.autotune import search as searching

pytestmark = pytest.mark.skipif(backend.kind() != "cpu", reason="tunes on the CPU backend")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache, nothing looked up, and few short samples."""
    monkeypatch.setenv("TRINFER_AUTOTUNE_CACHE", str(tmp_path / "cache"))
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    shutil.copy(lookup.packaged_folder() / "devices.json", shipped)
    monkeypatch.setattr(lookup, "packaged_folder", lambda: shipped)
    monkeypatch.setattr(choice, "_set_aside", set())
    monkeypatch.setattr(measure, "SAMPLE_S", 1e-5)
    monkeypatch.setattr(searching, "MOST_TRIED", 1)
    table.warn_once.cache_clear()
    autotune.forget()
    yield tmp_path / "cache"
    autotune.forget()


def no_trials(*_: object) -> None:
    pytest.fail("a benchmark was run")


def test_lengths_meet_every_bucket():
    assert tune.lengths(1) == [1]
    assert tune.lengths(100) == [1, 2, 4, 8, 16, 32, 64, 100]
    # for any prompt there is one whose bucket is the same
    assert {(n - 1).bit_length() for n in range(1, 101)} == {(n - 1).bit_length() for n in tune.lengths(100)}


def test_a_dry_run_meets_what_a_generation_launches(folder):
    engine = models.engine_of(models.make("llama"), max_out_tokens=24)
    noted = {(call.op.name, call.key) for call in tune.dry_run(engine.module, 24)}
    with autotune.collect() as calls:
        for rows, prompt, new in (
            (1, 1, 4),
            (1, 3, 2),
            (1, 7, 9),
            (1, 16, 8),
            (2, 3, 3),
            (4, 5, 2),
            (16, 2, 2),
        ):
            engine.generate(models.token_ids(rows, prompt), max_new_tokens=new, do_sample=False)
    assert {(op.name, key) for op, key in calls} <= noted


def test_triton_autotune_searches_once_and_changes_no_token(folder, monkeypatch):
    model = models.make("llama")
    expected = models.reference(model).generate(models.token_ids(1, 5), max_new_tokens=6, do_sample=False)
    options = {"triton_autotune": True, "max_out_tokens": 12}
    engine = models.engine_of(model, **options)
    tables = sorted(path.stem for path in folder.glob("*/*.json"))
    assert {"gemv", "lm_head"} <= set(tables) and any("attention" in name for name in tables)
    assert torch.equal(engine.generate(models.token_ids(1, 5), max_new_tokens=6, do_sample=False), expected)
    engine.destroy()
    monkeypatch.setattr(searching, "Trial", no_trials)
    autotune.forget()
    again = models.engine_of(models.make("llama"), **options)
    assert torch.equal(again.generate(models.token_ids(1, 5), max_new_tokens=6, do_sample=False), expected)


def test_an_encoder_is_tuned_too(folder):
    engine = models.engine_of(models.make("bert"), triton_autotune=True, max_out_tokens=4)
    assert {"attention", "gemv"} <= {path.stem for path in folder.glob("*/*.json")}
    assert engine(models.token_ids(1, 4)).logits.isfinite().all()


def test_without_the_option_nothing_is_measured(folder, monkeypatch):
    monkeypatch.setattr(searching, "Trial", no_trials)
    engine = models.engine_of(models.make("llama"))
    engine.generate(models.token_ids(1, 3), max_new_tokens=3)
    assert not folder.exists()


@pytest.mark.parametrize("kind", ["reference", "interpreter"])
def test_where_nothing_is_compiled_it_is_refused_and_the_model_untouched(kind, monkeypatch):
    model = models.make("llama")
    before = type(model), model.dtype
    monkeypatch.setattr(backend, "kind", lambda: kind)
    with pytest.raises(ValueError, match=rf"triton_autotune=True.*{kind}.*leave triton_autotune out"):
        models.engine_of(model, torch.bfloat16, triton_autotune=True)
    assert (type(model), model.dtype) == before


def test_a_model_of_something_else_than_tokens_is_refused():
    model = models.make("bert")
    model.main_input_name = "pixel_values"
    with pytest.raises(ValueError, match="takes pixel_values"):
        models.engine_of(model, triton_autotune=True)


def test_a_failed_search_takes_the_swaps_back(folder, monkeypatch):
    model = models.make("llama")
    forward = model.model.layers[0].mlp.forward
    monkeypatch.setattr(tune, "dry_run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        models.engine_of(model, triton_autotune=True)
    assert model.model.layers[0].mlp.forward == forward
    assert type(model).__mro__[1].__name__ != "LlamaForCausalLM"


def test_warmup_prints_the_table_and_a_second_run_searches_nothing(folder, tmp_path, capsys, monkeypatch):
    gguf = str(tiny_gguf(tmp_path))
    assert main(["warmup", "--model", gguf, "--max-out-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    lines = out.strip().split("\n")
    assert lines[0].split() == ["op", "default", "us", "tuned", "us", "gain", "of", "floor", "status", "key"]
    assert " measured; " in lines[-1] and lines[-1].endswith(f"kept in {folder}")
    assert any(line.startswith("gemv ") and line.count("x") for line in lines)
    # progress with the time left
    assert "tuning" in err and "<" in err
    monkeypatch.setattr(searching, "Trial", no_trials)
    autotune.forget()
    assert warmup.main(["--model", gguf, "--max-out-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    assert " found; " in out and "measured;" not in out and "tuning" not in err


def test_a_folder_without_a_tokenizer_is_warmed_up_but_answers_no_prompt(folder, tmp_path, capsys):
    saved = str(tmp_path / "model")
    models.make("llama").save_pretrained(saved)
    assert main(["warmup", "--model", saved, "--max-out-tokens", "4"]) == 0
    assert " measured; " in capsys.readouterr().out
    assert main(["generate", "--model", saved, "--max-new-tokens", "4", "words"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert f"folder {saved!r} holds no tokenizer that transformers can read; allowed: " in err


def test_a_cache_copied_from_another_device_is_ignored_with_one_warning(folder, tmp_path, capsys):
    gguf = str(tiny_gguf(tmp_path))
    assert main(["warmup", "--model", gguf, "--max-out-tokens", "4"]) == 0
    (path,) = folder.glob("*/gemv.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"device": {"slug": "nvidia_h200", "arch": "sm_90"}}))
    autotune.forget()
    model, _ = trinfer.checkpoint.load_model(gguf)
    with pytest.warns(UserWarning, match="measured on nvidia_h200 and this is cpu_") as caught:
        models.engine_of(model).generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=3)
    assert sum("gemv.json" in str(w.message) for w in caught) == 1


def test_warmup_for_a_device_that_is_not_here_says_so(folder, tmp_path, capsys):
    gguf = str(tiny_gguf(tmp_path))
    assert (
        warmup.main(["--model", gguf, "--dtype", "bf16", "--target", "sm_90", "--max-out-tokens", "3"]) == 0
    )
    out, _ = capsys.readouterr()
    assert out.startswith("no sm_90 is here: nothing is measured and nothing is kept")
    assert "gemv" in out and "decode_attention" in out and "registers" in out
    assert not list(folder.glob("*/*.json"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "sm_12"], "--target sm_12 is unknown; allowed: sm_80, sm_90, sm_100, gfx942"),
        (["--config", "{folder}/none.json"], "none.json"),
        (["--config", "{folder}/plain.json"], "swap no kernel in"),
    ],
)
def test_warmup_refuses_in_one_line(arguments, words, tmp_path, capsys):
    (tmp_path / "plain.json").write_text('{"replace_with_kernel_inject": false, "dtype": "fp32"}')
    given = [argument.format(folder=tmp_path) for argument in arguments]
    assert warmup.main(["--model", str(tiny_gguf(tmp_path)), *given]) == 2
    out, err = capsys.readouterr()
    assert not out and words in err and err.count("\n") == 1


def test_warmup_takes_options_from_a_file(tmp_path):
    path = tmp_path / "options.json"
    path.write_text('{"dtype": "bf16", "max_out_tokens": 9}')
    parser = warmup.argparse.ArgumentParser()
    warmup.add_arguments(parser)
    args = parser.parse_args(["--model", "m", "--config", str(path)])
    assert warmup.options_of(args) == {"replace_with_kernel_inject": True}
    assert warmup.options_of(parser.parse_args(["--model", "m"])) == {
        "dtype": torch.float32,
        "replace_with_kernel_inject": True,
    }


def test_cache_merge_joins_folders(folder, tmp_path, capsys):
    gguf = str(tiny_gguf(tmp_path))
    assert main(["warmup", "--model", gguf, "--max-out-tokens", "4"]) == 0
    first = tmp_path / "first"
    shutil.copytree(folder, first)
    shutil.rmtree(folder)
    autotune.forget()
    assert main(["warmup", "--model", gguf, "--dtype", "bf16", "--max-out-tokens", "4"]) == 0
    (second,) = folder.glob("*/gemv.json")
    before = json.loads(second.read_text())["entries"]
    (tmp_path / "first" / second.parent.name / "broken.json").write_text("{")
    capsys.readouterr()
    with pytest.warns(UserWarning, match=r"broken\.json is left out"):
        assert main(["cache", "merge", str(first)]) == 0
    out, _ = capsys.readouterr()
    after = json.loads(second.read_text())["entries"]
    old = json.loads((first / second.parent.name / "gemv.json").read_text())["entries"]
    assert after == before | old and len(after) == len(before) + len(old)
    assert f"{len(after):5} rows in {second}" in out
    # once more changes nothing
    text = second.read_text()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main(["cache", "merge", str(first), str(folder), "--into", str(folder)])
    assert second.read_text() == text
    assert main(["cache", "merge", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_tables_of_two_devices_are_not_mixed(tmp_path):
    from tests.autotune.stubs import row

    here, there = tmp_path / "here", tmp_path / "there"
    for folder, name in ((here, "one"), (there, "two")):
        head = table.Head("gemv", 1, {"slug": name})
        table.write(folder / "slug" / "gemv.json", head, {"rows=1": row()})
    with pytest.warns(UserWarning, match="measured on another device"):
        assert list(table.merge_folders([there], here)) == []


def test_progress_shows_nothing_for_nothing(capsys):
    assert list(tune.bar([])) == []
    assert capsys.readouterr().err == ""


def test_paths_of_wheel_and_checkout(monkeypatch, tmp_path):
    assert (lookup.packaged_folder() / "devices.json").is_file()
    inside = tmp_path / "trinfer" / "autotune_cache"
    inside.mkdir(parents=True)
    monkeypatch.setattr(lookup, "__file__", str(Path(tmp_path / "trinfer" / "autotune" / "lookup.py")))
    assert lookup.packaged_folder() == inside
