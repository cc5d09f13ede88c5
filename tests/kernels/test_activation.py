"""activation and gated_activation against their references, and the laws of the functions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, dtypes, layouts, make, seeds, sizes, truth
from trinfer.kernels import (
    activation,
    activation_ref,
    count_launches,
    gated_activation,
    gated_activation_ref,
    gelu,
    relu,
    silu_mul,
)

ACTS = ("gelu", "gelu_tanh", "relu", "silu")
acts = st.sampled_from(ACTS)
columns = st.sampled_from([33, 37, 48, 63, 64, 1025, 1536, 2047, 3000, 4097])


@given(dtypes, acts, sizes(1, 40), sizes(1, 100), layouts, seeds)
def test_activation_matches_ref(dtype, act, M, N, layout, seed):
    x = make((2, M, N), dtype, seed, layout, scale=3.0)
    with count_launches() as launches:
        y = activation(x, act)
    assert launches == {"activation": 1}
    assert_close(y, truth(activation_ref, x, act), dtype)


@given(dtypes, acts, sizes(1, 40), columns, layouts, layouts, seeds)
def test_gated_activation_matches_ref(dtype, act, M, N, gate_layout, up_layout, seed):
    gate = make((2, M, N), dtype, seed, gate_layout, scale=3.0)
    up = make((2, M, N), dtype, seed + 1, up_layout)
    with count_launches() as launches:
        y = gated_activation(gate, up, act)
    assert launches == {"gated_activation": 1}
    assert_close(y, truth(gated_activation_ref, gate, up, act), dtype)


@given(dtypes, sizes(1, 20), columns, seeds)
def test_gated_activation_reads_halves_in_place(dtype, M, N, seed):
    both = make((1, M, 2 * N), dtype, seed)
    gate, up = both.chunk(2, -1)
    assert torch.equal(silu_mul(gate, up), silu_mul(gate.clone(), up.clone()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ACTS)
def test_activation_of_extremes(act, dtype):
    big = torch.finfo(dtype).max / 2
    x = torch.tensor([-big, -1e4, -100.0, -0.0, 0.0, 100.0, 1e4, big, float("nan")], dtype=dtype)
    y = activation(x, act)
    assert torch.equal(y[:5], torch.zeros(5, dtype=dtype))
    assert torch.equal(y[5:8], x[5:8])
    assert y[8].isnan()


def test_activations_have_thin_names():
    x = make((5, 7), torch.float32, 0)
    assert torch.equal(gelu(x), activation(x, "gelu"))
    assert torch.equal(gelu(x, approximate="tanh"), activation(x, "gelu_tanh"))
    assert torch.equal(relu(x), torch.relu(x))
    assert_close(silu_mul(x, x), torch.nn.functional.silu(x.double()) * x.double(), torch.float32)


@given(sizes(1, 2000), seeds)
def test_gelu_minus_its_mirror_is_identity(N, seed):
    x = make((N,), torch.float32, seed, scale=3.0)
    for approximate in ("none", "tanh"):
        assert_close(gelu(x, approximate) - gelu(-x, approximate), x.double(), torch.float32)


def test_activation_of_nothing():
    assert activation(torch.zeros(0, 3), "relu").shape == (0, 3)
    assert gated_activation(torch.zeros(2, 0), torch.zeros(2, 0), "silu").shape == (2, 0)


def test_activation_refuses_what_does_not_fit():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="act='swish' is not an activation - allowed: gelu"):
        activation(x, "swish")
    with pytest.raises(ValueError, match="act='none' is not an activation"):
        gated_activation(x, x, "none")
    with pytest.raises(ValueError, match="gate is"):
        gated_activation(x, torch.zeros(2, 7), "silu")
    with pytest.raises(ValueError, match="approximate='fast'"):
        gelu(x, approximate="fast")
