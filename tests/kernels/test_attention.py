"""attention against its reference, and the laws of a softmax over allowed keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, dtypes, layouts, make, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import OPS, alibi_slopes, attention, attention_ref, count_launches, decode_attention

OP = next(op for op in OPS if op.name == "attention")
# a block of 16 queries
few = sizes(1, 16)
keys = sizes(1, 150)
# (batch, kv heads, query heads a kv head)
heads = st.sampled_from([(1, 1, 1), (2, 1, 3), (1, 3, 2), (3, 2, 4), (2, 2, 1), (1, 1, 9)])
masks = st.sampled_from(["none", "causal", "window", "both sides"])
# each is a compiled kernel: every value of every option, not every combination
VARIANTS = (
    (torch.float32, "causal", False),
    (torch.float32, "none", True),
    (torch.float32, "window", True),
    (torch.float32, "both sides", False),
    (torch.float16, "causal", True),
    (torch.float16, "none", False),
    (torch.bfloat16, "causal", False),
    (torch.bfloat16, "window", True),
)


def draw(counts, M, N, D, dtype, seed, layout="contiguous"):
    """Random q, k, v and a scale that keeps the softmax from being flat."""
    B, G, group = counts
    q = make((B, G * group, M, D), dtype, seed, layout)
    k, v = (make((B, G, N, D), dtype, seed + i, layout) for i in (1, 2))
    return q, k, v, {"sm_scale": 1.5 * D**-0.5}


def mask_options(mask, window=5):
    return {
        "none": {"is_causal": False},
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "window": window},
        "both sides": {"is_causal": False, "window": window},
    }[mask]


def draw_range(B, N, seed):
    """A valid range of keys a sequence, [B, 2] int32; some are empty."""
    return torch.randint(0, N + 1, (B, 2), generator=torch.Generator().manual_seed(seed)).int()


@given(st.sampled_from(VARIANTS), heads, few, keys, layouts, seeds)
def test_attention_matches_ref(variant, counts, M, N, layout, seed):
    dtype, mask, is_padded = variant
    q, k, v, options = draw(counts, M, N, 64, dtype, seed, layout)
    options |= mask_options(mask)
    if is_padded:
        options["kv_range"] = draw_range(counts[0], N, seed)
    with count_launches() as launches:
        o = attention(q, k, v, **options)
    assert launches == {"attention": 1}
    assert_close(o, truth(attention_ref, q, k, v, **options), dtype)


@given(st.sampled_from(VARIANTS[:1] + VARIANTS[-2:]), heads, sizes(33, 200), sizes(1, 300), layouts, seeds)
def test_attention_of_several_blocks_matches_ref(variant, counts, M, N, layout, seed):
    dtype, mask, is_padded = variant
    q, k, v, options = draw(counts, M, N, 64, dtype, seed, layout)
    options |= mask_options(mask, 70)
    if is_padded:
        options["kv_range"] = draw_range(counts[0], N, seed)
    assert_close(attention(q, k, v, **options), truth(attention_ref, q, k, v, **options), dtype)


@settings(max_examples=40)
@given(st.sampled_from([8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 256]), sizes(1, 33), keys, seeds)
def test_u015_attention_of_every_head_dim(D, M, N, seed):
    q, k, v, options = draw((1, 1, 2), M, N, D, torch.float32, seed)
    o = attention(q, k, v, is_causal=True, **options)
    assert_close(o, truth(attention_ref, q, k, v, is_causal=True, **options), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("D", "DV"), [(80, 80), (64, 40)])
def test_attention_never_writes_padded_lanes(D, DV, dtype):
    q, k, v = make((2, 4, 13, D), dtype, 0), make((2, 2, 40, D), dtype, 1), make((2, 2, 40, DV), dtype, 2)
    options = {"sm_scale": D**-0.5, "is_causal": True}
    assert_close(attention(q, k, v, **options), truth(attention_ref, q, k, v, **options), dtype)


@given(st.integers(1, 9), few, keys, seeds)
def test_attention_shares_kv_heads_as_if_repeated(group, M, N, seed):
    q, k, v, options = draw((1, 2, group), M, N, 64, torch.float32, seed)
    options["is_causal"] = True
    repeated = attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), **options)
    assert torch.equal(attention(q, k, v, **options), repeated)


@given(dtypes, heads, few, keys, st.booleans(), st.booleans(), seeds)
def test_attention_with_bias_matches_ref(dtype, counts, M, N, is_bool, has_batch, seed):
    q, k, v, options = draw(counts, M, N, 64, dtype, seed)
    B, G, group = counts
    shape = (B if has_batch else 1, 1 if has_batch else G * group, M, N)
    bias = make(shape, torch.float32 if dtype == torch.float16 else dtype, seed + 3)
    options |= {"is_causal": False, "bias": bias > -0.5 if is_bool else bias}
    assert_close(attention(q, k, v, **options), truth(attention_ref, q, k, v, **options), dtype)


def score_options(names, H, seed):
    """Those of alibi, softcap and sinks that `names` holds."""
    options = {
        "alibi": make((H,), torch.float32, seed).abs(),
        "softcap": 1.7,
        "sinks": make((H,), torch.float32, seed + 1),
    }
    return {name: options[name] for name in names}


# each is a compiled kernel
SCORES = (
    (torch.float32, "causal", ("alibi", "softcap", "sinks")),
    (torch.float32, "none", ("alibi",)),
    (torch.float16, "window", ("softcap",)),
    (torch.bfloat16, "causal", ("sinks",)),
    (torch.bfloat16, "both sides", ("alibi", "sinks")),
)


@given(st.sampled_from(SCORES), heads, sizes(1, 80), keys, seeds)
def test_attention_with_other_scores_matches_ref(variant, counts, M, N, seed):
    dtype, mask, names = variant
    q, k, v, options = draw(counts, M, N, 64, dtype, seed)
    options |= mask_options(mask) | score_options(names, counts[1] * counts[2], seed)
    options["kv_range"] = draw_range(counts[0], N, seed)
    assert_close(attention(q, k, v, **options), truth(attention_ref, q, k, v, **options), dtype)


@given(st.integers(1, 9), few, keys, seeds)
def test_attention_with_alibi_is_attention_with_its_bias(H, M, N, seed):
    q, k, v, options = draw((1, H, 1), M, N, 64, torch.float32, seed)
    slopes = alibi_slopes(H)
    bias = slopes[:, None, None] * (torch.arange(N) - torch.arange(N - M, N)[:, None])
    expected = attention(q, k, v, is_causal=False, bias=bias[None], **options).double()
    assert_close(attention(q, k, v, is_causal=False, alibi=slopes, **options), expected, torch.float32)


@given(st.integers(1, 4), few, keys, seeds)
def test_attention_with_sinks_is_attention_with_one_more_key_of_no_value(H, M, N, seed):
    q, k, v, options = draw((1, H, 1), M, N, 64, torch.float32, seed)
    sinks = make((H,), torch.float32, seed + 5, scale=3)
    bias = torch.cat((torch.zeros(1, H, 1, N), sinks[None, :, None, None]), -1)
    longer = [torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v)]
    expected = attention(q, *longer, is_causal=False, bias=bias, **options).double()
    assert_close(attention(q, k, v, is_causal=False, sinks=sinks, **options), expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_scores_that_change_nothing(dtype):
    q, k, v, options = draw((2, 2, 3), 13, 40, 64, dtype, 0)
    options["is_causal"] = True
    o = attention(q, k, v, **options)
    assert torch.equal(attention(q, k, v, alibi=torch.zeros(6), **options), o)
    assert torch.equal(attention(q, k, v, sinks=torch.full((6,), float("-inf")), **options), o)
    assert_close(attention(q, k, v, softcap=1e4, **options), o.double(), dtype)


def test_softcap_keeps_the_digits_of_every_score():
    # two keys: the bent score of the first, which its bias takes away again, and 0
    softcap, scores = 100.0, torch.cat((torch.logspace(-3, 0, 60), -torch.logspace(-3, 0, 60))) * 100
    M, D = len(scores), 16
    q, k, v = torch.zeros(1, 1, M, D), torch.zeros(1, 1, 2, D), torch.zeros(1, 1, 2, D)
    q[..., 0], k[..., 0, 0], v[..., 0, 0] = scores, 1, 1
    bent = softcap * torch.tanh(scores.double() / softcap)
    bias = torch.stack((-bent.float(), torch.zeros(M)), -1)[None, None]
    options = {"is_causal": False, "softcap": softcap, "sm_scale": 1.0}
    o = attention(q, k, v, bias=bias, **options)[0, :, 0, 0]
    expected = torch.sigmoid(bent + bias[0, 0, :, 0].double())
    # a score of up to 76 is rounded in units of 8e-6; a quarter of what it is off by comes through
    assert (o.double() - expected).abs().max() < 4e-6


def test_u027_alibi_slopes_of_any_head_count():
    six = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    assert alibi_slopes(6).tolist() == six
    assert alibi_slopes(4).tolist() == six[:4]
    twelve = [2.0 ** -(n + 1) for n in range(8)] + [2.0 ** -(n + 0.5) for n in range(4)]
    assert_close(alibi_slopes(12), torch.tensor(twelve, dtype=torch.float64), torch.float32)
    assert alibi_slopes(1).tolist() == [2.0**-8]
    assert alibi_slopes(2, max_bias=4.0).tolist() == [0.25, 0.0625]


@given(st.sampled_from(DTYPES[1:]), sizes(2, 4), few, keys, seeds)
def test_u033_attention_keeps_a_row_from_its_neighbours(dtype, B, M, N, seed):
    q, k, v, options = draw((B, 2, 3), M, N, 64, dtype, seed)
    options["is_causal"] = True
    o = attention(q, k, v, **options)
    others = [torch.cat((x[:1], make((B - 1, *x.shape[1:]), dtype, seed + 7))) for x in (q, k, v)]
    assert torch.equal(attention(*others, **options)[0], o[0])
    alone = attention(q[:1], k[:1], v[:1], **options)
    assert (alone.float() - o[:1].float()).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lowest", [float("-inf"), "min"])
def test_attention_reads_additive_masks_as_forbidden(dtype, lowest):
    q, k, v, options = draw((2, 1, 2), 11, 23, 64, dtype, 0)
    allowed = make((2, 1, 11, 23), torch.float32, 3) > -0.5
    allowed[1, :, 7] = False
    lowest = torch.finfo(dtype).min if lowest == "min" else lowest
    bias = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, lowest)
    o = attention(q, k, v, is_causal=False, bias=bias, **options)
    assert torch.equal(o, attention(q, k, v, is_causal=False, bias=allowed, **options))
    assert torch.equal(o[1, 7], torch.zeros(2, 64, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_of_a_fully_masked_row_is_zero(dtype, is_causal):
    q, k, v, options = draw((1, 1, 2), 8, 8, 16, dtype, 0)
    allowed = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    everything = attention(q, k, v, is_causal=is_causal, bias=allowed, **options)
    allowed[:, :, 5] = False
    o = attention(q, k, v, is_causal=is_causal, bias=allowed, **options)
    others = [m for m in range(8) if m != 5]
    assert torch.equal(o[:, 5], torch.zeros(1, 2, 16, dtype=dtype))
    assert torch.equal(o[:, others], everything[:, others])


@given(st.sampled_from(DTYPES[:2]), few, keys, seeds)
def test_attention_never_reads_keys_out_of_range(dtype, M, N, seed):
    q, k, v, options = draw((3, 2, 2), M, N, 64, dtype, seed)
    valid = draw_range(3, N, seed)
    hidden = (torch.arange(N) < valid[:, :1]) | (torch.arange(N) >= valid[:, 1:])
    poisoned = [x.masked_fill(hidden[:, None, :, None], float("nan")) for x in (k, v)]
    o = attention(q, k, v, is_causal=False, kv_range=valid, **options)
    assert torch.equal(attention(q, *poisoned, is_causal=False, kv_range=valid, **options), o)
    assert torch.equal(o[valid[:, 0] >= valid[:, 1]], torch.zeros_like(o[valid[:, 0] >= valid[:, 1]]))


@given(heads, few, seeds)
def test_attention_equals_decoding_token_by_token(counts, M, seed):
    q, k, v, options = draw(counts, M, M + 3, 64, torch.float32, seed)
    steps = [
        decode_attention(q[:, :, m : m + 1], k[:, :, : m + 4], v[:, :, : m + 4], **options) for m in range(M)
    ]
    assert_close(torch.cat(steps, 1), attention(q, k, v, is_causal=True, **options).double(), torch.float32)


@given(few, masks, seeds)
def test_attention_of_left_padding_is_attention_without_it(M, mask, seed):
    q, k, v, options = draw((2, 1, 2), M, M, 64, torch.float32, seed)
    options |= mask_options(mask)
    start = seed % M
    padded = attention(q, k, v, kv_range=torch.tensor([[0, M], [start, M]], dtype=torch.int32), **options)
    short = truth(attention_ref, *(x[1:, :, start:] for x in (q, k, v)), **options)
    assert_close(padded[:1], truth(attention_ref, *(x[:1] for x in (q, k, v)), **options), torch.float32)
    assert_close(padded[1:, start:], short, torch.float32)


@given(sizes(2, 6), few, keys, seeds)
def test_attention_permutes_with_batch(B, M, N, seed):
    q, k, v, options = draw((B, 1, 2), M, N, 64, torch.float32, seed)
    options["is_causal"] = True
    order = torch.randperm(B, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(
        attention(q[order], k[order], v[order], **options), attention(q, k, v, **options)[order]
    )


@given(few, keys, seeds)
def test_attention_of_constant_values_is_constant(M, N, seed):
    # the softmax of a row sums to 1
    q, k, v, options = draw((1, 1, 1), M, N, 64, torch.float32, seed)
    v.copy_(v[:, :, :1].clone())
    o = attention(q, k, v, is_causal=True, **options)
    seen = (torch.arange(N - M, N) >= 0)[None, :, None, None]
    assert_close(o, v.double()[:, :, :1].expand(1, 1, M, 64).transpose(1, 2) * seen, torch.float32)


@pytest.mark.parametrize(("mask", "tile"), [("none", (16, 32)), ("causal", (64, 16)), ("window", (32, 128))])
def test_attention_is_right_in_every_configuration(mask, tile):
    q, k, v, options = draw((2, 1, 2), 70, 90, 64, torch.float32, 0)
    options |= mask_options(mask, 30) | {"kv_range": torch.tensor([[0, 90], [21, 77]], dtype=torch.int32)}
    for peels in (False, True):
        with pin(OP, {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "PEELS": peels}):
            o = attention(q, k, v, **options)
        assert_close(o, truth(attention_ref, q, k, v, **options), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_nothing(dtype):
    q, k, v, options = draw((2, 1, 2), 3, 5, 64, dtype, 0)
    assert attention(q[:0], k[:0], v[:0], is_causal=True, **options).shape == (0, 3, 2, 64)
    assert attention(q[:, :, :0], k, v, is_causal=True, **options).shape == (2, 0, 2, 64)
    o = attention(q, k[:, :, :0], v[:, :, :0], is_causal=False, **options)
    assert torch.equal(o, torch.zeros(2, 3, 2, 64, dtype=dtype))


def test_attention_of_huge_scores_stays_finite():
    q, k, v, _ = draw((1, 1, 1), 9, 9, 64, torch.float32, 0)
    o = attention(q * 1e4, k * 1e4, v, sm_scale=1.0, is_causal=True)
    assert_close(o, truth(attention_ref, q * 1e4, k * 1e4, v, sm_scale=1.0, is_causal=True), torch.float32)


def test_attention_refuses_what_does_not_fit():
    q, k, v, options = draw((2, 3, 2), 3, 5, 8, torch.float32, 0)
    options["is_causal"] = True
    with pytest.raises(ValueError, match=r"q is \(2, 6, 3, 8\), k \(2, 3, 5, 8\), v \(2, 3, 4, 8\)"):
        attention(q, k, v[:, :, :4], **options)
    with pytest.raises(ValueError, match="with G dividing H"):
        attention(q[:, :5], k, v, **options)
    with pytest.raises(ValueError, match="q is torch.float32, k torch.float16"):
        attention(q, k.half(), v, **options)
    with pytest.raises(ValueError, match="window=0 lets nothing be seen"):
        attention(q, k, v, window=0, **options)
    with pytest.raises(ValueError, match=r"kv_range is \(2, 2\) torch.int64 - allowed: \(2, 2\) torch.int32"):
        attention(q, k, v, kv_range=torch.zeros(2, 2, dtype=torch.int64), **options)
    with pytest.raises(
        ValueError, match=r"bias has shape \(2, 5, 3, 5\) - allowed: \[2 or 1, 6 or 1, 3 or 1, 5\]"
    ):
        attention(q, k, v, bias=torch.zeros(2, 5, 3, 5), **options)
    with pytest.raises(ValueError, match="heads have 257 and 257 entries - allowed: up to 256"):
        attention(*(torch.zeros(1, 1, 1, 257),) * 3, **options)
    with pytest.raises(ValueError, match=r"alibi is \(5,\) torch.float32 - allowed: \(6,\) torch.float32"):
        attention(q, k, v, alibi=torch.zeros(5), **options)
    with pytest.raises(ValueError, match=r"sinks has shape \(5,\) - allowed: \(6,\), a logit a query head"):
        attention(q, k, v, sinks=torch.zeros(5), **options)
    with pytest.raises(ValueError, match="softcap=0.0 - allowed: above 0 - pass None"):
        attention(q, k, v, softcap=0.0, **options)
