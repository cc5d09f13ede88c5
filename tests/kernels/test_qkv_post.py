"""qkv_post against its reference, and the laws of norms, rotations and places in a cache."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.test_rotary import table
from tests.strategies import DTYPES, assert_close, dtypes, make, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import OPS, Prologue, count_launches, qkv_post, qkv_post_ref, rms_norm, rotary

OP = next(op for op in OPS if op.name == "qkv_post")
few = sizes(1, 33)
# (batch, kv heads, query heads a kv head)
heads = st.sampled_from([(1, 1, 1), (2, 1, 3), (1, 3, 2), (3, 2, 4), (1, 1, 9)])
# (dtype, head dim, rotated entries or None, interleaved, has norms): each is a compiled kernel
VARIANTS = (
    (torch.float32, 64, 64, False, False),
    (torch.float32, 80, 32, False, True),
    (torch.float16, 64, 64, True, True),
    (torch.float16, 112, None, False, True),
    (torch.bfloat16, 64, 16, True, False),
    (torch.bfloat16, 64, 64, False, True),
)


def draw(counts, M, D, dtype, seed, spare=3):
    """Views q, k, v of one product, and two caches that are nan all over."""
    B, G, group = counts
    product = make((B * M, (group + 2) * G * D), dtype, seed, "sliced")
    q, k, v = (
        part.unflatten(-1, (-1, D)).unflatten(0, (B, M)).transpose(1, 2)
        for part in product.split((G * group * D, G * D, G * D), -1)
    )
    return q, k, v, *torch.full((2, B, G, M + spare, D), float("nan"), dtype=dtype)


def draw_prologue(variant, P, seed):
    dtype, D, R, interleaved, has_norms = variant
    cos, sin = (
        (None, None) if R is None else (x[0] for x in table(torch.arange(P) + seed % 99, R, interleaved))
    )
    weights = (make((D,), dtype, seed + 5), make((D,), dtype, seed + 6)) if has_norms else (None, None)
    return Prologue(*weights, 1e-5, 1.0 if interleaved else 0.0, cos, sin, interleaved)


@given(st.sampled_from(VARIANTS), heads, few, st.booleans(), seeds)
def test_qkv_post_matches_ref(variant, counts, M, is_padded, seed):
    q, k, v, *caches = draw(counts, M, variant[1], variant[0], seed)
    B, N = counts[0], M + 3
    prologue = draw_prologue(variant, N, seed)
    start = torch.randint(0, M + 1, (B, 1), generator=torch.Generator().manual_seed(seed))
    positions = (torch.arange(M) + seed % 4).expand(B, M)
    options = {"kv_range": torch.cat((start, start * 0 + N), 1).int()} if is_padded else {}
    expected = [x.double() for x in caches]
    arguments = (x.double() if x.is_floating_point() else x for x in (q, k, v, *expected, positions))
    wide = Prologue(*(x.double() if isinstance(x, torch.Tensor) else x for x in prologue))
    o = qkv_post_ref(*list(arguments)[:3], *expected, positions, wide, **options)
    with count_launches() as launches:
        actual = qkv_post(q, k, v, *caches, positions.int() if is_padded else positions, prologue, **options)
    assert launches == {"qkv_post": 1}
    for x, y, name in zip((actual, *caches), (o, *expected), ("q", "k_cache", "v_cache"), strict=True):
        assert torch.equal(x.isnan(), y.isnan()), f"{name} was written where it should not be, or not"
        assert_close(x.nan_to_num(), y.nan_to_num(), variant[0], name)


@given(dtypes, heads, few, st.sampled_from([(64, 64), (64, 16)]), st.booleans(), seeds)
def test_qkv_post_without_norm_is_rotary_and_a_copy(dtype, counts, M, head, interleaved, seed):
    D, R = head
    q, k, v, k_cache, v_cache = draw(counts, M, D, dtype, seed)
    prologue = draw_prologue((dtype, D, R, interleaved, False), M + 3, seed)
    rows = torch.randperm(M + 3, generator=torch.Generator().manual_seed(seed))[:M]
    o = qkv_post(q, k, v, k_cache, v_cache, rows.expand(counts[0], M), prologue)
    rotated = rotary(q, k, prologue.cos[None, rows], prologue.sin[None, rows], interleaved=interleaved)
    assert torch.equal(o, rotated[0])
    assert torch.equal(k_cache[:, :, rows], rotated[1])
    assert torch.equal(v_cache[:, :, rows], v)
    unused = [n for n in range(M + 3) if n not in rows]
    assert k_cache[:, :, unused].isnan().all()
    assert v_cache[:, :, unused].isnan().all()


@given(heads, few, seeds)
def test_qkv_post_without_rotation_is_rms_norm(counts, M, seed):
    q, k, v, k_cache, v_cache = draw(counts, M, 112, torch.float32, seed, spare=0)
    prologue = draw_prologue((torch.float32, 112, None, False, True), M, seed)
    o = qkv_post(q, k, v, k_cache, v_cache, torch.arange(M).expand(counts[0], M), prologue)
    for x, y, weight in ((q, o, prologue.q_weight), (k, k_cache, prologue.k_weight)):
        assert_close(y, rms_norm(x, weight, prologue.eps).double(), torch.float32)


@given(few, seeds)
def test_qkv_post_with_norm_ignores_the_scale_of_a_head(M, seed):
    variant = (torch.float32, 80, 32, False, True)
    q, k, v, k_cache, v_cache = draw((1, 2, 3), M, 80, torch.float32, seed, spare=0)
    prologue = draw_prologue(variant, M, seed)._replace(eps=0.0)
    positions = torch.arange(M)[None]
    o = qkv_post(q, k, v, k_cache, v_cache, positions, prologue)
    other = torch.empty_like(k_cache)
    assert_close(qkv_post(q * 8, k / 4, v, other, v_cache, positions, prologue), o.double(), torch.float32)
    assert_close(other, k_cache.double(), torch.float32)


def test_qkv_post_leaves_padding_out_of_the_cache():
    q, k, v, k_cache, v_cache = draw((2, 1, 2), 4, 64, torch.float32, 0, spare=1)
    prologue = draw_prologue(VARIANTS[0], 5, 0)
    positions = torch.tensor([[-1, 0, 1, 5], [0, 1, 2, 3]])
    kv_range = torch.tensor([[0, 9], [2, 3]], dtype=torch.int32)
    qkv_post(q, k, v, k_cache, v_cache, positions, prologue, kv_range=kv_range)
    written = ~v_cache.isnan().any(-1)[:, 0]
    assert written.tolist() == [[True, True, False, False, False], [False, False, True, False, False]]
    assert torch.equal(v_cache[0, :, :2], v[0, :, 1:3])
    # the first valid key stands at row 0 of the tables, where nothing turns
    assert torch.equal(k_cache[1, :, 2], k[1, :, 2])


def pack(lengths, counts, D, dtype, seed, spare=3):
    """Packed q, k, v of sequences of these lengths, two caches that are nan, rows and positions."""
    N, order = (
        max(lengths) + spare,
        torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)),
    )
    q, k, v, *_ = draw((1, *counts), sum(lengths), D, dtype, seed)
    caches = torch.full((2, len(lengths), counts[0], N, D), float("nan"), dtype=dtype)
    rows = order.repeat_interleave(torch.tensor(lengths))
    places = torch.cat([torch.arange(n) + seed % (spare + 1) for n in lengths])[None]
    return q, k, v, *caches, rows, places, order


@given(
    st.sampled_from(VARIANTS),
    st.sampled_from([(1, 1), (2, 3), (1, 9)]),
    st.lists(few | st.just(0), min_size=1, max_size=4).filter(any),
    st.booleans(),
    seeds,
)
def test_qkv_post_of_packed_tokens_is_qkv_post_one_by_one(variant, counts, lengths, is_padded, seed):
    q, k, v, k_cache, v_cache, rows, places, order = pack(lengths, counts, variant[1], variant[0], seed)
    B, N = k_cache.shape[0], k_cache.shape[2]
    prologue = draw_prologue(variant, N, seed)
    start = torch.randint(0, N, (B, 1), generator=torch.Generator().manual_seed(seed))
    kv_range = torch.cat((start, start * 0 + N - seed % 2), 1).int() if is_padded else None
    expected, caches = [], [k_cache.clone(), v_cache.clone()]
    for first, n, row in zip(
        torch.tensor([0, *lengths]).cumsum(0).tolist(), lengths, order.tolist(), strict=False
    ):
        mine = [x[:, :, first : first + n] for x in (q, k, v)] + [x[row : row + 1] for x in caches]
        valid = None if kv_range is None else kv_range[row : row + 1]
        expected.append(qkv_post(*mine, places[:, first : first + n], prologue, kv_range=valid))
    for op in (qkv_post, qkv_post_ref):
        actual = [k_cache.clone(), v_cache.clone()]
        rows = rows.int() if op is qkv_post_ref else rows
        with count_launches() as launches:
            o = op(q, k, v, *actual, places, prologue, rows=rows, kv_range=kv_range)
        assert launches == ({"qkv_post": 1} if op is qkv_post else {})
        pairs = zip((o, *actual), (torch.cat(expected, 2), *caches), ("q", "k_cache", "v_cache"), strict=True)
        for x, y, name in pairs:
            assert torch.equal(x.isnan(), y.isnan()), f"{name} was written where it should not be, or not"
            if op is qkv_post:
                assert torch.equal(x.nan_to_num(), y.nan_to_num()), name
            else:
                assert_close(x.nan_to_num(), y.nan_to_num().double(), variant[0], name)


@pytest.mark.parametrize("op", [qkv_post, qkv_post_ref])
def test_qkv_post_leaves_tokens_of_no_row_out_of_the_cache(op):
    q, k, v, *_ = draw((1, 1, 2), 5, 64, torch.float32, 0)
    k_cache, v_cache = torch.full((2, 3, 1, 4, 64), float("nan"))
    rows, places = torch.tensor([-1, 2, 3, 0, 2]).int(), torch.tensor([[0, 1, 0, 4, -1]])
    o = op(q, k, v, k_cache, v_cache, places, draw_prologue(VARIANTS[0], 4, 0), rows=rows)
    assert not o.isnan().any()
    assert (~v_cache.isnan().any(-1)[:, 0]).nonzero().tolist() == [[2, 1]]
    assert torch.equal(v_cache[2, :, 1], v[0, :, 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [{"BLOCK_H": 1}, {"BLOCK_H": 4}, {"BLOCK_H": 16}])
def test_qkv_post_is_right_in_every_configuration(config, dtype):
    q, k, v, *caches = draw((2, 3, 2), 5, 80, dtype, 0, spare=0)
    prologue = draw_prologue((dtype, 80, 32, True, True), 5, 0)
    positions = torch.arange(5).expand(2, 5)
    expected = truth(qkv_post_ref, q, k, v, *caches, positions, prologue)
    out = torch.empty(2, 5, 6, 80, dtype=dtype)
    with pin(OP, config):
        o = qkv_post(q, k, v, *caches, positions, prologue, out=out)
    assert o.data_ptr() == out.data_ptr()
    assert_close(o, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_qkv_post_of_nothing(dtype):
    q, k, v, *caches = draw((2, 1, 2), 3, 64, dtype, 0)
    prologue = draw_prologue(VARIANTS[0], 6, 0)
    empty = [x[:, :, :0] for x in (q, k, v)]
    o = qkv_post(*empty, *caches, torch.zeros(2, 0, dtype=torch.int64), prologue)
    assert o.shape == (2, 2, 0, 64)
    assert qkv_post(*(x[:0] for x in (q, k, v, *caches)), torch.zeros(0, 3).int(), prologue).shape[0] == 0


def test_qkv_post_refuses_what_does_not_fit():
    q, k, v, k_cache, v_cache = draw((2, 1, 2), 3, 64, torch.float32, 0)
    positions = torch.zeros(2, 3, dtype=torch.int64)
    prologue = draw_prologue(VARIANTS[0], 6, 0)
    with pytest.raises(ValueError, match=r"k, v, k_cache, v_cache, positions are \[\(2, 1, 2, 64\)"):
        qkv_post(q, k[:, :, :2], v, k_cache, v_cache, positions, prologue)
    with pytest.raises(ValueError, match="allowed: one dtype, and torch.int32 or torch.int64"):
        qkv_post(q, k, v, k_cache, v_cache, positions.float(), prologue)
    with pytest.raises(ValueError, match="allowed: 1 in the last dimension - lay the cache out"):
        qkv_post(q, k, v, k_cache.mT.contiguous().mT, v_cache, positions, prologue)
    with pytest.raises(ValueError, match=r"kv_range is \(2, 3\) torch.int32 - allowed: \(2, 2\) torch.int32"):
        qkv_post(q, k, v, k_cache, v_cache, positions, prologue, kv_range=torch.zeros(2, 3).int())
    for rows in (torch.zeros(3).int(), torch.zeros(2).int(), torch.zeros(3)):
        with pytest.raises(
            ValueError, match=r"rows are \(.,\) .* for q \(., 2, 3, 64\) - allowed: \(3,\) torch.int32"
        ):
            one = slice(0, 2 if rows.shape == (3,) and rows.dtype == torch.int32 else 1)
            qkv_post(q[one], k[one], v[one], k_cache, v_cache, positions[one], prologue, rows=rows)
    with pytest.raises(ValueError, match=r"out is \(2, 3, 2, 8\) torch.float32 - allowed: \(2, 3, 2, 64\)"):
        qkv_post(q, k, v, k_cache, v_cache, positions, prologue, out=torch.zeros(2, 3, 2, 8))
    with pytest.raises(ValueError, match=r"q_weight has shape \(8,\) - allowed: \(64,\), one for each entry"):
        qkv_post(q, k, v, k_cache, v_cache, positions, Prologue(torch.zeros(8)))
    with pytest.raises(ValueError, match="cos or sin is missing - allowed: both or none - pass both tables"):
        qkv_post(q, k, v, k_cache, v_cache, positions, Prologue(cos=torch.zeros(9, 64)))
    with pytest.raises(ValueError, match="cos rotates R=66 entries - allowed: even numbers up to D=64"):
        qkv_post(
            q, k, v, k_cache, v_cache, positions, Prologue(cos=torch.zeros(9, 66), sin=torch.zeros(9, 66))
        )
    with pytest.raises(ValueError, match=r"cos has shape \(1, 9, 8\), sin \(1, 9, 8\) - allowed: twice"):
        table = torch.zeros(1, 9, 8)
        qkv_post(q, k, v, k_cache, v_cache, positions, Prologue(cos=table, sin=table))
