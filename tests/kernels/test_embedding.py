"""embedding against its reference, and what must never be read."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, dtypes, make, seeds, sizes, truth
from trinfer.kernels import count_launches, embedding, embedding_ref

columns = st.sampled_from([33, 37, 48, 64, 513, 576, 1000])


def draw_ids(shape, V, seed, dtype=torch.int64):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(
    dtypes,
    sizes(1, 50),
    sizes(1, 90),
    columns,
    st.sampled_from(["contiguous", "sliced"]),
    st.booleans(),
    seeds,
)
def test_embedding_matches_ref(dtype, M, V, N, layout, has_scale, seed):
    weight, ids = make((V, N), dtype, seed, layout), draw_ids((2, M), V, seed)
    scale = 7.75 if has_scale else 1.0
    with count_launches() as launches:
        y = embedding(ids, weight, scale=scale)
    assert launches == {"embedding": 1}
    assert_close(y, truth(embedding_ref, ids, weight, scale=scale), dtype)
    if not has_scale:
        assert torch.equal(y, weight[ids])


@given(sizes(1, 20), sizes(2, 20), seeds)
def test_embedding_takes_ids_of_any_stride_and_width(B, M, seed):
    weight, ids = make((31, 48), torch.float32, seed), draw_ids((B, M), 31, seed)
    assert torch.equal(embedding(ids[:, -1:], weight), weight[ids[:, -1:]])
    assert torch.equal(embedding(ids[:1].expand(4, -1), weight), weight[ids[:1].expand(4, -1)])
    assert torch.equal(embedding(ids.T.int(), weight), weight[ids.T])


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_of_foreign_ids_is_nan(dtype):
    weight = make((5, 48), dtype, 0)
    y = embedding(torch.tensor([4, 5, -1, 2**40, 0]), weight)
    assert torch.equal(y[[0, 4]], weight[[4, 0]])
    assert y[1:4].isnan().all()


def test_embedding_of_nothing():
    assert embedding(torch.zeros(2, 0, dtype=torch.int64), torch.ones(3, 48)).shape == (2, 0, 48)


def test_embedding_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="ids are torch.float32"):
        embedding(torch.zeros(2), torch.ones(3, 48))
    with pytest.raises(ValueError, match=r"weight has shape \(3,\)"):
        embedding(torch.zeros(2, dtype=torch.int64), torch.ones(3))
