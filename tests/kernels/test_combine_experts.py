"""combine_experts against its reference, and the laws of a weighted sum."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, dtypes, layouts, make, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import OPS, combine_experts, combine_experts_ref, count_launches

OP = next(op for op in OPS if op.name == "combine_experts")
counts = st.sampled_from([1, 2, 8])


@given(dtypes, sizes(0, 20), counts, st.sampled_from([1, 71, 576, 1500]), layouts, st.booleans(), seeds)
def test_combine_experts_matches_ref(dtype, T, top_k, N, layout, with_residual, seed):
    x = make((1, T * top_k, N), dtype, seed, layout)[0]
    weights = make((1, T, top_k), torch.float32, seed + 1, layout)[0]
    residual = make((1, T, N), dtype, seed + 2, layout)[0] if with_residual else None
    with count_launches() as launches:
        y = combine_experts(x, weights, residual)
    assert launches == ({"combine_experts": 1} if T else {})
    assert_close(y, truth(combine_experts_ref, x, weights, residual), dtype)


@given(dtypes, sizes(1, 20), sizes(1, 100), seeds)
def test_combine_experts_with_one_weight_takes_that_expert(dtype, T, N, seed):
    x, ids = make((T, 8, N), dtype, seed), torch.arange(T) % 8
    y = combine_experts(x.flatten(0, 1), torch.nn.functional.one_hot(ids, 8).float())
    assert torch.equal(y, x[torch.arange(T), ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [{"BLOCK_N": 16}, {"BLOCK_N": 256}])
def test_combine_experts_is_right_in_every_configuration(config, dtype):
    x, weights = make((6, 100), dtype, 0), make((3, 2), torch.float32, 1)
    with pin(OP, config):
        assert_close(combine_experts(x, weights), truth(combine_experts_ref, x, weights), dtype)


def test_combine_experts_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"x is \(5, 8\), weights \(3, 2\) torch.float32 - allowed"):
        combine_experts(torch.zeros(5, 8), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"residual is \(3, 7\) torch.float32 - allowed: \(3, 8\)"):
        combine_experts(torch.zeros(6, 8), torch.zeros(3, 2), torch.zeros(3, 7))
