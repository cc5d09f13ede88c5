"""decode_attention against its reference, and the laws of a softmax over allowed keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, dtypes, layouts, make, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import OPS, attention, count_launches, decode_attention, decode_attention_ref

OP = next(op for op in OPS if op.name == "decode_attention")
keys = sizes(1, 300)
# (batch, kv heads, query heads a kv head)
heads = st.sampled_from([(1, 1, 1), (2, 1, 3), (1, 3, 2), (3, 2, 4), (2, 2, 1), (1, 1, 9)])
# (dtype, has a window, has a range of valid keys): each is a compiled kernel
VARIANTS = (
    (torch.float32, False, False),
    (torch.float32, True, True),
    (torch.float16, False, True),
    (torch.bfloat16, False, True),
    (torch.bfloat16, True, False),
)


def draw(counts, N, D, dtype, seed, layout="contiguous"):
    """Random q, k, v and a scale that keeps the softmax from being flat."""
    B, G, group = counts
    q = make((B, G * group, 1, D), dtype, seed, layout)
    k, v = (make((B, G, N, D), dtype, seed + i, layout) for i in (1, 2))
    return q, k, v, {"sm_scale": 1.5 * D**-0.5}


def draw_range(B, N, seed):
    """A valid range of keys a sequence, [B, 2] int32; some are empty."""
    return torch.randint(0, N + 1, (B, 2), generator=torch.Generator().manual_seed(seed)).int()


@given(st.sampled_from(VARIANTS), heads, keys, layouts, seeds)
def test_decode_attention_matches_ref(variant, counts, N, layout, seed):
    dtype, has_window, is_padded = variant
    q, k, v, options = draw(counts, N, 64, dtype, seed, layout)
    if has_window:
        options["window"] = 70
    if is_padded:
        options["kv_range"] = draw_range(counts[0], N, seed)
    with count_launches() as launches:
        o = decode_attention(q, k, v, **options)
    assert launches == {"decode_attention": 1}
    assert_close(o, truth(decode_attention_ref, q, k, v, **options), dtype)


@settings(max_examples=40)
@given(st.sampled_from([8, 32, 80, 96, 112, 128, 160, 256]), keys, seeds)
def test_decode_attention_of_every_head_dim(D, N, seed):
    q, k, v, options = draw((2, 1, 3), N, D, torch.float32, seed)
    o = decode_attention(q, k, v, **options)
    assert_close(o, truth(decode_attention_ref, q, k, v, **options), torch.float32)


@given(st.integers(1, 9), keys, seeds)
def test_decode_attention_shares_kv_heads_as_if_repeated(group, N, seed):
    q, k, v, options = draw((1, 2, group), N, 64, torch.float32, seed)
    repeated = decode_attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), **options)
    assert torch.equal(decode_attention(q, k, v, **options), repeated)


@given(heads, keys, st.integers(0, 20), seeds)
def test_decode_attention_reads_views_of_a_longer_cache(counts, N, spare, seed):
    # the cache is laid out for more tokens than are valid; what follows them is nan
    q, k, v, options = draw(counts, N, 64, torch.float32, seed)
    views = []
    for x in (k, v):
        cache = torch.full((*x.shape[:2], N + spare, 64), float("nan"))
        cache[:, :, :N] = x
        views.append(cache[:, :, :N])
    assert torch.equal(decode_attention(q, *views, **options), decode_attention(q, k, v, **options))


@given(dtypes, heads, keys, st.booleans(), seeds)
def test_decode_attention_with_bias_matches_ref(dtype, counts, N, is_bool, seed):
    q, k, v, options = draw(counts, N, 64, dtype, seed)
    bias = make((1, counts[1] * counts[2], 1, N), torch.float32, seed + 3)
    options["bias"] = bias > -0.5 if is_bool else bias
    assert_close(decode_attention(q, k, v, **options), truth(decode_attention_ref, q, k, v, **options), dtype)


@given(keys, seeds)
def test_decode_attention_never_reads_keys_out_of_range(N, seed):
    q, k, v, options = draw((3, 2, 2), N, 64, torch.float16, seed)
    valid = draw_range(3, N, seed)
    hidden = (torch.arange(N) < valid[:, :1]) | (torch.arange(N) >= valid[:, 1:])
    poisoned = [x.masked_fill(hidden[:, None, :, None], float("nan")) for x in (k, v)]
    o = decode_attention(q, k, v, kv_range=valid, **options)
    assert torch.equal(decode_attention(q, *poisoned, kv_range=valid, **options), o)
    assert not o[valid[:, 0] >= valid[:, 1]].any()


@given(sizes(2, 6), keys, seeds)
def test_decode_attention_permutes_with_batch(B, N, seed):
    q, k, v, options = draw((B, 1, 2), N, 64, torch.float32, seed)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(seed))
    shuffled = decode_attention(q[order], k[order], v[order], **options)
    assert torch.equal(shuffled, decode_attention(q, k, v, **options)[order])


@given(heads, keys, seeds)
def test_decode_attention_is_attention_of_the_last_query(counts, N, seed):
    q, k, v, options = draw(counts, N, 64, torch.float32, seed)
    whole = attention(q, k, v, is_causal=True, **options)
    assert_close(decode_attention(q, k, v, **options), whole.double(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_attention_is_right_when_a_group_shares_a_program(dtype):
    for group in (3, 17):
        q, k, v, options = draw((2, 2, group), 90, 80, dtype, 0)
        options["kv_range"] = torch.tensor([[0, 90], [21, 77]], dtype=torch.int32)
        with pin(OP, {"BLOCK_H": 16, "BLOCK_N": 32}):
            o = decode_attention(q, k, v, **options)
        assert_close(o, truth(decode_attention_ref, q, k, v, **options), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_attention_of_nothing(dtype):
    q, k, v, options = draw((2, 1, 2), 5, 64, dtype, 0)
    assert decode_attention(q[:0], k[:0], v[:0], **options).shape == (0, 1, 2, 64)
    o = decode_attention(q, k[:, :, :0], v[:, :, :0], **options)
    assert torch.equal(o, torch.zeros(2, 1, 2, 64, dtype=dtype))


def test_decode_attention_refuses_what_does_not_fit():
    q, k, v, options = draw((2, 3, 2), 5, 8, torch.float32, 0)
    with pytest.raises(ValueError, match="q holds 2 queries - allowed: 1 - call attention for more"):
        decode_attention(q.expand(2, 6, 2, 8), k, v, **options)
    with pytest.raises(ValueError, match="window=-1"):
        decode_attention(q, k, v, window=-1, **options)
