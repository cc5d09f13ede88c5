"""Generation against transformers: tokens of every mode, the length limit, the cache, clean state."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import trinfer
from tests.models import engine_of, left_padded, make, reference, token_ids
from tests.reports import models
from trinfer import backend
from trinfer.cache import KVCache
from trinfer.generation import subclass

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
    "sampling": {"do_sample": True, "top_k": 8, "temperature": 0.9},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "prompt look-up": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 3},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
}


def pair(name: str = "llama", **options: Any) -> tuple[Any, Any]:
    """An engine and the untouched model it was made from."""
    model = make(name)
    expected = reference(model)
    return engine_of(model, **options), expected


def generate(model: Any, ids: Tensor, **options: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(ids, **({"max_new_tokens": 8, "do_sample": False} | options))


class Counting(BaseStreamer):
    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.parts.append(value)

    def end(self) -> None:
        self.ends += 1


class Failing(LogitsProcessor):
    """Raises at the third token."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.left = error, 3

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return scores


@pytest.mark.parametrize("mode", MODES)
def test_tokens_equal_transformers(mode: str) -> None:
    engine, expected = pair()
    ids, mask = left_padded([9, 4])
    cases: list[tuple[Tensor, dict[str, Any]]] = [(ids[:1], {})]
    if mode != "prompt look-up":
        cases.append((ids, {"attention_mask": mask}))
    for inputs, extra in cases:
        ours, theirs = (generate(m, inputs, **MODES[mode], **extra) for m in (engine, expected))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama_biased", "bert_decoder"])
def test_greedy_runs_the_lean_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, expected = pair(name)
    calls: list[str] = []
    for lean in ("greedy", "decode"):
        run = getattr(subclass, lean)
        monkeypatch.setattr(
            subclass, lean, lambda *args, run=run, lean=lean: calls.append(lean) or run(*args)
        )
    ids = token_ids(2, 5)
    assert torch.equal(generate(engine, ids), generate(expected, ids))
    assert calls == ["decode" if name == "bert_decoder" else "greedy"]


@pytest.mark.parametrize(
    "name", ["gpt2", "neox", "mistral_sw", "qwen2", "gemma2", "bloom", "falcon", "opt", "t5"]
)
def test_models_without_a_row_generate_the_same(name: str) -> None:
    engine, expected = pair(name)
    ids, mask = left_padded([9, 4])
    for options in ({}, {"num_beams": 2}):
        ours, theirs = (generate(m, ids, attention_mask=mask, **options) for m in (engine, expected))
        assert torch.equal(ours, theirs)


@models("U002")
def test_u002_left_padded_rows_equal_each_row_alone(name: str) -> None:
    engine, _ = pair(name)
    lengths = [10, 7, 4, 1]
    ids, mask = left_padded(lengths)
    together = generate(engine, ids, attention_mask=mask)
    for row, length in enumerate(lengths):
        alone = generate(engine, ids[row : row + 1, 10 - length :])
        assert torch.equal(together[row, 10 - length :], alone[0])


@models("U037")
def test_u037_every_step_equals_a_recompute_without_cache(name: str) -> None:
    engine, expected = pair(name)
    ids, mask = left_padded([4, 3])
    new = min(66, engine.config.max_position_embeddings - 4)
    options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": new}
    out = generate(engine, ids, attention_mask=mask, **options)
    mask = torch.cat([mask, mask.new_ones(2, new)], -1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = expected(out.sequences, attention_mask=mask, position_ids=positions, use_cache=False).logits
    steps = torch.stack(out.logits, 1)
    assert float((steps - whole[:, 3:-1]).abs().max()) <= 1e-4


@models("U067")
def test_u067_expanded_inputs_and_several_sequences(name: str) -> None:
    engine, expected = pair(name)
    ids, mask = left_padded([6])
    options = {"do_sample": True, "num_return_sequences": 4}
    assert torch.equal(generate(engine, ids, **options), generate(expected, ids, **options))
    wide = ids.expand(4, -1), mask.expand(4, -1)
    ours, theirs = (m(wide[0], attention_mask=wide[1]).logits.detach() for m in (engine, expected))
    assert float((ours - theirs).abs().max()) <= 1e-4


LimitCall = Callable[[Any, Tensor], Any]
TOO_LONG: dict[str, LimitCall] = {
    "forward": lambda m, ids: m(ids),
    "forward by keyword": lambda m, ids: m(input_ids=ids),
    "forward of embeddings": lambda m, ids: m(inputs_embeds=m.get_input_embeddings()(ids)),
    "generate": lambda m, ids: m.generate(ids, max_new_tokens=1),
    "generate(inputs=)": lambda m, ids: m.generate(inputs=ids, max_new_tokens=1),
    "generate(input_ids=)": lambda m, ids: m.generate(input_ids=ids, max_new_tokens=1),
    "generate from embeddings": lambda m, ids: m.generate(
        inputs_embeds=m.get_input_embeddings()(ids), max_new_tokens=1
    ),
}


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "pass-through"])
@pytest.mark.parametrize("call", TOO_LONG)
@models("U034")
def test_u034_prompt_beyond_the_limit_is_refused(name: str, call: str, kernels: bool) -> None:
    engine = trinfer.init_inference(
        make(name), dtype="fp32", replace_with_kernel_inject=kernels, max_out_tokens=16
    )
    with pytest.raises(
        ValueError, match=r"prompt of 20 tokens \+ \d new .* exceed max_out_tokens=16; pass max_out"
    ):
        TOO_LONG[call](engine, token_ids(1, 20))
    assert engine(token_ids(1, 16)).logits.shape[1] == 16


