"""Public fault reports about variants of the mathematics: every model that an entry names."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import engine_of, left_padded, make, reference, token_ids
from tests.reports import models
from trinfer.cache import KVCache
from trinfer.compat import cache_key

BOUND = 1e-4


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert bool(actual.isfinite().all())
    assert float((actual - expected).detach().abs().max()) <= BOUND


def scaled(model: Any, names: tuple[str, ...], factor: float) -> Any:
    """The model with the weights of these linears times a factor."""
    found = [module for path, module in model.named_modules() if path.rpartition(".")[2] in names]
    assert found
    with torch.no_grad():
        for module in found:
            module.weight.mul_(factor)
    return model


@models("U004")
def test_u004_half_precision_with_large_scores_and_padding(name: str) -> None:
    model = scaled(make(name), ("q_proj", "k_proj"), 8.0)
    engine = engine_of(model, torch.float16)
    ids, mask = left_padded([12, 5])
    assert bool(engine(ids, attention_mask=mask).logits.isfinite().all())
    torch.manual_seed(0)
    options = {"do_sample": True, "max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}
    out = engine.generate(ids, attention_mask=mask, **options)
    assert all(bool(logits.isfinite().all()) for logits in out.logits)
    alone = engine(ids[1:, 7:]).logits
    assert float((engine(ids, attention_mask=mask).logits[1, 7:] - alone[0]).abs().max()) <= 2e-2


@models("U011")
def test_u011_cache_outside_the_window_is_never_read(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    ids = token_ids(2, 13)
    cache = KVCache(limit=32)
    with torch.no_grad():
        engine(ids[:, :12], **{cache_key(): cache}, use_cache=True)
        for layer in cache.layers:
            for buffer in (layer.buffers.keys, layer.buffers.values):
                # the next token sees itself and the three before it
                buffer[:, :, :9] = float("nan")
                buffer[:, :, 12:] = float("nan")
        step = engine(ids[:, 12:], **{cache_key(): cache}, use_cache=True).logits
        whole = expected(ids).logits
    assert_close(step[:, -1], whole[:, -1])


@models("U012")
def test_u012_scores_without_a_scale_stay_finite(name: str) -> None:
    model = scaled(make(name), ("q_proj", "k_proj"), 10.0)
    expected = reference(model)
    engine = engine_of(model, torch.float16)
    ids = token_ids(2, 48)
    ours, theirs = engine(ids).logits.float(), expected(ids).logits
    assert bool(ours.isfinite().all())
    top = theirs.topk(2).values
    clear = top[..., 0] - top[..., 1] > 2 * 2e-2
    assert float(clear.float().mean()) > 0.5
    assert bool((ours.argmax(-1) == theirs.argmax(-1))[clear].all())


@models("U014")
def test_u014_soft_cap_of_huge_scores(name: str) -> None:
    model = scaled(make(name), ("q_proj",), 100.0)
    expected = reference(model)
    engine = engine_of(model)
    ids, mask = left_padded([12, 5])
    ours, theirs = (m(ids, attention_mask=mask).logits for m in (engine, expected))
    assert_close(ours[mask.bool()], theirs[mask.bool()])
    # the cap is what keeps these logits apart from those of plain scores
    for layer in engine.module.model.layers:
        assert layer.self_attn._trinfer.softcap == 50.0


@models("U027")
def test_u027_alibi_with_a_head_count_that_is_no_power_of_two(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    ids, mask = left_padded([40, 11])
    ours, theirs = (m(ids, attention_mask=mask).logits for m in (engine, expected))
    assert_close(ours[mask.bool()], theirs[mask.bool()])
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    assert torch.equal(engine.generate(ids, **options), expected.generate(ids, **options))


@models("U045")
def test_u045_equal_rows_give_equal_results(name: str) -> None:
    engine = engine_of(make(name))
    logits = engine(token_ids(1, 9).repeat(4, 1)).logits
    assert float((logits - logits[:1]).abs().max()) < 1e-6


@models("U084")
def test_u084_local_and_global_layers_differ(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    windows = {step.record.window for step in engine.plan.swapped if "attention" in step.forward}
    assert windows == {4, None}
    ids = token_ids(2, 12)
    assert_close(engine(ids).logits, expected(ids).logits)
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    out = engine.generate(ids, output_logits=True, **options)
    with torch.no_grad():
        whole = expected(out.sequences, use_cache=False).logits
    assert_close(torch.stack(out.logits, 1), whole[:, 11:-1])


@pytest.mark.parametrize("name", ["mpt", "falcon_alibi", "bloom"])
def test_alibi_holds_for_masks_of_every_kind(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    ids = token_ids(2, 10)
    mask = torch.ones_like(ids)
    mask[0, 3] = mask[1, 6] = 0
    for given in (None, torch.ones_like(ids), mask):
        ours, theirs = (m(ids, attention_mask=given).logits for m in (engine, expected))
        real = slice(None) if given is None else given.bool()
        assert_close(ours[real], theirs[real])


@pytest.mark.parametrize("name", ["gemma2", "gptneo", "bloom", "gpt2", "neox"])
def test_probabilities_on_request(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    ids, mask = left_padded([8, 5])
    options = {"attention_mask": mask, "output_attentions": True}
    ours, theirs = engine(ids, **options).attentions, expected(ids, **options).attentions
    assert len(ours) == len(theirs) == 2
    for weights, truth in zip(ours, theirs, strict=True):
        rows = mask.bool()
        assert torch.allclose(weights.transpose(1, 2)[rows], truth.transpose(1, 2)[rows], atol=1e-5)
