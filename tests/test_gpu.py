"""What can only be seen on a GPU: every op as compiled there, a model, a search. `pytest -m gpu` runs it."""

import pytest
import torch

from tests import models
from tests.kernels.test_op import as_tuple, random_inputs
from tests.strategies import assert_close, truth
from trinfer import autotune, backend
from trinfer.autotune import collect, lookup
from trinfer.autotune.measure import agree, outcome
from trinfer.autotune.rows import candidates
from trinfer.kernels import OPS, count_launches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
def test_op_matches_its_reference(op, dtype):
    # the third call of a kind is made the short way
    op.launcher(**random_inputs(op, dtype))
    op.launcher(**random_inputs(op, dtype))
    arguments = random_inputs(op, dtype)
    with count_launches() as launches:
        results = as_tuple(op.launcher(**arguments))
    assert launches[op.name]
    for actual, expected in zip(results, as_tuple(truth(op.ref, **arguments)), strict=True):
        if actual.is_floating_point():
            assert_close(actual, expected, actual.dtype)
        else:
            limit = 1 if actual.element_size() == 1 else 0
            assert (actual.int() - expected.int()).abs().max() <= limit


@pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
def test_the_first_configurations_do_what_the_default_does(op):
    with collect() as calls:
        op.launcher(**random_inputs(op, torch.bfloat16))
    (call,) = calls.values()
    default, *others = candidates(op, call.key)
    expected = outcome(call, default)
    for config in others[:3]:
        assert agree(outcome(call, config), expected), config


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_model_says_what_transformers_says(name):
    model = models.make(name).to(backend.default_device())
    expected = models.reference(model)(models.token_ids(2, 9)).logits
    engine = models.engine_of(model)
    assert_close(engine(models.token_ids(2, 9)).logits, expected.double(), torch.float32)


def test_a_search_finds_measures_and_keeps(tmp_path, monkeypatch):
    from trinfer.autotune.search import search

    monkeypatch.setenv("TRINFER_AUTOTUNE_CACHE", str(tmp_path))
    autotune.forget()
    op = next(op for op in OPS if op.name == "gemv")
    with collect() as calls:
        op.launcher(**random_inputs(op, torch.bfloat16))
    (finding,) = search(calls.values())
    assert finding.status == "measured" and finding.row["us"] > 0
    assert lookup.find_measured(op, finding.call.key) == finding.row
    autotune.forget()
