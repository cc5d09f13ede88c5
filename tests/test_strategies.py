"""The yardstick itself: it accepts rounding and rejects everything else."""

import pytest
import torch

from tests.strategies import DTYPES, LAYOUTS, assert_close, make, truth


@pytest.mark.parametrize("dtype", DTYPES)
def test_assert_close_accepts_rounding(dtype):
    expected = torch.randn(64, 33, dtype=torch.float64)
    assert_close(expected.to(dtype), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_assert_close_rejects_one_percent(dtype):
    expected = torch.randn(64, 33, dtype=torch.float64)
    with pytest.raises(AssertionError, match="RMS error"):
        assert_close((expected * 1.01).to(dtype), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [0.0, float("nan"), float("inf")])
def test_assert_close_names_the_first_bad_entry(dtype, wrong):
    expected = torch.ones(5, 7, dtype=torch.float64)
    actual = expected.to(dtype)
    actual[2, 3] = actual[4, 0] = wrong
    with pytest.raises(AssertionError, match=r"2 of 35 entries beyond it; first at \(2, 3\)"):
        assert_close(actual, expected, dtype)


def test_assert_close_asks_for_dtype_shape_and_infinities():
    x = torch.tensor([1.0, float("inf"), float("nan")], dtype=torch.float64)
    assert_close(x.float(), x, torch.float32)
    with pytest.raises(AssertionError, match="expected torch.float16"):
        assert_close(x, x, torch.float16)
    with pytest.raises(AssertionError, match="expected \\(2,\\)"):
        assert_close(x.float(), x[:2], torch.float32)
    with pytest.raises(AssertionError, match=r"first at \(1,\)"):
        assert_close(torch.tensor([1.0, -float("inf"), float("nan")]), x, torch.float32)


def test_assert_close_of_zeros_rejects_anything_but_zeros():
    zeros = torch.zeros(3, dtype=torch.float64)
    assert_close(zeros.float(), zeros, torch.float32)
    with pytest.raises(AssertionError):
        assert_close(zeros.float() + 1e-20, zeros, torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_make_puts_finite_numbers_into_nan_memory(layout):
    x = make((3, 4, 5), torch.float16, 0, layout)
    assert x.shape == (3, 4, 5)
    assert x.isfinite().all()
    assert x.untyped_storage().nbytes() > x.numel() * 2 or layout == "expanded"
    assert x.is_contiguous() == (layout == "contiguous")
    assert torch.equal(x, make((3, 4, 5), torch.float16, 0, layout))


def test_truth_computes_in_float64():
    assert truth(torch.add, torch.ones(2, dtype=torch.bfloat16), torch.ones(2)).dtype == torch.float64
