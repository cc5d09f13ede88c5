"""layer_norm against its reference, and the laws of a normalisation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, dtypes, layouts, make, seeds, sizes, truth
from trinfer.kernels import count_launches, layer_norm, layer_norm_ref

# two powers of two above: one compiled kernel each
columns = st.sampled_from([33, 37, 48, 63, 64, 513, 577, 768, 1000, 1023, 1024])
affine = st.sampled_from(["both", "weight", "none"])


@given(dtypes, sizes(1, 70), columns, layouts, affine, st.booleans(), seeds)
def test_layer_norm_matches_ref(dtype, M, N, layout, parts, has_residual, seed):
    x = make((2, M, N), dtype, seed, layout)
    weight = None if parts == "none" else make((N,), dtype, seed + 1)
    bias = make((N,), dtype, seed + 2) if parts == "both" else None
    residual = make((2, M, N), dtype, seed + 3, "sliced") if has_residual else None
    with count_launches() as launches:
        result = layer_norm(x, weight, bias, 1e-5, residual=residual)
    assert launches == {"layer_norm": 1}
    y, h = result if has_residual else (result, x)
    assert torch.equal(h, x + residual if has_residual else x)
    assert_close(y, truth(layer_norm_ref, h, weight, bias, 1e-5), dtype)


@given(sizes(1, 9), columns, st.sampled_from([-20.0, 3.0, 20.0]), seeds)
def test_layer_norm_shift_invariant(M, N, shift, seed):
    x = make((M, N), torch.float32, seed) + shift
    # the truth of the shifted, rounded input: E[x²] - E[x]² would lose most digits of it here
    assert_close(layer_norm(x, None, None, 0.0), truth(layer_norm_ref, x, None, None, 0.0), torch.float32)


@given(sizes(2, 20), columns, seeds)
def test_layer_norm_permutes_with_batch(M, N, seed):
    x, weight = make((M, N), torch.float32, seed), make((N,), torch.float32, seed + 1)
    order = torch.randperm(M, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(layer_norm(x[order], weight, None, 1e-6), layer_norm(x, weight, None, 1e-6)[order])


@given(sizes(1, 9), columns, seeds)
def test_layer_norm_has_mean_zero_and_variance_one(M, N, seed):
    y = layer_norm(make((M, N), torch.float32, seed, scale=100.0), None, None, 0.0)
    assert y.mean(-1).abs().max() < 1e-6
    assert_close(y.square().mean(-1), torch.ones(M, dtype=torch.float64), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_of_constants_and_of_nothing(dtype):
    x, bias = torch.full((3, 64), 7.0, dtype=dtype), make((64,), dtype, 0)
    assert torch.equal(layer_norm(x, None, bias, 1e-5), bias.expand(3, 64))
    assert layer_norm(x[:0, None], None, bias, 1e-5).shape == (0, 1, 64)
    assert torch.equal(layer_norm(x[:, :1], None, bias[:1], 1e-5), bias[:1].expand(3, 1))


@given(dtypes, sizes(1, 40), columns, layouts, st.sampled_from([0.0, 1.0]), st.sampled_from("xan"), seeds)
def test_layer_norm_adds_behind_the_norm(dtype, M, N, layout, offset, place, seed):
    x, weight = make((M, N), dtype, seed, layout), make((N,), dtype, seed + 1)
    add = make((M, N), dtype, seed + 2, "sliced")
    bias = make((N,), dtype, seed + 4)
    expected = truth(layer_norm_ref, x, weight, bias, 1e-6, weight_offset=offset, add=add)
    # rows of a wider product, or memory that the launch itself reads
    out = {"x": x, "a": add, "n": make((M, 3 * N), dtype, seed)[:, N : 2 * N]}[place]
    out = out if out.stride(-1) == 1 and out.stride(0) >= N else None
    y = layer_norm(x, weight, bias, 1e-6, weight_offset=offset, add=add, out=out)
    assert out is None or y is out
    assert_close(y, expected, dtype)


def test_layer_norm_refuses_an_out_that_does_not_fit():
    x, weight = torch.zeros(3, 8), torch.ones(8)
    for out in (torch.zeros(3, 7), torch.zeros(3, 8).half(), torch.zeros(8, 3).t()):
        with pytest.raises(ValueError, match="out is"):
            layer_norm(x, weight, None, 1e-6, out=out)
    with pytest.raises(ValueError, match="out shares memory"):
        layer_norm(x[1:], weight, None, 1e-6, out=x[:2])
    with pytest.raises(ValueError, match="add is"):
        layer_norm(x, weight, None, 1e-6, add=x[:1])


def test_layer_norm_refuses_what_does_not_fit():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"weight has shape \(7,\) - allowed: \(8,\)"):
        layer_norm(x, torch.ones(7), None, 1e-5)
    with pytest.raises(ValueError, match=r"bias has shape \(1,\) - allowed: \(8,\)"):
        layer_norm(x, None, torch.ones(1), 1e-5)
    with pytest.raises(ValueError, match="residual is"):
        layer_norm(x, None, None, 1e-5, residual=torch.zeros(2, 8, dtype=torch.float16))
