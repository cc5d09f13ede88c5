"""gumbel against its reference, which has the same noise, and the distribution of what it samples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import dtypes, layouts, make, seeds, sizes
from trinfer.autotune import pin
from trinfer.kernels import OPS, count_launches, gumbel, gumbel_ref
from trinfer.kernels.gumbel import _philox

OP = next(op for op in OPS if op.name == "gumbel")
longs = st.integers(-(2**63), 2**63 - 1)
temperatures = st.sampled_from([0.01, 0.7, 1.0, 3.0])
# two powers of two above a quarter, and no multiple of 16: a compiled kernel each
columns = st.sampled_from([2, 3, 5, 61, 519, 1000, 1021])


def long(value):
    return torch.tensor([value])


def is_sample(logits, temperature, seed, offset, token):
    """Whether the token has the highest score: scores within float32's error of it count as equal."""
    expected = gumbel_ref(logits.double(), temperature, long(seed), long(offset))
    return (token == expected).float().mean() >= 0.99


@given(dtypes, sizes(1, 40), columns, layouts, temperatures, longs, longs, seeds)
def test_gumbel_matches_ref(dtype, M, V, layout, temperature, seed, offset, data):
    logits = make((2, M, V), dtype, data, layout)
    with count_launches() as launches:
        token = gumbel(logits, temperature, long(seed), long(offset))
    assert launches == {"gumbel": 1}
    assert token.dtype == torch.int64
    assert is_sample(logits, temperature, seed, offset, token)


def test_gumbel_reads_a_temperature_in_memory():
    logits = make((40, 1000), torch.float32, 0)
    for temperature in (0.01, 0.7, 3.0):
        token = gumbel(logits, torch.tensor([temperature]), long(5), long(6))
        assert torch.equal(token, gumbel(logits, temperature, long(5), long(6)))


