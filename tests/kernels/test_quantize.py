"""quantize against its reference, and the laws of a code with one scale a group."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, layouts, make, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import OPS, count_launches, dequantize, quantize, quantize_ref

OP = next(op for op in OPS if op.name == "quantize")
# each is a compiled kernel: every value of every option, not every combination
VARIANTS = (
    (torch.float32, 8, True),
    (torch.float16, 8, False),
    (torch.bfloat16, 4, True),
    (torch.float32, 4, False),
)
variants = st.sampled_from(VARIANTS)
groups = st.sampled_from([None, 3, 8, 32])
SMALL = {"BLOCK_M": 4, "BLOCK_K": 32}


def halves(q):
    """The signed codes in the low and in the high halves of bytes."""
    return (q & 15).int() - 8, (q >> 4).int() - 8


def steps(scale, K, group, symmetric):
    """The scale of every entry of a row."""
    each = torch.arange(K) // min(group or K, K)
    return (scale if symmetric else scale[..., 0, :])[..., each].double()


def check(x, bits, symmetric, group):
    """Scales and codes of the reference; a code between two values may be either."""
    options = {"bits": bits, "symmetric": symmetric, "group": group}
    q, scale = quantize(x, **options)
    expected, expected_scale = truth(quantize_ref, x, **options)
    assert q.dtype == expected.dtype and q.shape == expected.shape
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale.double(), expected_scale, rtol=1e-5, atol=1e-6 * float(x.abs().max()))
    for actual, right in zip(halves(q), halves(expected), strict=True) if bits == 4 else ((q, expected),):
        assert (actual.int() - right.int()).abs().max() <= 1
    w = dequantize(q, scale, x.shape[-1], group=group).double()
    error = (w - x.double()).abs() / steps(scale, x.shape[-1], group, symmetric)
    assert error.max() <= 0.5 + 1e-4, "more than half a step"


@given(variants, sizes(1, 20), st.sampled_from([1, 7, 33, 100, 127, 300]), groups, layouts, seeds)
def test_quantize_matches_ref_within_half_a_step(variant, M, K, group, layout, seed):
    dtype, bits, symmetric = variant
    with pin(OP, SMALL), count_launches() as launches:
        check(make((2, M, K), dtype, seed, layout), bits, symmetric, group)
    assert launches == {"quantize": 1}


@given(variants, sizes(1, 9), seeds)
def test_quantize_in_its_own_configuration(variant, M, seed):
    dtype, bits, symmetric = variant
    for group in (None, 64):
        check(make((M, 576), dtype, seed, scale=1e-3), bits, symmetric, group)


@given(st.sampled_from([8, 4]), st.booleans(), st.integers(-20, 20), seeds)
def test_quantize_scales_with_its_rows(bits, symmetric, power, seed):
    x = make((5, 70), torch.float32, seed)
    with pin(OP, SMALL):
        q, scale = quantize(x, bits=bits, group=32, symmetric=symmetric)
        scaled, larger = quantize(x * 2.0**power, bits=bits, group=32, symmetric=symmetric)
    assert torch.equal(q, scaled) and torch.equal(scale * 2.0**power, larger)


@given(st.sampled_from([8, 4]), st.booleans(), seeds)
def test_quantize_of_groups_is_one_by_one(bits, symmetric, seed):
    x = make((5, 96), torch.float32, seed)
    with pin(OP, SMALL):
        q, scale = quantize(x, bits=bits, group=32, symmetric=symmetric)
        parts = [quantize(part, bits=bits, symmetric=symmetric) for part in x.split(32, -1)]
    assert torch.equal(q, torch.cat([p[0] for p in parts], -1))
    assert torch.equal(scale, torch.cat([p[1] for p in parts], -1))


@given(st.sampled_from([8, 4]), seeds)
def test_quantize_keeps_what_it_gave(bits, seed):
    with pin(OP, SMALL):
        q, scale = quantize(make((5, 96), torch.float32, seed), bits=bits, group=32)
        again = quantize(dequantize(q, scale, 96, group=32), bits=bits, group=32)
    assert torch.equal(again[0], q)
    torch.testing.assert_close(again[1], scale, rtol=1e-6, atol=0)


def test_quantize_stores_two_codes_a_byte_half_a_group_apart():
    x = torch.tensor([[-7.0, 1, 2, 3, 4, 5, 6, 7, -7]])
    q, scale = quantize(x, bits=4, group=5)
    assert scale.tolist() == [[1.0, 1.0]]
    low, high = halves(q)
    assert low.tolist() == [[-7, 1, 2, 5, 6, 7]]
    assert high.tolist() == [[3, 4, 0, -7, 0, 0]]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_u127_groups_of_zeros_and_of_the_smallest_numbers(bits, symmetric):
    x = make((6, 64), torch.float32, 0)
    x[0] = 0
    x[1, 16:32] = 0
    x[2] = 1e-42 * torch.arange(64)
    x[3] = torch.finfo(torch.float32).tiny
    x[4] = -0.0
    x[5] *= 1e38 / x[5].abs().max()
    q, scale = quantize(x, bits=bits, group=16, symmetric=symmetric)
    assert scale.isfinite().all() and (scale if symmetric else scale[:, 0]).min() > 0
    w = dequantize(q, scale, 64, group=16)
    assert torch.equal(w[0], x[0]) and torch.equal(w[1, 16:32], x[1, 16:32]) and torch.equal(w[4], x[0])
    error = (w.double() - x.double()).abs()
    assert (error <= steps(scale, 64, 16, symmetric) * 0.5001).all()


def test_quantize_keeps_a_constant_group():
    x = torch.full((2, 10), 3.7)
    for bits in (8, 4):
        q, scale = quantize(x, bits=bits, group=4, symmetric=False)
        assert torch.equal(dequantize(q, scale, 10, group=4), x)


TAILS = [(192, 128), (100, 64), (7, 8), (288, 256), (48, 48), (48, 24), (48, 16), (48, 7), (9, 1)]


@pytest.mark.parametrize("variant", VARIANTS[::3], ids=str)
@pytest.mark.parametrize("sizes", TAILS, ids=str)
def test_u128_groups_that_do_not_divide_the_columns(sizes, variant):
    (K, group), (dtype, bits, symmetric) = sizes, variant
    with pin(OP, SMALL):
        check(make((3, K), dtype, 0), bits, symmetric, group)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("config", [{"BLOCK_M": 1, "BLOCK_K": 16}, {"BLOCK_M": 8, "BLOCK_K": 128}], ids=str)
def test_quantize_is_right_in_every_configuration(config, variant):
    dtype, bits, symmetric = variant
    with pin(OP, config):
        for group in (None, 32):
            check(make((5, 100), dtype, 0), bits, symmetric, group)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_of_nothing(dtype):
    q, scale = quantize(make((0, 3, 7), dtype, 0), bits=4, group=4, symmetric=False)
    assert q.shape == (0, 3, 4) and scale.shape == (0, 3, 2, 2)


def test_quantize_refuses_what_it_cannot_store():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="bits=5 cannot be stored - allowed: 8 or 4 - pass one of these"):
        quantize(x, bits=5)
    with pytest.raises(ValueError, match="group=0 holds no column - allowed: 1 or more, None for whole rows"):
        quantize(x, group=0)