REQUESTS: dict[str, dict[str, Any]] = {
    "max_new_tokens": {"max_new_tokens": 20},
    "max_length": {"max_length": 30},
    "GenerationConfig": {"generation_config": GenerationConfig(max_new_tokens=20)},
    "beams": {"max_new_tokens": 20, "num_beams": 2},
    "sampling": {"max_new_tokens": 20, "do_sample": True},
    "no cache": {"max_new_tokens": 20, "use_cache": False},
    "prompt look-up": {"max_new_tokens": 20, "prompt_lookup_num_tokens": 2},
    "default of transformers": {},
}


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "pass-through"])
@pytest.mark.parametrize("request_", REQUESTS)
@models("U035")
def test_u035_request_that_cannot_fit_is_refused_before_the_first_token(
    name: str, request_: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(name)
    model.generation_config.eos_token_id = 2
    engine = trinfer.init_inference(
        model, dtype="fp32", replace_with_kernel_inject=kernels, max_out_tokens=16
    )
    ran: list[int] = []
    engine.module.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(
        ValueError, match=r"prompt of 10 tokens \+ 20 new tokens = 30 exceed max_out_tokens=16"
    ):
        engine.generate(token_ids(1, 10), **REQUESTS[request_])
    assert not ran
    model.generation_config.eos_token_id = None
    assert engine.generate(token_ids(1, 10), max_new_tokens=6).shape[1] == 16
    with pytest.raises(ValueError, match=r"\+ 7 new tokens = 17 .* ask for at most 6 new tokens"):
        engine.generate(token_ids(1, 10), max_new_tokens=7)


def test_limit_of_the_models_own_generation_config() -> None:
    model = make("llama")
    model.generation_config.max_new_tokens = 20
    engine = engine_of(model, max_out_tokens=16)
    with pytest.raises(ValueError, match=r"10 tokens \+ 20 new"):
        engine.generate(token_ids(1, 10))


@pytest.mark.parametrize("cache", ["KVCache", "DynamicCache"])
def test_limit_counts_the_tokens_in_the_cache(cache: str) -> None:
    engine, _ = pair(max_out_tokens=16)
    held = KVCache(16) if cache == "KVCache" else DynamicCache(config=engine.config)
    key = "cache" if "cache" in type(engine(token_ids(1, 2))).__dataclass_fields__ else "past_key_values"
    engine(token_ids(1, 12), **{key: held})
    with pytest.raises(ValueError, match=r"17 tokens .* max_out_tokens=16"):
        engine(token_ids(1, 5), **{key: held})
    assert held.get_seq_length() == 12
    assert engine(token_ids(1, 4), **{key: held}).logits.shape[1] == 4


def test_cache_shrinks_with_one_warning_and_never_below_the_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = pair(max_out_tokens=64, min_out_tokens=4)
    per_token = 2 * 2 * 3 * 8 * 4
    monkeypatch.setattr(backend, "free_bytes", lambda device: 20 * per_token)
    with pytest.warns(UserWarning, match=r"max_out_tokens=64 for 1 rows needs .* the limit is now 20"):
        assert engine.generate(token_ids(1, 10), max_new_tokens=10).shape[1] == 20
    # the first call has taken all there was, and the next one gets its buffers
    monkeypatch.setattr(backend, "free_bytes", lambda device: 0)
    with pytest.raises(ValueError, match=r"10 tokens \+ 11 new tokens = 21 exceed max_out_tokens=20"):
        engine.generate(token_ids(1, 10), max_new_tokens=11)
    with pytest.raises(ValueError, match=r"min_out_tokens=4 for 6 rows needs 9216 bytes and 7680 are free"):
        engine.generate(token_ids(2, 1), max_new_tokens=1, num_beams=3)
    monkeypatch.setattr(backend, "free_bytes", lambda device: 20 * per_token)
    with pytest.raises(ValueError, match=r"min_out_tokens=21 for 1 rows needs 8064 bytes and 7680 are free"):
        engine_of(make("llama"), max_out_tokens=64, min_out_tokens=21)


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams"])
def test_cache_is_preallocated(mode: str) -> None:
    engine, _ = pair(max_out_tokens=40)
    out = generate(engine, token_ids(3, 5), return_dict_in_generate=True, **MODES[mode])
    cache = getattr(out, "cache", None) or out.past_key_values
    assert isinstance(cache, KVCache)
    assert cache.get_seq_length() == 12
    rows = 16 if mode == "beams" else 4
    assert [tuple(layer.buffers.keys.shape) for layer in cache.layers] == [(rows, 3, 40, 8)] * 2


def test_cache_handed_back_continues() -> None:
    engine, expected = pair(max_out_tokens=40)
    first = generate(engine, token_ids(1, 5), return_dict_in_generate=True)
    cache = getattr(first, "cache", None) or first.past_key_values
    key = "cache" if hasattr(first, "cache") else "past_key_values"
    longer = torch.cat([first.sequences, token_ids(1, 6, seed=3)], -1)
    assert torch.equal(generate(engine, longer, **{key: cache}), generate(expected, longer))


def test_scores_and_streamer() -> None:
    engine, expected = pair()
    ids = token_ids(1, 5)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ours, theirs = (generate(m, ids, **options) for m in (engine, expected))
    assert len(ours.scores) == len(ours.logits) == 8
    for mine, truth in zip((*ours.scores, *ours.logits), (*theirs.scores, *theirs.logits), strict=True):
        assert torch.allclose(mine, truth, atol=1e-4)
    streamer = Counting()
    tokens = generate(engine, ids, streamer=streamer)
    assert [len(part.flatten()) for part in streamer.parts] == [5] + [1] * 8
    assert streamer.ends == 1
    assert torch.equal(torch.cat([part.flatten() for part in streamer.parts]), tokens[0])


def test_attentions_on_request() -> None:
    engine, expected = pair()
    options = {"return_dict_in_generate": True, "output_attentions": True, "max_new_tokens": 3}
    ours, theirs = (generate(m, token_ids(1, 5), **options) for m in (engine, expected))
    for mine, truth in zip(ours.attentions, theirs.attentions, strict=True):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, truth, strict=True))


