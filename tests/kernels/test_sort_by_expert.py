"""sort_by_expert against its reference, and the laws of a sorted permutation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.experts import make_ids
from tests.strategies import seeds, sizes
from trinfer.autotune import pin
from trinfer.kernels import OPS, count_launches, sort_by_expert, sort_by_expert_ref

OP = next(op for op in OPS if op.name == "sort_by_expert")
experts = st.sampled_from([1, 2, 7, 8, 60, 128])


@given(sizes(0, 300), st.integers(1, 8), experts, st.booleans(), seeds)
def test_sort_by_expert_matches_ref(T, top_k, E, stray, seed):
    ids = make_ids(T, top_k, E, seed, stray)
    with count_launches() as launches:
        order, offsets = sort_by_expert(ids, E)
    assert launches == ({"sort_by_expert": 1} if T else {})
    expected = sort_by_expert_ref(ids, E)
    assert torch.equal(order, expected[0]) and torch.equal(offsets, expected[1])


@given(sizes(1, 300), st.integers(1, 8), experts, seeds)
def test_sort_by_expert_is_a_permutation_into_ranges(T, top_k, E, seed):
    ids = make_ids(T, top_k, E, seed)
    order, offsets = sort_by_expert(ids, E)
    assert torch.equal(order.sort().values, torch.arange(T * top_k).int())
    assert offsets[0] == 0 and offsets[E] == T * top_k
    for e, pairs in enumerate(order[: offsets[E]].tensor_split(offsets[1:E].tolist())):
        assert (ids.flatten()[pairs] == e).all() and torch.equal(pairs, pairs.sort().values)


@given(sizes(1, 100), experts, seeds)
def test_sort_by_expert_takes_any_strides(T, E, seed):
    ids = make_ids(T, 4, E, seed)
    for view in (ids[:, 1:3], ids.T):
        for a, b in zip(sort_by_expert(view, E), sort_by_expert(view.contiguous(), E), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("config", [{"BLOCK_P": 16}, {"BLOCK_P": 1024}])
def test_sort_by_expert_is_right_in_every_configuration(config):
    ids = make_ids(151, 3, 11, 0, stray=True)
    with pin(OP, config):
        order, offsets = sort_by_expert(ids, 11)
    expected = sort_by_expert_ref(ids, 11)
    assert torch.equal(order, expected[0]) and torch.equal(offsets, expected[1])


def test_sort_by_expert_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="ids are torch.int64, num_experts=4 - allowed: torch.int32"):
        sort_by_expert(torch.zeros(2, 2, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match="num_experts=0"):
        sort_by_expert(torch.zeros(2, 2, dtype=torch.int32), 0)
