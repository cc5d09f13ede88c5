"""activation against its reference, and the laws of the functions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, dtypes, layouts, make, seeds, sizes, truth
from trinfer.kernels import (
    activation,
    activation_ref,
    count_launches,
    gelu,
    relu,
)

ACTS = ("gelu", "gelu_quick", "gelu_tanh", "relu", "relu2", "silu")
acts = st.sampled_from(ACTS)


@given(dtypes, acts, sizes(1, 40), sizes(1, 100), layouts, seeds)
def test_activation_matches_ref(dtype, act, M, N, layout, seed):
    x = make((2, M, N), dtype, seed, layout, scale=3.0)
    with count_launches() as launches:
        y = activation(x, act)
    assert launches == {"activation": 1}
    # gelu of -4 is -4 times the difference of 1 and 0.99994
    assert_close(y, truth(activation_ref, x, act), dtype, magnitude=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ACTS)
def test_activation_of_extremes(act, dtype):
    big = torch.finfo(dtype).max / 2
    x = torch.tensor([-big, -1e4, -100.0, -0.0, 0.0, 100.0, 1e4, big, float("nan")], dtype=dtype)
    y = activation(x, act)
    assert torch.equal(y[:5], torch.zeros(5, dtype=dtype))
    # beyond the range of the dtype, the square of a large number is inf in torch as well
    assert torch.equal(y[5:8], x[5:8].square() if act == "relu2" else x[5:8])
    assert y[8].isnan()


def test_activations_have_thin_names():
    x = make((5, 7), torch.float32, 0)
    assert torch.equal(gelu(x), activation(x, "gelu"))
    assert torch.equal(gelu(x, approximate="tanh"), activation(x, "gelu_tanh"))
    assert torch.equal(relu(x), torch.relu(x))


@given(sizes(1, 2000), seeds)
def test_gelu_minus_its_mirror_is_identity(N, seed):
    x = make((N,), torch.float32, seed, scale=3.0)
    for approximate in ("none", "tanh"):
        assert_close(gelu(x, approximate) - gelu(-x, approximate), x.double(), torch.float32)


def test_activation_of_nothing():
    assert activation(torch.zeros(0, 3), "relu").shape == (0, 3)


def test_activation_refuses_what_does_not_fit():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="act='swish' is not an activation - allowed: gelu"):
        activation(x, "swish")
    with pytest.raises(ValueError, match="approximate='fast'"):
        gelu(x, approximate="fast")