def test_rows_end_at_eos_and_are_padded() -> None:
    engine, expected = pair()
    ids = token_ids(3, 5)
    free = generate(expected, ids)
    eos = int(free[1, 7])
    options = {"eos_token_id": eos, "pad_token_id": 0}
    assert torch.equal(generate(engine, ids, **options), generate(expected, ids, **options))


def test_stopping_criteria() -> None:
    engine, _ = pair()
    criteria = StoppingCriteriaList([MaxLengthCriteria(9)])
    assert generate(engine, token_ids(1, 5), stopping_criteria=criteria).shape[1] == 9


def test_embeddings_as_prompt() -> None:
    engine, expected = pair()
    ids, mask = left_padded([6, 3])
    embeds = expected.get_input_embeddings()(ids).detach()
    ours, theirs = (
        m.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=6, do_sample=False)
        for m in (engine, expected)
    )
    assert torch.equal(ours, theirs)


def test_assistant_model() -> None:
    engine, expected = pair()
    assistant = make("llama", seed=1)
    ids = token_ids(1, 5)
    theirs = generate(expected, ids)
    assert torch.equal(generate(engine, ids, assistant_model=assistant), theirs)
    assert torch.equal(generate(engine, ids, assistant_model=engine_of(assistant).module), theirs)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_exception_leaves_the_next_call_clean(error: type[BaseException]) -> None:
    engine, expected = pair()
    ids = token_ids(2, 5)
    with pytest.raises(error):
        generate(engine, ids, logits_processor=LogitsProcessorList([Failing(error)]))
    assert torch.equal(generate(engine, ids), generate(expected, ids))


