"""gemv against its reference, and the laws of a product over segments."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, layouts, make, make_weights, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import OPS, count_launches, gemv, gemv_ref

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


@given(rows, segments, st.sampled_from([34, 100]), seeds)
def test_gemv_of_segments_is_their_concatenation(M, counts, K, seed):
    x, w = make((M, K), torch.float32, seed), make_weights(counts, K, torch.float32, seed + 1)
    bias = (None, *(make((n,), torch.float32, seed + 9) for n in counts[1:]))
    parts = [gemv(x, segment, b) for segment, b in zip(w, bias, strict=True)]
    assert torch.equal(gemv(x, w, bias), torch.cat(parts, -1))


@given(rows, sizes(1, 150), inputs_K, seeds)
def test_gemv_is_linear(M, N, K, seed):
    x, (w,) = make((M, K), torch.float32, seed), make_weights((N,), K, torch.float32, seed + 1)
    y = gemv(x, w)
    assert torch.equal(gemv(x * 4, w), y * 4)
    assert_close(gemv(x, w, residual=y), 2 * y.double(), torch.float32)


@given(st.sampled_from([(torch.float32, 8), (torch.bfloat16, 2)]), sizes(1, 100), inputs_K, seeds)
def test_gemv_gives_a_row_the_same_alone_and_in_a_small_batch(limit, N, K, seed):
    dtype, M = limit
    x, (w,) = make((M, K), dtype, seed), make_weights((N,), K, dtype, seed + 1)
    assert torch.equal(gemv(x, w), torch.cat([gemv(row, w) for row in x.split(1)]))


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
