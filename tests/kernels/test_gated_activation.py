"""gated_activation against its reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import assert_close, dtypes, layouts, make, seeds, sizes, truth
from trinfer.kernels import activation, count_launches, gated_activation, gated_activation_ref, silu_mul

acts = st.sampled_from(["gelu", "gelu_tanh", "relu", "silu"])
columns = st.sampled_from([33, 37, 48, 63, 64, 1025, 1536, 2047, 3000, 4097])


@given(dtypes, acts, sizes(1, 40), columns, layouts, layouts, seeds)
def test_gated_activation_matches_ref(dtype, act, M, N, gate_layout, up_layout, seed):
    gate = make((2, M, N), dtype, seed, gate_layout, scale=3.0)
    up = make((2, M, N), dtype, seed + 1, up_layout)
    with count_launches() as launches:
        y = gated_activation(gate, up, act)
    assert launches == {"gated_activation": 1}
    assert_close(y, truth(gated_activation_ref, gate, up, act), dtype, magnitude=1.0)


@given(dtypes, sizes(1, 20), columns, seeds)
def test_gated_activation_reads_halves_in_place(dtype, M, N, seed):
    both = make((1, M, 2 * N), dtype, seed)
    gate, up = both.chunk(2, -1)
    assert torch.equal(silu_mul(gate, up), silu_mul(gate.clone(), up.clone()))


@given(dtypes, acts, sizes(1, 20), columns, seeds)
def test_gated_activation_rounds_the_activation_first(dtype, act, M, N, seed):
    gate, up = make((M, N), dtype, seed), make((M, N), dtype, seed + 1)
    assert torch.equal(gated_activation(gate, up, act), activation(gate, act) * up)


def test_gated_activation_of_nothing():
    assert gated_activation(torch.zeros(2, 0), torch.zeros(2, 0), "silu").shape == (2, 0)
    assert gated_activation(torch.zeros(0, 3), torch.zeros(0, 3), "silu").shape == (0, 3)


def test_gated_activation_refuses_what_does_not_fit():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="act='none' is not an activation"):
        gated_activation(x, x, "none")
    with pytest.raises(ValueError, match="gate is"):
        gated_activation(x, torch.zeros(2, 7), "silu")
