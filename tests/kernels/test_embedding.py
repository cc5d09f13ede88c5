"""embedding against its reference, and what must never be read."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, TOLERANCE, assert_close, dtypes, make, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import OPS, Norm, Table, count_launches, embedding, embedding_ref

OP = next(op for op in OPS if op.name == "embedding")

columns = st.sampled_from([33, 37, 48, 64, 513, 576, 1000])


def draw_ids(shape, V, seed, dtype=torch.int64):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(
    dtypes,
    sizes(1, 50),
    sizes(1, 90),
    columns,
    st.sampled_from(["contiguous", "sliced"]),
    st.booleans(),
    seeds,
)
def test_embedding_matches_ref(dtype, M, V, N, layout, has_scale, seed):
    weight, ids = make((V, N), dtype, seed, layout), draw_ids((2, M), V, seed)
    scale = 7.75 if has_scale else 1.0
    with count_launches() as launches:
        y = embedding(ids, weight, scale=scale)
    assert launches == {"embedding": 1}
    assert_close(y, truth(embedding_ref, ids, weight, scale=scale), dtype)
    if not has_scale:
        assert torch.equal(y, weight[ids])


@given(sizes(1, 20), sizes(2, 20), seeds)
def test_embedding_takes_ids_of_any_stride_and_width(B, M, seed):
    weight, ids = make((31, 48), torch.float32, seed), draw_ids((B, M), 31, seed)
    assert torch.equal(embedding(ids[:, -1:], weight), weight[ids[:, -1:]])
    assert torch.equal(embedding(ids[:1].expand(4, -1), weight), weight[ids[:1].expand(4, -1)])
    assert torch.equal(embedding(ids.T.int(), weight), weight[ids.T])


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_of_foreign_ids_is_nan(dtype):
    weight = make((5, 48), dtype, 0)
    y = embedding(torch.tensor([4, 5, -1, 2**40, 0]), weight)
    assert torch.equal(y[[0, 4]], weight[[4, 0]])
    assert y[1:4].isnan().all()


# (dtype, which tables, norm, where positions come from): each is a compiled kernel
VARIANTS = (
    (torch.float32, "types positions", "layer", "ids"),
    (torch.float32, "positions", "none", "kv_range"),
    (torch.float32, "", "rms", "ids"),
    (torch.float16, "types", "rms", "ids"),
    (torch.float16, "positions", "layer without weight", "ids"),
    (torch.bfloat16, "types positions", "layer", "kv_range"),
    (torch.bfloat16, "types positions", "none", "ids"),
)


def draw_options(variant, shape, N, seed):
    """Tables and norm of a variant, and how many of the ids of types and positions are outside: none."""
    dtype, names, norm, where = variant
    weight, bias = make((N,), dtype, seed + 1), make((N,), dtype, seed + 2)
    options = {
        "norm": {
            "none": None,
            "rms": Norm(weight, weight_offset=1.0),
            "layer": Norm(weight, bias, 1e-5, "layer"),
            "layer without weight": Norm(None, None, 1e-5, "layer"),
        }[norm],
    }
    if "types" in names:
        options["types"] = Table(make((3, N), dtype, seed + 3), draw_ids(shape, 3, seed + 3, torch.int32))
    if "positions" in names and where == "ids":
        # the same for every sequence
        rows = draw_ids((1, *shape[1:]), 50, seed + 4)
        options["positions"] = Table(make((57, N), dtype, seed + 4, "sliced"), rows, offset=seed % 7)
    elif "positions" in names:
        first, length = (draw_ids((shape[0],), 50, seed + i, torch.int32) for i in (5, 6))
        kv_range = torch.stack((first, first + length), 1)
        options["positions"] = Table(make((57, N), dtype, seed + 4), kv_range=kv_range, offset=seed % 7)
    return options


@given(st.sampled_from(VARIANTS), sizes(1, 9), sizes(1, 20), columns, st.booleans(), seeds)
def test_embedding_with_more_tables_and_norm_matches_ref(variant, B, M, N, has_scale, seed):
    dtype = variant[0]
    shape = (B, M if variant[3] == "ids" else 1)
    weight, ids = make((31, N), dtype, seed), draw_ids(shape, 31, seed)
    options = draw_options(variant, shape, N, seed) | {"scale": 2.0 if has_scale else 1.0}
    with count_launches() as launches:
        y = embedding(ids, weight, **options)
    assert launches == {"embedding": 1}
    # the norm of a small difference would magnify the rounding of the sum: its truth starts from that
    norm = options.pop("norm")
    total = embedding_ref(ids, weight, **options)
    if norm is None:
        assert torch.equal(y, total)
    else:
        identity = torch.arange(total[..., 0].numel()).view(shape)
        assert_close(y, truth(embedding_ref, identity, total.flatten(0, 1), norm=norm), dtype)
    plain = [options[name] for name in ("types", "positions") if name in options]
    expected = weight[ids] * options["scale"]
    for table in plain:
        expected = expected + table.weight[table.rows(shape)]
    assert torch.equal(total, expected)


@given(dtypes, sizes(1, 9), st.sampled_from([33, 64, 513]), seeds)
def test_embedding_places_a_token_at_its_distance_from_the_first_key(dtype, B, N, seed):
    weight, table, ids = make((31, N), dtype, seed), make((40, N), dtype, seed + 1), draw_ids((B,), 31, seed)
    first, position = draw_ids((B,), 9, seed + 2), draw_ids((B,), 38, seed + 3)
    kv_range = torch.stack((first, first + position + 1), 1).int()
    y = embedding(ids, weight, positions=Table(table, kv_range=kv_range, offset=2))
    assert torch.equal(y, weight[ids] + table[position + 2])
    # a sequence without keys stands where its first key will
    kv_range[:, 1] = kv_range[:, 0]
    y = embedding(ids[:, None], weight, positions=Table(table, kv_range=kv_range))
    assert torch.equal(y[:, 0], weight[ids] + table[0])


@given(dtypes, sizes(1, 5), sizes(1, 9), seeds)
def test_embedding_takes_table_ids_of_any_shape_that_fits(dtype, B, M, seed):
    weight, table, ids = (
        make((31, 48), dtype, seed),
        make((9, 48), dtype, seed + 1),
        draw_ids((B, M), 31, seed),
    )
    for shape in ((B, M), (1, M), (M,), (B, 1), (1, 1), ()):
        at = draw_ids(shape, 9, seed + 2)
        expected = weight[ids] + table[at.expand(B, M)]
        assert torch.equal(embedding(ids, weight, types=Table(table, at)), expected)
        assert torch.equal(
            embedding(ids.T, weight, types=Table(table, at.expand(B, M).T)), expected.transpose(0, 1)
        )
    assert torch.equal(embedding(ids, weight, types=Table(table, offset=3)), weight[ids] + table[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [None, Norm(None, None, 1e-5, "layer")])
def test_embedding_of_foreign_positions_is_nan(dtype, norm):
    weight, table, ids = make((5, 48), dtype, 0), make((4, 48), dtype, 1), torch.tensor([0, 1, 2, 3, 9])
    at = torch.tensor([0, 4, -1, 3, 2])
    y = embedding(ids, weight, types=Table(table), positions=Table(table, at), norm=norm)
    assert y.isnan().all(-1).tolist() == [False, True, True, False, True]
    assert not y[[0, 3]].isnan().any()
    kv_range = torch.tensor([[0, 4], [0, 5], [3, 4], [0, 1], [0, 1]], dtype=torch.int32)
    y = embedding(ids, weight, positions=Table(table, kv_range=kv_range), norm=norm)
    assert y.isnan().all(-1).tolist() == [False, True, False, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["bert", "gpt2", "opt"])
def test_embedding_is_what_transformers_adds_up(model, dtype):
    modeling = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    torch.manual_seed(0)
    ids, at = draw_ids((2, 7), 31, 0), torch.arange(7)[None]
    if model == "bert":
        config = modeling.BertConfig(vocab_size=31, hidden_size=96, max_position_embeddings=19)
        layer = modeling.BertEmbeddings(config).to(dtype).eval()
        kinds, norm = draw_ids((2, 7), 2, 1), layer.LayerNorm
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
        expected = layer(ids, kinds)
        options = {
            "types": Table(layer.token_type_embeddings.weight, kinds),
            "positions": Table(layer.position_embeddings.weight, at),
            "norm": Norm(norm.weight, norm.bias, norm.eps, "layer"),
        }
        words = layer.word_embeddings
    elif model == "gpt2":
        words, places = (torch.nn.Embedding(n, 96, dtype=dtype) for n in (31, 19))
        expected, options = words(ids) + places(at), {"positions": Table(places.weight, at)}
    else:
        words = torch.nn.Embedding(31, 96, dtype=dtype)
        places = modeling.OPTLearnedPositionalEmbedding(19, 96).to(dtype)
        mask = (torch.arange(7) >= torch.tensor([[0], [3]])).long()
        expected = words(ids) + places(mask)
        # a decode step looks at the last token
        expected, ids = expected[:, -1:], ids[:, -1:]
        kv_range = torch.tensor([[0, 7], [3, 7]], dtype=torch.int32)
        options = {"positions": Table(places.weight, kv_range=kv_range, offset=places.offset)}
    with torch.inference_mode():
        y = embedding(ids, words.weight, **options)
    assert y.dtype == dtype
    limit = 1e-6 if dtype == torch.float32 else TOLERANCE[dtype][1]
    assert (y.float() - expected.float()).abs().max() <= limit * expected.float().abs().max()
    assert torch.equal(y, expected) or model == "bert"


def test_embedding_writes_where_it_is_told():
    weight, ids, memory = (
        make((5, 48), torch.float16, 0),
        draw_ids((2, 3), 5, 0),
        torch.zeros(2, 3, 48).half(),
    )
    y = embedding(ids, weight, out=memory)
    assert y.data_ptr() == memory.data_ptr()
    assert torch.equal(memory, weight[ids])
    with pytest.raises(
        ValueError, match=r"out is \(2, 3, 48\) torch.float32 .* - allowed: \(2, 3, 48\) torch.flo"
    ):
        embedding(ids, weight, out=memory.float())
    with pytest.raises(ValueError, match="out shares memory with an argument"):
        embedding(torch.zeros(5).long(), weight, out=weight.view(5, 48))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", OP.space)
def test_embedding_is_right_in_every_configuration(config, dtype):
    weight, ids = make((31, 513), dtype, 0), draw_ids((2, 3), 31, 0)
    options = draw_options((dtype, "types positions", "layer", "ids"), (2, 3), 513, 0)
    expected = embedding(ids, weight, **options)
    with pin(OP, config):
        assert_close(embedding(ids, weight, **options), expected.double(), dtype)


def test_embedding_of_nothing():
    assert embedding(torch.zeros(2, 0, dtype=torch.int64), torch.ones(3, 48)).shape == (2, 0, 48)


def test_embedding_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="ids are torch.float32"):
        embedding(torch.zeros(2), torch.ones(3, 48))
    with pytest.raises(ValueError, match=r"weight has shape \(3,\)"):
        embedding(torch.zeros(2, dtype=torch.int64), torch.ones(3))
    ids, weight = torch.zeros(2, 3, dtype=torch.int64), torch.ones(4, 48)
    with pytest.raises(
        ValueError, match=r"a table is \(4, 47\) torch.float32 - allowed: \[P, 48\] torch.float32"
    ):
        embedding(ids, weight, types=Table(weight[:, 1:]))
    with pytest.raises(ValueError, match=r"a table is \(4, 48\) torch.float16"):
        embedding(ids, weight, positions=Table(weight.half()))
    for at in (ids.float(), ids[:, :2], torch.zeros(1, 2, 3).int()):
        with pytest.raises(
            ValueError, match=r"ids of a table are .* broadcast to \(2, 3\), or kv_range instead"
        ):
            embedding(ids, weight, positions=Table(weight, at))
    kv_range = torch.zeros(6, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="ids of a table are .*, beside kv_range - allowed"):
        embedding(ids, weight, positions=Table(weight, ids, kv_range))
    with pytest.raises(ValueError, match=r"kv_range is \(2, 2\) torch.int32 - allowed: \(6, 2\) torch.int32"):
        embedding(ids, weight, positions=Table(weight, kv_range=kv_range[:2]))
    with pytest.raises(ValueError, match=r"weight has shape \(47,\) - allowed: \(48,\)"):
        embedding(ids, weight, norm=Norm(torch.ones(47)))
