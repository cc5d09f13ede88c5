"""softmax against its reference, and the laws of a distribution."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, dtypes, layouts, make, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import OPS, count_launches, softmax, softmax_ref

OP = next(op for op in OPS if op.name == "softmax")
# two powers of two above and rows longer than a block: one compiled kernel each
columns = st.sampled_from([33, 37, 48, 63, 64, 513, 577, 768, 1000, 1023, 1024, 16385, 20000])


@given(dtypes, sizes(1, 20), columns, layouts, seeds)
def test_softmax_matches_ref(dtype, M, N, layout, seed):
    x = make((2, M, N), dtype, seed, layout, scale=3.0)
    with count_launches() as launches:
        y = softmax(x)
    assert launches == {"softmax": 1}
    assert_close(y, truth(softmax_ref, x), dtype)


@given(sizes(1, 9), columns, st.integers(0, 3), seeds)
def test_softmax_rows_sum_to_one_or_are_masked(M, N, masked, seed):
    x = make((M, N), torch.float32, seed, scale=10.0)
    x[:, : N // 2] = float("-inf")
    x[:masked] = float("-inf")
    y = softmax(x)
    assert torch.equal(y[:masked], torch.zeros_like(y[:masked]))
    assert not y[:, : N // 2].any()
    assert_close(y[masked:].sum(-1), torch.ones(max(0, M - masked), dtype=torch.float64), torch.float32)


@given(sizes(1, 9), columns, st.sampled_from([-64.0, 8.0, 1024.0]), seeds)
def test_softmax_shift_invariant(M, N, shift, seed):
    # eighths: the shift rounds nothing away
    x = (make((M, N), torch.float32, seed, scale=4.0) * 8).round() / 8
    assert torch.equal(softmax(x + shift), softmax(x))


@pytest.mark.parametrize("block", [16, 64, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_is_right_in_every_configuration(block, dtype):
    x = make((7, 1000), dtype, 0, scale=3.0)
    x[0], x[1, :900], x[2, 100:] = float("-inf"), float("-inf"), float("-inf")
    with pin(OP, {"BLOCK_N": block}):
        assert_close(softmax(x), truth(softmax_ref, x), dtype)


@pytest.mark.parametrize("N", [3, 20000])
def test_softmax_of_extremes(N):
    x = torch.full((4, N), -3e38)
    x[0, -1], x[1, 0], x[2, 1] = 3e38, float("nan"), float("inf")
    y, expected = softmax(x), torch.softmax(x, -1)
    assert torch.equal(y.isnan(), expected.isnan())
    assert_close(y[[0, 3]], expected[[0, 3]].double(), torch.float32)


def test_softmax_of_nothing():
    assert softmax(torch.zeros(0, 3)).shape == (0, 3)
    assert softmax(torch.zeros(3, 0)).shape == (3, 0)
