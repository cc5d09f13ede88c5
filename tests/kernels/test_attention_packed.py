"""attention of queries without padding against attention of one sequence after the other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.test_attention import OP, SCORES, VARIANTS, draw, keys, mask_options, score_options
from tests.strategies import DTYPES, assert_close, layouts, make, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import attention, attention_ref, count_launches


def pack(lengths, counts, N, dtype, seed, layout="contiguous"):
    """Packed q of sequences of these lengths, k and v, a scale, and the ranges of queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    _, k, v, options = draw((len(lengths), *counts), 1, N, 64, dtype, seed, layout)
    q = make((1, counts[0] * counts[1], sum(lengths), 64), dtype, seed + 9, layout)
    ends = torch.tensor(lengths).cumsum(0)
    valid = [torch.randint(0, N + 1, (2,), generator=generator).sort().values for _ in lengths]
    options["q_range"] = torch.stack((ends - torch.tensor(lengths), ends), 1).int()
    options["kv_range"] = torch.stack(valid).int()
    options["max_queries"] = max(lengths) + seed % (sum(lengths) - max(lengths) + 1)
    return q, k, v, options


def one_by_one(q, k, v, q_range, kv_range, max_queries, **options):
    """The truth of each sequence on its own, as if its keys ended where the last valid one is."""
    parts = []
    for b, ((first, end), (start, last)) in enumerate(zip(q_range.tolist(), kv_range.tolist(), strict=True)):
        sequence = q[:, :, first:end], k[b : b + 1, :, :last], v[b : b + 1, :, :last]
        valid = torch.tensor([[start, last]], dtype=torch.int32)
        parts.append(truth(attention_ref, *sequence, kv_range=valid, **options))
    return torch.cat(parts, 1)


lengths = st.lists(sizes(0, 70), min_size=1, max_size=4).filter(any)


@given(st.sampled_from(VARIANTS), st.sampled_from([(1, 1), (2, 3), (1, 9)]), lengths, keys, layouts, seeds)
def test_attention_of_packed_queries_is_attention_one_by_one(variant, counts, lengths, N, layout, seed):
    dtype, mask, _ = variant
    q, k, v, options = pack(lengths, counts, N, dtype, seed, layout)
    options |= mask_options(mask)
    with count_launches() as launches:
        o = attention(q, k, v, **options)
    assert launches == {"attention": 1}
    assert o.shape == (1, sum(lengths), counts[0] * counts[1], 64)
    expected = one_by_one(q, k, v, **options)
    assert_close(o, expected, dtype)
    assert_close(truth(attention_ref, q, k, v, **options).to(dtype), expected, dtype)


@given(st.sampled_from(SCORES), st.sampled_from([(1, 1), (2, 3)]), lengths, keys, seeds)
def test_attention_of_packed_queries_with_other_scores(variant, counts, lengths, N, seed):
    dtype, mask, names = variant
    q, k, v, options = pack(lengths, counts, N, dtype, seed)
    options |= mask_options(mask) | score_options(names, counts[0] * counts[1], seed)
    assert_close(attention(q, k, v, **options), one_by_one(q, k, v, **options), dtype)


@pytest.mark.parametrize("lengths", [[1], [61, 1, 0, 130], [0, 7, 127], [16, 32, 64]])
def test_attention_of_packed_prompts_is_attention_of_padded_ones(lengths):
    B, M = len(lengths), max(lengths)
    padded, k, v, options = draw((B, 2, 2), M, M, 64, torch.float32, 0)
    options |= {"is_causal": True, "kv_range": torch.tensor([[M - n, M] for n in lengths], dtype=torch.int32)}
    q = torch.cat([padded[b : b + 1, :, M - n :] for b, n in enumerate(lengths)], 2)
    ends = torch.tensor(lengths).cumsum(0)
    q_range = torch.stack((ends - torch.tensor(lengths), ends), 1).int()
    for tile in ({}, {"BLOCK_M": 16, "BLOCK_N": 32, "PEELS": True}, {"BLOCK_M": 64, "PEELS": False}):
        with pin(OP, tile):
            expected = attention(padded, k, v, **options)
            o = attention(q, k, v, q_range=q_range, max_queries=M, **options)
        expected = torch.cat([expected[b : b + 1, M - n :] for b, n in enumerate(lengths)], 1)
        assert_close(o, expected.double(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_packed_queries_never_reads_keys_out_of_range(dtype):
    q, k, v, options = pack([5, 0, 31, 1], (2, 2), 40, dtype, 3)
    valid, places = options["kv_range"], torch.arange(40)
    hidden = (places < valid[:, :1]) | (places >= valid[:, 1:])
    poisoned = [x.masked_fill(hidden[:, None, :, None], float("nan")) for x in (k, v)]
    o = attention(q, k, v, is_causal=True, **options)
    assert torch.equal(attention(q, *poisoned, is_causal=True, **options), o)
    without = {name: value for name, value in options.items() if name != "kv_range"}
    full = options | {"kv_range": torch.tensor([[0, 40]] * 4, dtype=torch.int32)}
    o = attention(q, k, v, is_causal=True, **without)
    assert torch.equal(o, attention(q, k, v, is_causal=True, **full))


def test_attention_refuses_packed_queries_that_do_not_fit():
    q, k, v, options = pack([2, 1], (1, 2), 5, torch.float32, 0)
    options["is_causal"] = True
    with pytest.raises(ValueError, match="q_range is there, max_queries=None - allowed: both or none"):
        attention(q, k, v, **options | {"max_queries": None})
    with pytest.raises(ValueError, match="q_range is missing, max_queries=2 - allowed: both or none"):
        attention(q, k, v, **options | {"q_range": None, "max_queries": 2})
    with pytest.raises(
        ValueError, match=r"q is \(2, 2, 3, 64\), q_range \(2, 2\) torch.int32 - allowed: \[1,"
    ):
        attention(q.expand(2, -1, -1, -1), k, v, **options)
    with pytest.raises(
        ValueError, match=r"q_range \(1, 2\) torch.int32 - allowed: .* and \(2, 2\) torch.int32"
    ):
        attention(q, k, v, **options | {"q_range": options["q_range"][:1]})
    with pytest.raises(ValueError, match=r"q_range \(2, 2\) torch.int64 - allowed"):
        attention(q, k, v, **options | {"q_range": options["q_range"].long()})
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"max_queries={count} - allowed: 1 to 3, the queries of q"):
            attention(q, k, v, **options | {"max_queries": count})
    with pytest.raises(ValueError, match="q_range comes with bias - allowed: one of them"):
        attention(q, k, v, bias=torch.zeros(1, 1, 3, 5), **options)
    nothing = {"q_range": torch.zeros(2, 2, dtype=torch.int32), "max_queries": 0}
    assert attention(q[:, :, :0], k, v, **options | nothing).shape == (1, 0, 2, 64)