def test_philox_gives_the_published_words():
    # known answers of Random123, kat_vectors: philox4x32 10
    zero, ones = [torch.tensor([0])] * 4, [torch.tensor([0xFFFFFFFF])] * 4
    pi = [torch.tensor([n]) for n in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    words = [[int(word) for word in _philox(key, c)] for key, c in ((0, zero), (2**64 - 1, ones))]
    assert words[0] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words[1] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    key = 0x299F31D0A4093822
    assert [int(word) for word in _philox(key, pi)] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def chi_square(counts, probabilities):
    """Distance of counts from their expectation, in standard deviations of a chi-square distribution."""
    expected = probabilities * counts.sum()
    freedom = len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("V", [5, 1000])
def test_gumbel_samples_the_softmax(V, temperature):
    logits = make((V,), torch.float32, V).expand(2000, V)
    tokens = [gumbel(logits, temperature, long(17), long(step)) for step in range(50)]
    counts = torch.bincount(torch.cat(tokens), minlength=V).double()
    # entries with few samples together
    order = torch.softmax(logits[0].double() / temperature, -1).sort(descending=True)
    kept = int((order.values * 1e5 >= 20).sum())
    counts, p = counts[order.indices], order.values
    if kept < V:
        counts = torch.cat([counts[:kept], counts[kept:].sum()[None]])
        p = torch.cat([p[:kept], p[kept:].sum()[None]])
    assert abs(chi_square(counts, p)) < 4


def test_gumbel_rows_and_steps_are_independent():
    # pairs of samples of a fair die with 8 faces: of two rows, of two steps, of two seeds
    logits = torch.zeros(4000, 8)
    draws = {
        (seed, step): gumbel(logits, 1.0, long(seed), long(step))
        for seed in (1, 2, 2**40 + 1)
        for step in (0, 1, 2**40)
    }
    pairs = [(draws[1, 0][:-1], draws[1, 0][1:])]
    pairs += [(draws[1, 0], other) for key, other in draws.items() if key != (1, 0)]
    for a, b in pairs:
        counts = torch.bincount(8 * a + b, minlength=64).double()
        assert abs(chi_square(counts, torch.full((64,), 1 / 64).double())) < 4


@given(sizes(2, 30), columns, longs, seeds)
def test_gumbel_samples_a_row_whatever_the_others_hold(M, V, seed, data):
    logits = make((M, V), torch.float32, data)
    changed = logits.clone()
    changed[1:] = make((M - 1, V), torch.float32, data + 1, scale=9.0)
    first = gumbel(logits, 1.0, long(seed), long(3))
    assert torch.equal(first[:1], gumbel(changed, 1.0, long(seed), long(3))[:1])
    assert torch.equal(first[:1], gumbel(logits[:1], 1.0, long(seed), long(3)))


@given(sizes(1, 9), columns, seeds)
def test_gumbel_of_a_low_temperature_is_the_argmax(M, V, data):
    logits = torch.randperm(M * V, generator=torch.Generator().manual_seed(data)).view(M, V).float()
    assert torch.equal(gumbel(logits, 1e-3, long(data), long(0)), logits.argmax(-1))


@given(sizes(1, 9), columns, seeds)
def test_gumbel_never_takes_what_is_masked(M, V, data):
    logits = make((M, V), torch.float32, data)
    allowed = torch.rand(M, V, generator=torch.Generator().manual_seed(data)) < 0.3
    allowed[:, V // 2] = True
    token = gumbel(logits.masked_fill(~allowed, float("-inf")), 1.0, long(data), long(0))
    assert allowed.gather(-1, token[:, None]).all()


def test_gumbel_gives_the_same_in_every_configuration():
    logits = make((6, 5000), torch.float32, 0)
    expected = gumbel(logits, 0.7, long(5), long(6))
    for block in (16, 256, 2048):
        with pin(OP, {"BLOCK_N": block}):
            assert torch.equal(gumbel(logits, 0.7, long(5), long(6)), expected)


def test_gumbel_of_one_word():
    assert gumbel(torch.zeros(3, 1), 1.0, long(0), long(0)).tolist() == [0, 0, 0]


def test_gumbel_leaves_its_scratch_ready():
    scratch, memory = torch.zeros(40, dtype=torch.int64), torch.full((20,), -1)
    for M in (20, 1, 7, 20):
        logits = make((M, 9000), torch.float32, M)
        token = gumbel(logits, 1.0, long(0), long(M), scratch=scratch, out=memory[:M])
        assert token.data_ptr() == memory.data_ptr()
        assert torch.equal(token, gumbel(logits, 1.0, long(0), long(M)))
        assert not scratch.any()


def test_gumbel_is_right_with_many_threads():
    logits, scratch = make((3, 20000), torch.float32, 0), torch.zeros(6, dtype=torch.int64)
    expected = [gumbel(logits, 1.0, long(0), long(step)) for step in range(10)]
    torch.set_num_threads(4)
    for step in range(200):
        token = gumbel(logits, 1.0, long(0), long(step % 10), scratch=scratch)
        assert torch.equal(token, expected[step % 10])


def test_gumbel_refuses_what_does_not_fit():
    logits = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="temperature=0 - allowed: above 0 - for 0 take their argmax"):
        gumbel(logits, 0, long(0), long(0))
    with pytest.raises(ValueError, match=r"seed is \(1,\) torch.int32 on cpu - allowed: one torch.int64"):
        gumbel(logits, 1.0, long(0).int(), long(0))
    with pytest.raises(ValueError, match=r"offset is \(2,\) torch.int64"):
        gumbel(logits, 1.0, long(0), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"temperature is \(1,\) torch.float64 on cpu - allowed: one torch.float32"
    ):
        gumbel(logits, torch.ones(1).double(), long(0), long(0))
    with pytest.raises(ValueError, match="logits have an empty last dimension"):
        gumbel(logits[:, :0], 1.0, long(0), long(0))
    with pytest.raises(ValueError, match=r"scratch is \(3,\)"):
        gumbel(logits, 1.0, long(0), long(0), scratch=torch.zeros(3, dtype=torch.int64))
    assert gumbel(logits[:0], 1.0, long(0), long(0)).shape == (0,)
