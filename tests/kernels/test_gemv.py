"""gemv against its reference, and the laws of a product over segments."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, layouts, make, make_weights, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import OPS, Norm, count_launches, gemv, gemv_ref, layer_norm, matmul, rms_norm

OP = next(op for op in OPS if op.name == "gemv")
rows = sizes(1, 16)
inputs_K = st.sampled_from([1, 7, 13, 34, 71, 100, 576, 1000])
# each is a compiled kernel: every value of every option, not every combination
VARIANTS = (
    (torch.float32, "rows", "none"),
    (torch.float32, "gaps", "gelu"),
    (torch.float32, "columns", "none"),
    (torch.float16, "rows", "relu"),
    (torch.float16, "columns", "silu"),
    (torch.bfloat16, "rows", "gelu_tanh"),
    (torch.bfloat16, "gaps", "none"),
)
variants = st.sampled_from(VARIANTS)
# sizes of two and of three segments
segments = st.sampled_from([(70, 5), (9, 33), (130, 65, 7), (65, 130, 9)])


@given(variants, rows, sizes(1, 200), inputs_K, layouts, seeds)
def test_gemv_matches_ref(variant, M, N, K, layout, seed):
    dtype, order, act = variant
    x, (w,) = make((1, M, K), dtype, seed, layout), make_weights((N,), K, dtype, seed + 1, order)
    options = {"act": act}
    if act != "none":
        options["bias"] = make((N,), dtype, seed + 2)
        options["residual"] = make((1, M, N), dtype, seed + 3, layout)
    with count_launches() as launches:
        y = gemv(x, w, **options)
    assert launches == {"gemv": 1}
    assert_close(y, truth(gemv_ref, x, w, **options), dtype)


@given(variants, rows, sizes(2, 150), st.sampled_from([34, 576]), seeds)
def test_gemv_gated_matches_ref(variant, M, N, K, seed):
    dtype, order, act = variant
    x, w = make((1, M, K), dtype, seed), make_weights((N, N), K, dtype, seed + 1, order)
    options = {"act": act, "gated": True}
    if act != "none":
        options["bias"] = (make((N,), dtype, seed + 4), None)
        options["residual"] = make((1, M, N), dtype, seed + 3)
    assert_close(gemv(x, w, **options), truth(gemv_ref, x, w, **options), dtype)


# of a single output, residual and products may cancel: then no relative bound holds
@given(variants, rows, sizes(8, 150), st.sampled_from([(34, 100), (576, 71), (100, 2000)]), seeds)
def test_gemv_of_two_inputs_matches_ref(variant, M, N, columns, seed):
    dtype, order, act = variant
    K, L = columns
    x, second = make((1, M, K), dtype, seed, "sliced"), make((1, M, L), dtype, seed + 1)
    (w,), (u,) = make_weights((N,), K, dtype, seed + 2, order), make_weights((N,), L, dtype, seed + 3, order)
    bias = None if act == "none" else make((N,), dtype, seed + 4)
    options = {"also": (second, u, bias), "bias": bias, "residual": make((1, M, N), dtype, seed + 5)}
    expected = truth(gemv_ref, x, w, **options)
    with count_launches() as launches:
        y = gemv(x, w, **options, out=options["residual"])
    assert launches == {"gemv": 1}
    assert_close(y, expected, dtype)


@pytest.mark.parametrize("M", [1, 8, 16])
@pytest.mark.parametrize("gated", [False, True])
def test_gemv_of_very_long_rows(M, gated):
    """28672: the MLP of Llama-3-70B."""
    x = make((M, 28672), torch.float32, 0)
    w = (
        make_weights((40, 40), 28672, torch.float32, 1)
        if gated
        else make_weights((40,), 28672, torch.float32, 1)[0]
    )
    norm = Norm(make((28672,), torch.float32, 2))
    options = {"gated": gated, "norm": norm}
    assert_close(gemv(x, w, **options), truth(gemv_ref, x, w, **options), torch.float32)


@pytest.mark.parametrize("op", [gemv, matmul])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [1, 5, 16])
def test_products_are_scaled_before_the_residual(op, dtype, M):
    x, (w,) = make((M, 100), dtype, 0), make_weights((70,), 100, dtype, 1)
    options = {"bias": make((70,), dtype, 2), "residual": make((M, 70), dtype, 3), "scale": 0.22}
    assert_close(op(x, w, **options), truth(gemv_ref, x, w, **options), dtype)


def test_gemv_refuses_a_second_input_that_does_not_fit():
    x, w = torch.zeros(2, 8), torch.zeros(4, 8)
    good = (torch.zeros(2, 6), torch.zeros(4, 6), None)
    assert gemv(x, w, also=good).shape == (2, 4)
    for also in (
        (torch.zeros(3, 6), *good[1:]),
        (good[0], torch.zeros(5, 6), None),
        (good[0], torch.zeros(6, 4).t(), None),
        (good[0], good[1], torch.zeros(5)),
        (good[0], good[1].half(), None),
    ):
        with pytest.raises(ValueError, match="also holds rows"):
            gemv(x, w, also=also)
    for options in ({"act": "relu"}, {"norm": Norm(torch.ones(8))}):
        with pytest.raises(ValueError, match="also comes with"):
            gemv(x, w, also=good, **options)


@given(rows, segments, st.sampled_from([34, 100]), st.sampled_from(["rows", "columns"]), seeds)
def test_gemv_of_segments_is_their_concatenation(M, counts, K, order, seed):
    x = make((M, K), torch.float32, seed)
    # columns: segments of unlike sizes have no stride in common
    w = tuple(make_weights((n,), K, torch.float32, seed + n, order)[0] for n in counts)
    bias = (None, *(make((n,), torch.float32, seed + 9) for n in counts[1:]))
    parts = [gemv(x, segment, b) for segment, b in zip(w, bias, strict=True)]
    assert torch.equal(gemv(x, w, bias), torch.cat(parts, -1))


@given(rows, sizes(1, 150), inputs_K, seeds)
def test_gemv_is_linear(M, N, K, seed):
    x, (w,) = make((M, K), torch.float32, seed), make_weights((N,), K, torch.float32, seed + 1)
    y = gemv(x, w)
    assert torch.equal(gemv(x * 4, w), y * 4)
    assert_close(gemv(x, w, residual=y), 2 * y.double(), torch.float32)


@given(st.sampled_from(DTYPES), rows, sizes(1, 100), inputs_K, seeds)
def test_gemv_gives_a_row_the_same_alone_and_in_a_batch(dtype, M, N, K, seed):
    x, (w,) = make((M, K), dtype, seed), make_weights((N,), K, dtype, seed + 1)
    assert torch.equal(gemv(x, w), torch.cat([gemv(row, w) for row in x.split(1)]))


# (dtype, rows, order, gated, norm): one row over the whole of it and over blocks, some rows, a tile of rows
NORMED = st.sampled_from(
    [
        (torch.float32, 1, "rows", True, "rms_input"),
        (torch.float32, 7, "rows", False, "layer"),
        (torch.float32, 3, "columns", False, "rms_float32"),
        (torch.float32, 16, "rows", True, "bare"),
        (torch.bfloat16, 1, "rows", False, "rms_float32"),
        (torch.bfloat16, 2, "columns", False, "layer"),
        (torch.bfloat16, 16, "rows", False, "rms_input"),
        (torch.float16, 16, "gaps", True, "layer"),
    ]
)


def make_norm(kind, K, dtype, seed):
    """A norm of one of the kinds, and the kernel that does it alone."""
    weight, bias = make((K,), dtype, seed), make((K,), dtype, seed + 1)
    if kind == "bare":
        return Norm(None, None, 1e-5, "layer"), lambda x: layer_norm(x, None, None, 1e-5)
    if kind == "layer":
        return Norm(weight, bias, 1e-5, "layer"), lambda x: layer_norm(x, weight, bias, 1e-5)
    cast, offset = kind.removeprefix("rms_"), float(kind == "rms_float32")
    norm = Norm(weight, eps=1e-6, cast=cast, weight_offset=offset)
    return norm, lambda x: rms_norm(x, weight, 1e-6, cast=cast, weight_offset=offset)


@given(NORMED, sizes(2, 90), seeds)
def test_gemv_of_normalised_rows_is_norm_then_gemv(case, N, seed):
    dtype, rows, order, gated, kind = case
    K = 100
    x, w = make((rows, K), dtype, seed), make_weights((N,), K, dtype, seed + 1, order) * (1 + gated)
    norm, alone = make_norm(kind, K, dtype, seed + 5)
    options = {"act": "silu", "gated": gated, "residual": make((rows, N), dtype, seed + 3)}
    with count_launches() as launches:
        y = gemv(x, w, norm=norm, **options)
    assert launches == {"gemv": 1}
    # rounded as the norm's own kernel rounds: what remains is the order of sums in float32
    assert_close(y, gemv(alone(x), w, **options).double(), dtype)
    if dtype == torch.float32:
        assert_close(y, truth(gemv_ref, x, w, norm=norm, **options), dtype)


@given(st.sampled_from([1, 7, 16]), st.sampled_from([0.25, 4.0, 1024.0]), seeds)
def test_gemv_after_an_rms_norm_is_scale_invariant(M, scale, seed):
    x, w = make((M, 100), torch.float32, seed), make_weights((33,), 100, torch.float32, seed + 1)
    norm = Norm(make((100,), torch.float32, seed + 2), eps=0.0)
    assert torch.equal(gemv(x * scale, w, norm=norm), gemv(x, w, norm=norm))


@given(st.sampled_from([1, 7, 16]), st.sampled_from([-20.0, 20.0]), seeds)
def test_gemv_after_a_layer_norm_keeps_its_digits_far_from_zero(M, shift, seed):
    x, w = make((M, 100), torch.float32, seed) + shift, make_weights((33,), 100, torch.float32, seed + 1)
    norm = Norm(None, None, 0.0, "layer")
    assert_close(gemv(x, w, norm=norm), truth(gemv_ref, x, w, norm=norm), torch.float32)


@given(sizes(1, 16), sizes(1, 90), seeds)
def test_u029_gemv_writes_where_it_is_told_and_nowhere_else(M, N, seed):
    x, w = make((M, 100), torch.float32, seed), make_weights((N,), 100, torch.float32, seed + 1)
    residual = make((M, N), torch.float32, seed + 2)
    before, expected = residual.clone(), gemv(x, w, residual=residual)
    assert torch.equal(residual, before)
    around = torch.full((M + 2, N), 7.0)
    y = gemv(x, w, residual=residual, out=around[1:-1])
    assert y.data_ptr() == around[1:-1].data_ptr()
    assert torch.equal(y, expected)
    assert (around[[0, -1]] == 7).all()
    # the residual stream of a model may be updated in place
    assert torch.equal(gemv(x, w, residual=residual, out=residual), expected)
    assert torch.equal(residual, expected)


def test_gemv_refuses_an_out_that_does_not_fit():
    x, w = make((2, 8), torch.float32, 0), make((8, 8), torch.float32, 1)
    with pytest.raises(ValueError, match=r"out is \(2, 7\) torch.float32 .* - allowed: \(2, 8\)"):
        gemv(x, w, out=torch.empty(2, 7))
    with pytest.raises(
        ValueError, match=r"out is \(2, 8\) torch.float16 .* - allowed: \(2, 8\) torch.float32"
    ):
        gemv(x, w, out=torch.empty(2, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"strides \(1, 2\) - allowed"):
        gemv(x, w, out=torch.empty(8, 2).T)
    for shared in (x, w[:2], w.flatten()[4:20].view(2, 8)):
        with pytest.raises(ValueError, match="out shares memory with an argument - allowed: memory"):
            gemv(x, w, out=shared)
    stream = torch.zeros(3, 8)
    with pytest.raises(ValueError, match="out shares memory"):
        gemv(x, w, residual=stream[:2], out=stream[1:])


def test_gemv_refuses_a_norm_that_does_not_fit():
    x, w, ones = torch.zeros(2, 8), torch.zeros(4, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"weight has shape \(7,\) - allowed: \(8,\)"):
        gemv(x, w, norm=Norm(ones[:7]))
    with pytest.raises(ValueError, match="kind='batch' is unknown - allowed: 'rms', 'layer'"):
        gemv(x, w, norm=Norm(ones, kind="batch"))
    with pytest.raises(ValueError, match="norm of kind 'rms' has no weight"):
        gemv(x, w, norm=Norm(None))
    with pytest.raises(ValueError, match="norm of kind 'rms' has a bias"):
        gemv(x, w, norm=Norm(ones, ones))
    with pytest.raises(ValueError, match=r"norm of kind 'layer' has weight_offset=1.0"):
        gemv(x, w, norm=Norm(None, kind="layer", weight_offset=1.0))
    with pytest.raises(ValueError, match="cast='half' is unknown"):
        gemv(x, w, norm=Norm(ones, cast="half"))


CONFIGS = [
    {"BLOCK_M": 1, "BLOCK_N": 2, "BLOCK_K": 64, "SPANS_K": False},
    {"BLOCK_M": 1, "BLOCK_N": 16, "BLOCK_K": 32, "SPANS_K": False},
    {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "SPANS_K": False},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS)
def test_gemv_is_right_in_every_configuration(config, dtype):
    x = make((5, 100), dtype, 0)
    with pin(OP, config):
        w, b = make_weights((90, 17), 100, dtype, 1), (make((90,), dtype, 3), None)
        assert_close(gemv(x, w, b, act="relu"), truth(gemv_ref, x, w, b, act="relu"), dtype)
        w, b = make_weights((90, 90), 100, dtype, 1), (b[0], b[0])
        options = {"act": "silu", "gated": True, "residual": make((5, 90), dtype, 4)}
        assert_close(gemv(x, w, b, **options), truth(gemv_ref, x, w, b, **options), dtype)
        if dtype == torch.float32:
            norm = Norm(make((100,), dtype, 6), make((100,), dtype, 7), 1e-5, "layer")
            assert_close(gemv(x, w, norm=norm), truth(gemv_ref, x, w, norm=norm), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemv_of_nothing(dtype):
    x, w = make((2, 3, 7), dtype, 0), make((5, 7), dtype, 1)
    assert gemv(x[:0], w).shape == (0, 3, 5)
    assert gemv(x, w[:0]).shape == (2, 3, 0)


def test_gemv_refuses_what_does_not_fit():
    x, w = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(
        ValueError, match="x has 17 rows of 8 - allowed: up to 16 rows - call matmul for more"
    ):
        gemv(torch.zeros(17, 8), w)
    with pytest.raises(
        ValueError, match=r"weight has shape \(8, 4\) - allowed: \(N, 8\) for this x - transpose it"
    ):
        gemv(x, w.T)
    with pytest.raises(ValueError, match="x is torch.float32, weight torch.float16"):
        gemv(x, w.half())
    with pytest.raises(ValueError, match="act='swish'"):
        gemv(x, w, act="swish")


@pytest.mark.parametrize("K", [9216, 14336])
def test_gemv_of_rows_longer_than_a_block(K):
    # down projections of Gemma2 2B and Mixtral: the most rows a program takes would pass the limit of Triton
    x, (weight,) = make((1, K), torch.bfloat16, 0), make_weights((1024,), K, torch.bfloat16, 1)
    assert_close(gemv(x, weight), truth(gemv_ref, x, weight), torch.bfloat16)