def test_batch_size_and_length_change_from_call_to_call() -> None:
    engine, expected = pair()
    for rows, tokens in ((1, 20), (3, 4), (1, 9), (5, 2), (2, 17)):
        ids = token_ids(rows, tokens, seed=rows)
        assert torch.equal(generate(engine, ids), generate(expected, ids))


def test_two_engines_and_two_threads() -> None:
    pairs = [pair("llama"), pair("llama80")]
    ids = token_ids(2, 6)
    truths = [generate(expected, ids) for _, expected in pairs]
    results: list[list[Tensor]] = [[], []]

    def work(index: int) -> None:
        for _ in range(3):
            results[index].append(pairs[index][0].generate(ids, max_new_tokens=8, do_sample=False))

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for truth, found in zip(truths, results, strict=True):
        assert len(found) == 3
        assert all(torch.equal(truth, tokens) for tokens in found)


def test_u041_one_engine_ends_while_another_goes_on() -> None:
    (first, first_truth), (second, second_truth) = pair("gptneo"), pair("llama", enable_cuda_graph=True)
    ids = token_ids(2, 6)
    for _ in range(2):
        assert torch.equal(generate(first, ids), generate(first_truth, ids))
        assert torch.equal(generate(second, ids), generate(second_truth, ids))
    first.destroy()
    assert torch.equal(generate(second, ids), generate(second_truth, ids))
    assert torch.equal(generate(first.module, ids), generate(first_truth, ids))


def test_u043_without_a_cache() -> None:
    engine, expected = pair("llama")
    ids = token_ids(2, 6)
    for options in ({"use_cache": False}, {"use_cache": False, "do_sample": True}):
        assert torch.equal(generate(engine, ids, **options), generate(expected, ids, **options))
    for options in ({"use_cache": False}, {"use_cache": True}):
        ours, theirs = (m(ids, return_dict=False, **options) for m in (engine, expected))
        assert len(ours) == len(theirs)
        assert torch.allclose(ours[0], theirs[0], atol=1e-4)
    for model in (engine, expected):
        model.config.use_cache = False
    assert len(engine(ids, return_dict=False)) == len(expected(ids, return_dict=False)) == 1
    assert torch.equal(generate(engine, ids), generate(expected, ids))


def test_continuous_batching_is_refused() -> None:
    engine, _ = pair()
    with pytest.raises(NotImplementedError, match="generate_batch"):
        engine.generate_batch(inputs=[[5, 6, 7]])


def test_cache_crop_reorder_repeat_reset() -> None:
    cache = KVCache(limit=8)
    keys, values = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 6)
    k, v = cache.update(keys, values, 0)
    assert torch.equal(k, keys)
    assert torch.equal(v, values)
    more = torch.randn(2, 3, 2, 5), torch.randn(2, 3, 2, 6)
    k, v = cache.update(*more, 0)
    assert torch.equal(k, torch.cat([keys, more[0]], 2))
    assert torch.equal(v, torch.cat([values, more[1]], 2))
    cache.crop(-3)
    assert cache.get_seq_length() == 3
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.layers[0].keys, keys[[1, 0], :, :3])
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[0].values, values[[1, 1, 0, 0], :, :3])
    cache.batch_select_indices(torch.tensor([0, 3]))
    assert torch.equal(cache.layers[0].keys, keys[[1, 0], :, :3])
    with pytest.raises(ValueError, match="rows do not fit"):
        cache.update(keys[:1], values[:1], 0)
    cache.reset()
    assert cache.get_seq_length() == 0
    k, _ = cache.update(keys[:1], values[:1], 0)
    assert torch.equal(k, keys[:1])
    with pytest.raises(ValueError, match=r"holds 4 tokens and 5 more exceed max_out_tokens=8"):
        cache.update(torch.zeros(1, 3, 5, 5), torch.zeros(1, 3, 5, 6), 0)
    assert not cache.is_compileable
    assert cache.get_max_length() == 8
