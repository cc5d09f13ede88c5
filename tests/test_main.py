"""The command line, as a user types it: what it prints, and one line for every mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import trinfer
from tests.gguf_files import tiny_gguf
from trinfer import backend, cpu
from trinfer.__main__ import TimedStreamer, compile_progress, greedy, main
from trinfer.checkpoint import load_model

ROOT = Path(__file__).parent.parent
Capture = pytest.CaptureFixture[str]

needs_kernels = pytest.mark.skipif(backend.kind() == "reference", reason="no kernel can run on this machine")


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    return str(tiny_gguf(tmp_path))


@pytest.fixture
def bert(tmp_path: Path, gguf: str) -> str:
    """A Hugging Face folder of a tiny encoder."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
    )
    folder = str(tmp_path / "bert")
    BertModel(config).save_pretrained(folder)
    load_model(gguf)[1].save_pretrained(folder)
    return folder


def answer_of_transformers(gguf: str, prompt: str, new_tokens: int) -> str:
    model, tokenizer = load_model(gguf)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    return tokenizer.decode(greedy(model, ids, new_tokens), skip_special_tokens=True)


@needs_kernels
def test_generate_streams_the_answer_and_says_what_ran_where(gguf: str, capsys: Capture) -> None:
    assert main(["generate", "--model", gguf, "--max-new-tokens", "12", "abcd"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == answer_of_transformers(gguf, "abcd", 12).strip()
    for part in (
        "prefill",
        "ms (1 tokens)",
        "tokens/s (12 tokens)",
        "ran on",
        "float32",
        "plan: kernel injection",
    ):
        assert part in err
    assert "lm_head" in err.split("kernel launches: ")[1]


def test_generate_without_kernels_is_plain_transformers(gguf: str, capsys: Capture) -> None:
    assert main(["generate", "--no-kernels", "--model", gguf, "--max-new-tokens", "12", "abcd"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == answer_of_transformers(gguf, "abcd", 12).strip()
    assert "plan: pass-through" in err and "kernel launches: none" in err


@needs_kernels
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_generate_in_sixteen_bits(dtype: str, gguf: str, capsys: Capture) -> None:
    assert main(["generate", "--model", gguf, "--dtype", dtype, "--max-new-tokens", "3", "ab"]) == 0
    assert {"bf16": "bfloat16", "fp16": "float16"}[dtype] in capsys.readouterr().err


def test_plan_needs_no_weights(bert: str, capsys: Capture) -> None:
    (Path(bert) / "model.safetensors").unlink()
    assert main(["plan", "--model", bert]) == 0
    out = capsys.readouterr().out
    assert "BertModel (bert)" in out and "encoder.layer.{0..1}.attention" in out and "layer_norm" in out


def test_plan_of_a_gguf_file(gguf: str, capsys: Capture) -> None:
    assert main(["plan", "--model", gguf, "--dtype", "bf16"]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM (llama)" in out and "model.layers.{0..1}.mlp" in out


def test_plan_of_all_architectures(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    # the README's table is made of all of them
    some = {name: trinfer.ARCHITECTURES[name] for name in ("llama", "internlm", "bert", "mixtral")}
    monkeypatch.setattr("trinfer.survey.ARCHITECTURES", some)
    assert main(["plan", "--all"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines()[4:]}
    assert lines.keys() == some.keys()
    assert "LlamaForCausalLM" in lines["llama"] and "launches" in lines["llama"]
    assert "part by part" in lines["mixtral"] and "its MLP is a mixture of experts" in lines["mixtral"]


def mistakes(gguf: str, bert: str, folder: str) -> list[tuple[list[str], str]]:
    generate = ["generate", "--max-new-tokens", "4", "--model"]
    return [
        ([*generate, "gpt9", "hi"], "'gpt9' is no known name.*allowed: smollm2, minilm"),
        ([*generate, folder, "hi"], "holds no config.json.*allowed: "),
        ([*generate, __file__, "hi"], "is no .gguf file.*allowed: "),
        ([*generate, gguf, "  "], "the prompt is empty.*allowed: any text"),
        ([*generate, bert, "hi"], "is a BertModel, which generates no text.*try --model smollm2"),
        (
            ["generate", "--model", gguf, "--max-new-tokens", "128", "ab"],
            "1 prompt tokens.*allowed.*128; shorten",
        ),
        (["plan", "--model", "gpt9"], "'gpt9' is no known name"),
    ]


@pytest.mark.parametrize("number", range(7))
def test_mistake_is_one_line_and_exit_code_2(
    number: int, gguf: str, bert: str, tmp_path: Path, capsys: Capture
) -> None:
    import re

    arguments, message = mistakes(gguf, bert, str(tmp_path))[number]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("trinfer: ") and err.count("\n") == 1
    assert re.search(message, err), err


def test_damaged_file_is_one_line_and_exit_code_2(gguf: str, capsys: Capture) -> None:
    content = Path(gguf).read_bytes()
    Path(gguf).write_bytes(content[: len(content) // 2])
    assert main(["generate", "--model", gguf, "hi"]) == 2
    assert "no readable GGUF file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["sing"], "invalid choice: 'sing'"),
        (["generate", "hi"], "required: --model"),
        (["plan"], "one of the arguments --all --model is required"),
        (["plan", "--all", "--model", "smollm2"], "not allowed with argument"),
        (["generate", "--model", "smollm2"], "required: prompt"),
        (["generate", "--model", "smollm2", "--dtype", "fp8", "hi"], "invalid choice: 'fp8'"),
        (["generate", "--model", "smollm2", "--max-new-tokens", "0", "hi"], "'0' is no positive number"),
        (
            ["generate", "--model", "smollm2", "--max-new-tokens", "many", "hi"],
            "'many' is no positive number",
        ),
    ],
)
def test_wrong_arguments_show_the_usage(arguments: list[str], message: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out.strip() == trinfer.__version__


def test_progress_shows_only_while_something_compiles(capsys: Capture) -> None:
    before = list(cpu.compile_listeners)
    with compile_progress():
        pass
    assert not capsys.readouterr().err
    with compile_progress():
        for listener in cpu.compile_listeners[len(before) :]:
            listener("_rms_norm_kernel")
    err = capsys.readouterr().err
    assert "compiling kernels" in err and "_rms_norm_kernel" in err
    assert cpu.compile_listeners == before


def test_report_of_a_single_token_has_no_rate(gguf: str) -> None:
    tokenizer = load_model(gguf)[1]
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    streamer = TimedStreamer(tokenizer)
    streamer.times_s = [1.0, 1.5]
    assert streamer.report(7) == "prefill 500 ms (7 tokens)"
    streamer.times_s = [1.0, 1.5, 2.0, 2.5]
    assert streamer.report(7) == "prefill 500 ms (7 tokens), decode 2.0 tokens/s (3 tokens)"


def test_reader_that_leaves_early_gives_no_traceback(gguf: str) -> None:
    command = [sys.executable, "-m", "trinfer", "plan", "--model", gguf]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert not process.stderr.read()
    assert process.returncode == 0


@pytest.mark.slow
@needs_kernels
def test_demo_answers_with_the_tokens_of_transformers(capsys: Capture) -> None:
    code = main(["demo"])
    out, err = capsys.readouterr()
    if code == 2:
        pytest.skip(err)
    assert code == 0, out
    assert "tokens equal to plain transformers: yes, all" in out
    assert "smallest cosine to the vectors of plain transformers: 1.0000" in out
    assert out.count("kernel launches: ") == 2 and "kernel launches: none" not in out
