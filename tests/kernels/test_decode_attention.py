"""decode_attention against its reference, and the laws of a softmax over allowed keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.test_rotary import table
from tests.strategies import DTYPES, assert_close, dtypes, layouts, make, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import (
    OPS,
    Prologue,
    alibi_slopes,
    attention,
    count_launches,
    decode_attention,
    decode_attention_ref,
    qkv_post,
    split_scratch,
)

OP = next(op for op in OPS if op.name == "decode_attention")
keys = sizes(1, 300)
# (batch, kv heads, query heads a kv head); groups of 3 and 4 run the same kernel
heads = st.sampled_from([(1, 1, 3), (2, 1, 3), (1, 3, 4), (3, 2, 4), (2, 2, 3)])
# (head dim, query heads a kv head): each is a compiled kernel
shapes = st.sampled_from([(8, 1), (32, 6), (80, 1), (96, 4), (112, 7), (128, 5), (160, 8), (256, 2)])
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
@given(shapes, keys, seeds)
def test_decode_attention_of_every_head_dim(shape, N, seed):
    D, group = shape
    q, k, v, options = draw((2, 1, group), N, D, torch.float32, seed)
    o = decode_attention(q, k, v, **options)
    assert_close(o, truth(decode_attention_ref, q, k, v, **options), torch.float32)


@given(st.integers(1, 9), keys, seeds)
def test_decode_attention_shares_kv_heads_as_if_repeated(group, N, seed):
    q, k, v, options = draw((1, 2, group), N, 64, torch.float32, seed)
    with pin(OP, {"BLOCK_H": 1}):
        repeated = decode_attention(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), **options
        )
        assert torch.equal(decode_attention(q, k, v, **options), repeated)


@given(heads, st.booleans(), keys, st.integers(0, 20), seeds)
def test_decode_attention_reads_views_of_a_longer_cache(counts, is_alone, N, spare, seed):
    # the cache is laid out for more tokens than are valid, keys lie further apart than values; between is nan
    q, k, v, options = draw((*counts[:2], 1) if is_alone else counts, N, 64, torch.float32, seed)
    views = []
    for x, width in ((k, 80), (v, 64)):
        cache = torch.full((*x.shape[:2], N + spare, width), float("nan"))
        cache[:, :, :N, :64] = x
        views.append(cache[:, :, :N, :64])
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


# (dtype, head dim, rotated entries or None, interleaved, has norms, other options): each is a compiled kernel
STEPS = (
    (torch.float32, 64, 64, False, False, ()),
    (torch.float32, 80, 32, True, True, ("softcap", "window")),
    (torch.float16, 96, None, False, True, ("alibi",)),
    (torch.float16, 64, 16, False, False, ("sinks", "window")),
    (torch.bfloat16, 64, 64, False, True, ()),
    (torch.bfloat16, 128, 128, True, False, ("softcap", "sinks")),
)
SPLITS = ({}, {"SPLITS": 4, "BLOCK_N": 16}, {"SPLITS": 2, "BLOCK_H": 16})


def draw_step(variant, counts, N, seed):
    """q, a cache, and the new key and value as views of one product with q; the options of a fused step."""
    dtype, D, R, interleaved, has_norms, names = variant
    B, G, group = counts
    product = make((B, (group + 2) * G * D), dtype, seed, "sliced")
    parts = product.split((G * group * D, G * D, G * D), -1)
    q, *new = (part.unflatten(-1, (-1, 1, D)) for part in parts)
    caches = [make((B, G, N, D), dtype, seed + i, scale=0.7) for i in (1, 2)]
    cos, sin = (None, None) if R is None else (x[0] for x in table(torch.arange(N), R, interleaved))
    weights = (make((D,), dtype, seed + 5), make((D,), dtype, seed + 6)) if has_norms else (None, None)
    others = {"softcap": 2.5, "window": 37, "alibi": alibi_slopes(G * group)}
    others["sinks"] = make((G * group,), dtype, seed + 4)
    options = {name: others[name] for name in names}
    options["prologue"] = Prologue(*weights, 1e-5, 1.0 if R == 32 else 0.0, cos, sin, interleaved)
    return q, caches, tuple(new), options | {"sm_scale": 1.5 * D**-0.5}


@pytest.mark.parametrize(
    ("config", "variants"), [*zip(SPLITS, (STEPS, STEPS[::2], STEPS[1::2]), strict=True)]
)
@given(st.data(), heads, keys, seeds)
@settings(max_examples=20)
def test_decode_attention_of_a_new_token_matches_ref(config, variants, data, counts, N, seed):
    variant = data.draw(st.sampled_from(variants))
    dtype = variant[0]
    q, caches, new, options = draw_step(variant, counts, N, seed)
    options["kv_range"] = draw_range(counts[0], N, seed)
    expected = truth(decode_attention_ref, q, *caches, new=new, **options)
    right = [x.clone() for x in caches]
    decode_attention_ref(q, *right, new=new, **options)
    with pin(OP, config), count_launches() as launches:
        o = decode_attention(q, *caches, new=new, **options)
    assert launches == {"decode_attention": 1}
    assert_close(o, expected, dtype)
    assert_close(caches[0], right[0].double(), dtype, "k")
    assert torch.equal(caches[1], right[1])


@pytest.mark.parametrize("variant", STEPS)
def test_decode_attention_token_by_token_is_qkv_post_and_attention(variant):
    dtype, D, M, counts = *variant[:2], 19, (2, 2, 3)
    B, G, group = counts
    start = torch.tensor([0, 7])
    _, caches, _, options = draw_step(variant, counts, M, 0)
    q, k, v = (make((B, H, M, D), dtype, H, "transposed") for H in (G * group, G, G + 1))
    v = v[:, :G]
    prologue = options.pop("prologue")
    valid = torch.stack((start, torch.full((B,), M)), 1).int()
    whole = [torch.zeros_like(x) for x in caches]
    turned = qkv_post(q, k, v, *whole, torch.arange(M).expand(B, M), prologue, kv_range=valid)
    o = attention(turned, *whole, is_causal=True, kv_range=valid, **options)
    for m in range(M):
        valid[:, 1] = m + 1
        new = (k[:, :, m : m + 1], v[:, :, m : m + 1])
        step = decode_attention(
            q[:, :, m : m + 1], *caches, new=new, prologue=prologue, kv_range=valid, **options
        )
        assert_close(step, o[:, m : m + 1].double(), dtype, f"token {m}")
    for b in range(B):
        for x, y in zip(caches, whole, strict=True):
            assert_close(x[b, :, start[b] :], y[b, :, start[b] :].double(), dtype)


@given(shapes, sizes(1, 100), seeds)
def test_decode_attention_of_a_new_token_in_every_head_dim(shape, N, seed):
    D, group = shape
    q, caches, new, options = draw_step((torch.float32, D, D, False, True, ()), (2, 1, group), N, seed)
    expected = truth(decode_attention_ref, q, *caches, new=new, **options)
    assert_close(decode_attention(q, *caches, new=new, **options), expected, torch.float32)


@given(sizes(1, 60), sizes(1, 60), st.booleans(), seeds)
def test_decode_attention_depends_on_relative_positions_only(N, shift, interleaved, seed):
    variant = (torch.float32, 64, 64, interleaved, False, ())
    q, caches, new, options = draw_step(variant, (1, 2, 3), N, seed)
    prologue = options.pop("prologue")
    tables = [x[0] for x in table(torch.arange(N + shift), 64, interleaved)]
    results = []
    for first in (0, shift):
        # row n of a table that starts at `first` stands for position first + n
        rows = prologue._replace(cos=tables[0][first:], sin=tables[1][first:])
        cache = [torch.zeros_like(x) for x in caches]
        positions = torch.arange(N)[None]
        qkv_post(q.expand(-1, -1, N, -1), *caches, *cache, positions, rows)
        results.append(decode_attention(q, *cache, new=new, prologue=rows, **options))
    assert (results[0] - results[1]).abs().max() < 1e-4


@given(st.sampled_from([(2, 1, 3), (1, 2, 4)]), sizes(1, 300), st.sampled_from([3, 64]), seeds)
def test_decode_attention_split_changes_nothing_beyond_rounding(counts, N, splits, seed):
    q, caches, new, options = draw_step(STEPS[0], counts, N, seed)
    options["sinks"] = make((counts[1] * counts[2],), torch.float32, seed)
    options["kv_range"] = draw_range(counts[0], N, seed)
    whole = decode_attention(q, *caches, new=new, **options)
    scratch = split_scratch(counts[0], counts[1] * counts[2], 64)
    scratch[0].fill_(float("nan"))
    with pin(OP, {"SPLITS": splits, "BLOCK_N": 16}):
        for _ in range(3):
            o = decode_attention(q, *caches, new=new, scratch=scratch, **options)
            assert_close(o, whole.double(), torch.float32)
            assert not scratch[1].any(), "tickets are left over"


def test_decode_attention_tickets_hold_between_two_threads():
    q, caches, new, options = draw_step(STEPS[0], (2, 3, 2), 200, 0)
    scratch, out = split_scratch(2, 6, 64), torch.empty(2, 1, 6, 64)
    valid = torch.zeros(2, 2, dtype=torch.int32)
    options |= {"kv_range": valid, "scratch": scratch, "out": out}
    torch.set_num_threads(2)
    with pin(OP, {"SPLITS": 8, "BLOCK_N": 16, "BLOCK_H": 1}):
        for end in (1, 40, 200):
            valid[:, 1] = end
            expected = decode_attention(q, *caches, new=new, **options).clone()
            wrong = 0
            for _ in range(1000):
                out.fill_(float("nan"))
                decode_attention(q, *caches, new=new, **options)
                wrong += not torch.equal(out, expected)
            assert wrong == 0


@given(st.sampled_from(DTYPES[1:]), sizes(2, 4), keys, seeds)
def test_u033_decode_attention_keeps_a_row_from_its_neighbours(dtype, B, N, seed):
    variant = next(step for step in STEPS if step[0] == dtype)
    counts, others = (B, 2, 3), slice(1, None)
    q, caches, new, options = draw_step(variant, counts, N, seed)
    o = decode_attention(q, *(x.clone() for x in caches), new=new, **options)
    alone = [x[:1].clone() for x in (q, *caches, *new)]
    for x in (q, *caches, *new):
        x[others] = make(tuple(x[others].shape), dtype, seed + 7)
    changed = decode_attention(q, *caches, new=new, **options)
    assert torch.equal(changed[0], o[0])
    q, k, v, *new = alone
    single = decode_attention(q, k, v, new=tuple(new), **options)
    assert (single.float() - o[:1].float()).abs().max() <= 1e-5


@given(
    st.sampled_from([(torch.float32, ("softcap", "sinks")), (torch.bfloat16, ("alibi",))]), heads, keys, seeds
)
def test_decode_attention_with_other_scores_matches_ref(variant, counts, N, seed):
    dtype, names = variant
    q, k, v, options = draw(counts, N, 64, dtype, seed)
    _, _, _, others = draw_step((dtype, 64, None, False, False, names), counts, 1, seed)
    options |= {name: others[name] for name in names} | {"kv_range": draw_range(counts[0], N, seed)}
    assert_close(decode_attention(q, k, v, **options), truth(decode_attention_ref, q, k, v, **options), dtype)


def test_decode_attention_of_a_step_runs_nothing_but_its_kernel():
    q, caches, new, options = draw_step(STEPS[4], (2, 2, 3), 40, 0)
    scratch, out = split_scratch(2, 6, 64), torch.empty(2, 1, 6, 64, dtype=torch.bfloat16)
    options |= {
        "kv_range": torch.tensor([[0, 9], [3, 40]], dtype=torch.int32),
        "scratch": scratch,
        "out": out,
    }
    called = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            called.append(op)
            return op(*args, **(kwargs or {}))

    with pin(OP, {"SPLITS": 2}):
        decode_attention(q, *caches, new=new, **options)
        with Watch():
            decode_attention(q, *caches, new=new, **options)
    assert not called


def test_decode_attention_writes_where_it_is_told():
    q, caches, new, options = draw_step(STEPS[0], (1, 1, 2), 9, 0)
    out = torch.empty(1, 1, 2, 64)
    assert decode_attention(q, *caches, out=out, **options).data_ptr() == out.data_ptr()
    # a value with other strides than the key
    new = (new[0], new[1].expand(1, 1, 2, 64)[:, :, :1].clone())
    kept = [x.clone() for x in caches]
    options["kv_range"] = torch.tensor([[2, 6]], dtype=torch.int32)
    decode_attention(q, *caches, new=new, **options)
    assert torch.equal(caches[1][:, :, 5:6], new[1])
    others = [n for n in range(9) if n != 5]
    assert all(torch.equal(x[:, :, others], y[:, :, others]) for x, y in zip(caches, kept, strict=True))


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
    new = (torch.zeros(2, 3, 1, 8), torch.zeros(2, 3, 1, 8))
    with pytest.raises(
        ValueError, match=r"new is \(2, 3, 2, 8\) torch.float32, .* - allowed: \(2, 3, 1, 8\) and"
    ):
        decode_attention(q, k, v, new=(torch.zeros(2, 3, 2, 8), new[1]), **options)
    with pytest.raises(
        ValueError, match="new comes with bias - allowed: one of them - write the new key first"
    ):
        decode_attention(q, k, v, new=new, bias=torch.zeros(1, 1, 1, 5), **options)
    with pytest.raises(ValueError, match="allowed: 1 in the last dimension of a cache that takes a new key"):
        decode_attention(q, k.mT.contiguous().mT, v, new=new, **options)
    with pytest.raises(ValueError, match=r"out is \(2, 6, 8\) torch.float32 - allowed: \(2, 1, 6, 8\)"):
        decode_attention(q, k, v, out=torch.zeros(2, 6, 8), **options)
    with pytest.raises(ValueError, match="cos rotates R=6 entries - allowed: even numbers up to D=4"):
        table = torch.zeros(5, 6)
        prologue = Prologue(cos=table, sin=table)
        decode_attention(q[..., :4], k[..., :4], v, prologue=prologue, **options)
    with (
        pin(OP, {"SPLITS": 4}),
        pytest.raises(
            ValueError, match=r"scratch holds 240 and 12 entries - allowed: 480 and 12 or more for 4"
        ),
    ):
        decode_attention(q, k, v, scratch=split_scratch(2, 6, 8, 2), **options)


@settings(max_examples=20)
@given(dtypes, st.sampled_from([(3, 2), (4, 4), (2, 5)]), keys, st.booleans(), seeds)
def test_heads_in_runs_are_those_side_by_side(dtype, runs, N, is_shared, seed):
    (outer, inner), D = runs, 32
    # runs of queries between keys and values, as groups or shards of one projection hold them
    product = make((2, 1, outer, inner * 3, D), dtype, seed)
    q, k, v = (product[:, :, :, i * inner : (i + 1) * inner].movedim(1, -2) for i in range(3))
    if is_shared:
        q, k, v = (product[:, :, :, part].movedim(1, -2) for part in (slice(0, -2), -2, -1))
    flat = [x.flatten(1, 2).contiguous() if x.dim() > 4 else x.contiguous() for x in (q, k, v)]
    G = flat[1].shape[1]
    caches = make((2, 2, G, N, D), dtype, seed + 1)
    cos, sin = table(torch.arange(N), D, False)
    prologue = Prologue(cos=cos[0], sin=sin[0])
    results = []
    for queries, new in ((q, (k, v)), (flat[0], (flat[1], flat[2]))):
        keys_, values = caches.clone()
        o = decode_attention(queries, keys_, values, sm_scale=0.3, new=new, prologue=prologue)
        results.append((o, keys_, values))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)
    truth_ = decode_attention_ref(q, *caches.clone(), sm_scale=0.3, new=(k, v), prologue=prologue)
    assert_close(results[0][0], truth_.double(), dtype)
