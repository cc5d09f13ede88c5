"""matmul against its reference, and the laws of a product over segments."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, layouts, make, make_weights, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import OPS, Norm, count_launches, gemv, layer_norm, matmul, matmul_ref, rms_norm

OP = next(op for op in OPS if op.name == "matmul")
# blocks of 16 and of 128 rows
rows = sizes(1, 16) | sizes(65, 150)
inputs_K = st.sampled_from([1, 7, 13, 34, 71, 100, 576])
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
def test_matmul_matches_ref(variant, M, N, K, layout, seed):
    dtype, order, act = variant
    x, (w,) = make((2, M, K), dtype, seed, layout), make_weights((N,), K, dtype, seed + 1, order)
    options = {"act": act}
    if act != "none":
        options["bias"] = make((N,), dtype, seed + 2)
        options["residual"] = make((2, M, N), dtype, seed + 3, layout)
    with count_launches() as launches:
        y = matmul(x, w, **options)
    assert launches == {"matmul": 1}
    assert_close(y, truth(matmul_ref, x, w, **options), dtype)


@given(variants, rows, sizes(2, 150), st.sampled_from([34, 576]), seeds)
def test_matmul_gated_matches_ref(variant, M, N, K, seed):
    dtype, order, act = variant
    x, w = make((1, M, K), dtype, seed), make_weights((N, N), K, dtype, seed + 1, order)
    options = {"act": act, "gated": True}
    if act != "none":
        options["bias"] = (make((N,), dtype, seed + 4), None)
        options["residual"] = make((1, M, N), dtype, seed + 3)
    assert_close(matmul(x, w, **options), truth(matmul_ref, x, w, **options), dtype)


@given(rows, segments, st.sampled_from([34, 100]), st.sampled_from(["rows", "columns"]), seeds)
def test_matmul_of_segments_is_their_concatenation(M, counts, K, order, seed):
    x = make((M, K), torch.float32, seed)
    # columns: segments of unlike sizes have no stride in common
    w = tuple(make_weights((n,), K, torch.float32, seed + n, order)[0] for n in counts)
    bias = (None, *(make((n,), torch.float32, seed + 9) for n in counts[1:]))
    parts = [matmul(x, segment, b) for segment, b in zip(w, bias, strict=True)]
    assert torch.equal(matmul(x, w, bias), torch.cat(parts, -1))


@given(rows, sizes(1, 150), inputs_K, seeds)
def test_matmul_is_linear(M, N, K, seed):
    x, (w,) = make((M, K), torch.float32, seed), make_weights((N,), K, torch.float32, seed + 1)
    y = matmul(x, w)
    assert torch.equal(matmul(x * 4, w), y * 4)
    assert_close(matmul(x, w, residual=y), 2 * y.double(), torch.float32)


@given(sizes(2, 150), sizes(1, 100), inputs_K, seeds)
def test_matmul_permutes_with_batch(M, N, K, seed):
    x, (w,) = make((M, K), torch.float32, seed), make_weights((N,), K, torch.float32, seed + 1)
    order = torch.randperm(M, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(matmul(x[order], w), matmul(x, w)[order])


@given(sizes(1, 16), sizes(1, 100), inputs_K, seeds)
def test_matmul_agrees_with_gemv(M, N, K, seed):
    x, (w,) = make((M, K), torch.float32, seed), make_weights((N,), K, torch.float32, seed + 1)
    assert_close(matmul(x, w), gemv(x, w).double(), torch.float32)


# (dtype, gated, is_layer), with blocks of 16 and of 128 rows
NORMED = st.sampled_from(
    [(torch.float32, True, False), (torch.float32, False, True), (torch.bfloat16, False, True)]
)


@given(NORMED, st.sampled_from([1, 7, 16, 65, 128, 150]), st.sampled_from([2, 7, 33, 90]), seeds)
def test_matmul_of_normalised_rows_is_norm_then_matmul(variant, M, N, seed):
    (dtype, gated, is_layer), K = variant, 100
    x, w = make((M, K), dtype, seed), make_weights((N,), K, dtype, seed + 1) * (1 + gated)
    weight, bias = make((K,), dtype, seed + 5), make((K,), dtype, seed + 6)
    norm, normalised = Norm(weight), rms_norm(x, weight, 1e-6)
    if is_layer:
        norm, normalised = Norm(weight, bias, 1e-5, "layer"), layer_norm(x, weight, bias, 1e-5)
    options = {"act": "silu", "gated": gated, "residual": make((M, N), dtype, seed + 3)}
    with count_launches() as launches:
        y = matmul(x, w, norm=norm, **options)
    assert launches == {"matmul": 1}
    assert_close(y, matmul(normalised, w, **options).double(), dtype)
    if dtype == torch.float32:
        assert_close(y, truth(matmul_ref, x, w, norm=norm, **options), dtype)


@pytest.mark.parametrize("config", [(16, 32, 32), (128, 64, 64), (32, 128, 16)])
def test_matmul_is_right_in_every_configuration(config):
    tile = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), config, strict=True))
    x, w = make((150, 71), torch.float32, 0), make_weights((90, 17), 71, torch.float32, 1)
    for group in (1, 8):
        with pin(OP, {**tile, "GROUP_M": group}):
            assert_close(matmul(x, w), truth(matmul_ref, x, w), torch.float32)
    norm = Norm(make((71,), torch.float32, 2))
    with pin(OP, tile):
        assert_close(matmul(x, w, norm=norm), truth(matmul_ref, x, w, norm=norm), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_of_nothing(dtype):
    x, w = make((2, 3, 7), dtype, 0), make((5, 7), dtype, 1)
    assert matmul(x[:0], w).shape == (0, 3, 5)
    assert matmul(x, w[:0]).shape == (2, 3, 0)
    assert torch.equal(matmul(x[..., :0], w[:, :0]), torch.zeros(2, 3, 5, dtype=dtype))


def test_matmul_refuses_what_does_not_fit():
    x, w = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(
        ValueError, match=r"weight has shape \(8, 4\) - allowed: \(N, 8\) for this x - transpose it"
    ):
        matmul(x, w.T)
    with pytest.raises(ValueError, match="x is torch.float32, weight torch.float16"):
        matmul(x, w.half())
    with pytest.raises(ValueError, match=r"bias has shape \(8,\) - allowed: \(4,\)"):
        matmul(x, w, torch.zeros(8))
    with pytest.raises(ValueError, match="bias has 1 entries - allowed: 2"):
        matmul(x, (w, w), torch.zeros(4))
    with pytest.raises(ValueError, match="weight has 4 segments - allowed: 1 to 3"):
        matmul(x, (w, w, w, w))
    with pytest.raises(ValueError, match="weight has 1 segments - allowed: exactly 2"):
        matmul(x, w, gated=True)
    with pytest.raises(ValueError, match="strides"):
        matmul(x, (w, torch.zeros(8, 4).T))
    with pytest.raises(ValueError, match=r"residual is \(1, 4\) torch.float32 - allowed: \(2, 4\)"):
        matmul(x, w, residual=torch.zeros(1, 4))
    with pytest.raises(ValueError, match="act='swish'"):
        matmul(x, w, act="swish")


def test_matmul_writes_into_out_and_nothing_around_it():
    x, (w,) = make((20, 48), torch.float32, 0), make_weights((33,), 48, torch.float32, 1)
    residual = make((20, 33), torch.float32, 2)
    around = torch.full((22, 33), 7.0)
    y = matmul(x, w, residual=residual, out=around[1:-1])
    expected = matmul(x, w, residual=residual)
    assert y.data_ptr() == around[1].data_ptr()
    assert torch.equal(y, expected)
    assert bool((around[[0, -1]] == 7.0).all())
    assert torch.equal(matmul(x, w, residual=residual, out=residual), expected)
    with pytest.raises(ValueError, match="out shares memory"):
        matmul(x, torch.eye(48), out=x)
