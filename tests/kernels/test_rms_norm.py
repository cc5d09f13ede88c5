"""rms_norm against its reference, and the laws of a normalisation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, dtypes, layouts, make, seeds, sizes, truth
from trinfer.kernels import count_launches, rms_norm, rms_norm_ref

# two powers of two above: one compiled kernel each
columns = st.sampled_from([33, 37, 47, 48, 63, 64, 513, 576, 577, 768, 1000, 1023, 1024])
casts = st.sampled_from([("input", 0.0), ("float32", 1.0)])


@given(dtypes, sizes(1, 70), columns, layouts, casts, st.booleans(), seeds)
def test_rms_norm_matches_ref(dtype, M, N, layout, cast, has_residual, seed):
    x, weight = make((2, M, N), dtype, seed, layout), make((N,), dtype, seed + 1)
    options = {"cast": cast[0], "weight_offset": cast[1]}
    if has_residual:
        options["residual"] = make((2, M, N), dtype, seed + 2, "sliced")
    with count_launches() as launches:
        result = rms_norm(x, weight, 1e-6, **options)
    assert launches == {"rms_norm": 1}
    if not has_residual:
        assert_close(result, truth(rms_norm_ref, x, weight, 1e-6, **options), dtype)
        return
    y, h = result
    assert torch.equal(h, x + options["residual"])
    assert_close(y, truth(rms_norm_ref, h, weight, 1e-6, cast=cast[0], weight_offset=cast[1]), dtype)


@given(sizes(1, 9), columns, st.sampled_from([0.25, 4.0, 1024.0]), seeds)
def test_rms_norm_scale_invariant(M, N, scale, seed):
    x, weight = make((M, N), torch.float32, seed), make((N,), torch.float32, seed + 1)
    assert torch.equal(rms_norm(x * scale, weight, 0.0), rms_norm(x, weight, 0.0))


@given(sizes(2, 20), columns, seeds)
def test_rms_norm_permutes_with_batch(M, N, seed):
    x, weight = make((M, N), torch.float32, seed), make((N,), torch.float32, seed + 1)
    order = torch.randperm(M, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(rms_norm(x[order], weight, 1e-6), rms_norm(x, weight, 1e-6)[order])


@given(sizes(1, 9), columns, seeds)
def test_rms_norm_has_unit_rms(M, N, seed):
    y = rms_norm(make((M, N), torch.float32, seed, scale=100.0), torch.ones(N), 0.0)
    assert_close(y.square().mean(-1), torch.ones(M, dtype=torch.float64), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_zeros_and_of_nothing(dtype):
    zeros, weight = torch.zeros(3, 64, dtype=dtype), torch.ones(64, dtype=dtype)
    assert torch.equal(rms_norm(zeros, weight, 1e-6), zeros)
    assert rms_norm(zeros[:0, None], weight, 1e-6).shape == (0, 1, 64)
    y = rms_norm(make((5, 1), dtype, 0), make((1,), dtype, 1), 1e-6)
    assert_close(y, truth(rms_norm_ref, make((5, 1), dtype, 0), make((1,), dtype, 1), 1e-6), dtype)


@given(sizes(1, 5), seeds)
def test_rms_norm_casts_where_the_family_casts(M, seed):
    # bfloat16 results differ in many places between the two orders, and each kernel follows its own
    x, weight = make((M, 576), torch.bfloat16, seed), make((576,), torch.bfloat16, seed + 1)
    for cast in ("input", "float32"):
        y, expected = (f(x, weight, 1e-6, cast=cast) for f in (rms_norm, rms_norm_ref))
        assert (y != expected).float().mean() < 0.01


@given(dtypes, sizes(1, 40), columns, layouts, st.sampled_from([0.0, 1.0]), st.sampled_from("xan"), seeds)
def test_rms_norm_adds_behind_the_norm(dtype, M, N, layout, offset, place, seed):
    x, weight = make((M, N), dtype, seed, layout), make((N,), dtype, seed + 1)
    add = make((M, N), dtype, seed + 2, "sliced")
    expected = truth(rms_norm_ref, x, weight, 1e-6, weight_offset=offset, add=add)
    # rows of a wider product, or memory that the launch itself reads
    out = {"x": x, "a": add, "n": make((M, 3 * N), dtype, seed)[:, N : 2 * N]}[place]
    out = out if out.stride(-1) == 1 and out.stride(0) >= N else None
    y = rms_norm(x, weight, 1e-6, weight_offset=offset, add=add, out=out)
    assert out is None or y is out
    assert_close(y, expected, dtype)


def test_rms_norm_refuses_an_out_that_does_not_fit():
    x, weight = torch.zeros(3, 8), torch.ones(8)
    for out in (torch.zeros(3, 7), torch.zeros(3, 8).half(), torch.zeros(8, 3).t()):
        with pytest.raises(ValueError, match="out is"):
            rms_norm(x, weight, 1e-6, out=out)
    with pytest.raises(ValueError, match="out shares memory"):
        rms_norm(x[1:], weight, 1e-6, out=x[:2])
    with pytest.raises(ValueError, match="add is"):
        rms_norm(x, weight, 1e-6, add=x[:1])


def test_rms_norm_refuses_what_does_not_fit():
    x, weight = torch.zeros(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"weight has shape \(7,\) - allowed: \(8,\)"):
        rms_norm(x, torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match="residual is"):
        rms_norm(x, weight, 1e-6, residual=torch.zeros(1, 8))
    with pytest.raises(ValueError, match="cast='fp32' is unknown"):
        rms_norm(x, weight, 1e-6, cast="fp32")
    with pytest.raises(ValueError, match="rows of 65537 entries"):
        rms_norm(torch.zeros(1, 65537), torch.ones(65537), 1e-6)
