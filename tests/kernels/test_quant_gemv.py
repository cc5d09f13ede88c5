"""quant_gemv against its reference, and the laws of a product with codes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, layouts, make, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import (
    OPS,
    count_launches,
    dequantize,
    quant_gemv,
    quant_gemv_ref,
    quantize_ref,
)

OP = next(op for op in OPS if op.name == "quant_gemv")
rows = sizes(1, 16)
inputs_K = st.sampled_from([33, 100])
# each is a compiled kernel: every value of every option, not every combination
VARIANTS = (
    (torch.float32, {"bits": 8}, "none"),
    (torch.float16, {"bits": 8, "group": 32, "symmetric": False}, "silu"),
    (torch.bfloat16, {"bits": 4}, "gelu_tanh"),
    (torch.float32, {"bits": 4, "group": 64}, "relu"),
    (torch.bfloat16, {"bits": 4, "group": 32, "symmetric": False}, "none"),
)
variants = st.sampled_from(VARIANTS)
# sizes of two and of three segments
segments = st.sampled_from([(70, 5), (9, 33), (130, 65, 7)])


def make_codes(counts, K, kind, seed):
    """Segments of quantised weights [N_i, K]: their codes and their scales."""
    weights = [make((N, K), torch.float32, seed + i, scale=K**-0.5) for i, N in enumerate(counts)]
    parts = [quantize_ref(weight, **kind) for weight in weights]
    return tuple(p[0] for p in parts), tuple(p[1] for p in parts)


@given(variants, rows, sizes(1, 200), inputs_K, layouts, seeds)
def test_quant_gemv_matches_ref(variant, M, N, K, layout, seed):
    dtype, kind, act = variant
    x, ((w,), (s,)) = make((1, M, K), dtype, seed, layout), make_codes((N,), K, kind, seed + 1)
    options = {"act": act, "group": kind.get("group")}
    if act != "none":
        options["bias"] = make((N,), dtype, seed + 2)
        options["residual"] = make((1, M, N), dtype, seed + 3, layout)
    with count_launches() as launches:
        y = quant_gemv(x, w, s, **options)
    assert launches == {"quant_gemv": 1}
    assert_close(y, truth(quant_gemv_ref, x, w, s, **options), dtype)


@given(st.sampled_from(VARIANTS[1:4]), rows, sizes(2, 150), st.just(100), seeds)
def test_quant_gemv_gated_matches_ref(variant, M, N, K, seed):
    dtype, kind, act = variant
    x, (w, s) = make((1, M, K), dtype, seed), make_codes((N, N), K, kind, seed + 1)
    options = {"act": act, "gated": True, "group": kind.get("group")}
    if act != "none":
        options["bias"] = (make((N,), dtype, seed + 4), make((N,), dtype, seed + 5))
        options["residual"] = make((1, M, N), dtype, seed + 3)
    assert_close(quant_gemv(x, w, s, **options), truth(quant_gemv_ref, x, w, s, **options), dtype)


@given(sizes(1, 8), segments, st.just(100), seeds)
def test_quant_gemv_of_segments_is_their_concatenation(M, counts, K, seed):
    x, (w, s) = make((M, K), torch.float32, seed), make_codes(counts, K, VARIANTS[3][1], seed + 1)
    bias = (None, *(make((n,), torch.float32, seed + 9) for n in counts[1:]))
    parts = [quant_gemv(x, *segment, group=64) for segment in zip(w, s, bias, strict=True)]
    assert torch.equal(quant_gemv(x, w, s, bias, group=64), torch.cat(parts, -1))


@given(st.sampled_from([0, 4]), sizes(1, 8), sizes(1, 150), st.sampled_from([1, 576]), seeds)
def test_quant_gemv_is_linear_in_rows_and_scales(number, M, N, K, seed):
    kind = VARIANTS[number][1]
    x, ((w,), (s,)) = make((M, K), torch.float32, seed), make_codes((N,), K, kind, seed + 1)
    y = quant_gemv(x, w, s, group=kind.get("group"))
    assert torch.equal(quant_gemv(x * 4, w, s, group=kind.get("group")), y * 4)
    assert torch.equal(quant_gemv(x, w, s * 4, group=kind.get("group")), y * 4)


@given(rows, sizes(1, 60), st.just(100), seeds)
def test_quant_gemv_adds_zeros_to_every_weight(M, N, K, seed):
    kind = VARIANTS[4][1]
    x, ((w,), (s,)) = make((M, K), torch.float32, seed), make_codes((N,), K, kind, seed + 1)
    moved = s.clone()
    moved[:, 1] += 0.5
    expected = truth(quant_gemv_ref, x, w, s, group=32) + 0.5 * x.double().sum(-1, keepdim=True)
    assert_close(quant_gemv(x, w, moved, group=32), expected, torch.float32)


@given(st.sampled_from([(VARIANTS[0], 4), (VARIANTS[3], 2)]), sizes(1, 100), st.just(100), seeds)
def test_quant_gemv_gives_a_row_the_same_alone_and_in_a_small_batch(limit, N, K, seed):
    (dtype, kind, _), M = limit
    x, ((w,), (s,)) = make((M, K), dtype, seed), make_codes((N,), K, kind, seed + 1)
    alone = [quant_gemv(row, w, s, group=kind.get("group")) for row in x.split(1)]
    assert torch.equal(quant_gemv(x, w, s, group=kind.get("group")), torch.cat(alone))


@pytest.mark.parametrize("K", [4096, 16384])
def test_u124_large_sums_are_scaled_before_they_are_rounded(K):
    w, x = torch.full((5, K), 127, dtype=torch.int8), torch.full((1, K), 6.0, dtype=torch.float16)
    # the sum of codes is far beyond float16, the result is not
    scale = torch.full((5, 1), 1e-3 / 127)
    with pin(OP, {"BLOCK_M": 1, "BLOCK_N": 8, "BLOCK_K": 256, "SPANS_K": False}):
        y = quant_gemv(x, w, scale)
    assert_close(y, torch.full((1, 5), 6e-3 * K, dtype=torch.float64), torch.float16)


@pytest.mark.parametrize("number", [0, 3, 4])
def test_u127_zeros_give_exactly_the_bias(number):
    dtype, kind, _ = VARIANTS[number]
    weight = make((20, 100), torch.float32, 0)
    weight[3] = 0
    weight[4, 64:] = 0
    q, s = quantize_ref(weight, **kind)
    x, bias = make((2, 100), dtype, 1), make((20,), dtype, 2)
    x[0] = 0
    y = quant_gemv(x, q, s, bias, group=kind.get("group"))
    assert torch.equal(y[0], bias) and torch.equal(y[1, 3], bias[3])
    x[1, :64] = 0
    assert quant_gemv(x, q, s, bias, group=kind.get("group"))[1, 4] == bias[4]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("sizes", [(192, 128), (100, 64), (7, 8), (48, 7)], ids=str)
def test_u128_groups_that_do_not_divide_the_columns(sizes, bits):
    K, group = sizes
    q, s = quantize_ref(make((15, K), torch.float32, 0), bits=bits, group=group, symmetric=False)
    x = make((2, K), torch.float32, 1)
    assert_close(quant_gemv(x, q, s, group=group), truth(quant_gemv_ref, x, q, s, group=group), torch.float32)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", [(32, 15), (33, 1), (64, 48)], ids=str)
def test_u131_any_number_of_outputs(sizes, has_bias):
    K, N = sizes
    bias = make((N,), torch.float32, 3) if has_bias else None
    # the second as Conv1D holds it, [K, N]
    for weight in (make((N, K), torch.float32, 0), make((K, N), torch.float32, 0).T):
        q, s = quantize_ref(weight, bits=4)
        for shape in ((0, K), (1, K), (2, 2, K)):
            x = make(shape, torch.float32, 1, "transposed")
            expected = torch.nn.functional.linear(
                x.double(), dequantize(q, s, K).double(), bias if bias is None else bias.double()
            )
            assert_close(quant_gemv(x, q, s, bias), expected, torch.float32)


CONFIGS = [
    {"BLOCK_M": 1, "BLOCK_N": 2, "BLOCK_K": 64, "SPANS_K": False},
    {"BLOCK_M": 1, "BLOCK_N": 16, "BLOCK_K": 32, "SPANS_K": False},
    {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "SPANS_K": False},
]


@pytest.mark.parametrize("variant", VARIANTS[:5:2], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_quant_gemv_is_right_in_every_configuration(config, variant):
    dtype, kind, _ = variant
    x = make((5, 100), dtype, 0)
    with pin(OP, config):
        w, s = make_codes((90, 17), 100, kind, 1)
        options = {"bias": (make((90,), dtype, 3), None), "act": "relu", "group": kind.get("group")}
        assert_close(quant_gemv(x, w, s, **options), truth(quant_gemv_ref, x, w, s, **options), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quant_gemv_of_nothing(dtype):
    x, ((w,), (s,)) = make((2, 3, 7), dtype, 0), make_codes((5,), 7, {"bits": 4}, 1)
    assert quant_gemv(x[:0], w, s).shape == (0, 3, 5)
    assert quant_gemv(x, w[:0], s[:0]).shape == (2, 3, 0)


def test_quant_gemv_takes_scales_of_16_bits():
    x, ((w,), (s,)) = make((2, 100), torch.float32, 0), make_codes((30,), 100, VARIANTS[3][1], 1)
    s = s.half()
    assert_close(quant_gemv(x, w, s, group=64), truth(quant_gemv_ref, x, w, s, group=64), torch.float32)


def test_quant_gemv_refuses_what_does_not_fit():
    x, ((w,), (s,)) = torch.zeros(2, 8), make_codes((4,), 8, {"group": 4}, 0)
    with pytest.raises(ValueError, match="x has 17 rows of 8 - allowed: up to 16 rows - call quant_matmul"):
        quant_gemv(torch.zeros(17, 8), w, s, group=4)
    with pytest.raises(ValueError, match=r"weight is \(4, 8\) torch.float32 - allowed: \(N, 8\) torch.int8"):
        quant_gemv(x, w.float(), s, group=4)
    with pytest.raises(
        ValueError, match=r"scale is \(4, 2\) torch.float32 - allowed: \(4, 1\), or \(4, 2, 1\)"
    ):
        quant_gemv(x, w, s)
    with pytest.raises(ValueError, match="make them contiguous"):
        quant_gemv(x, w, s.T.contiguous().T, group=4)
    with pytest.raises(ValueError, match="weight has 4 segments - allowed: 1 to 3"):
        quant_gemv(x, (w,) * 4, (s,) * 4, group=4)
    with pytest.raises(ValueError, match="scale has 1 entries, bias 2 - allowed: 2, one per weight segment"):
        quant_gemv(x, (w, w), s, group=4)
    with pytest.raises(ValueError, match="quantise all segments alike"):
        quant_gemv(x, (w, w), (s, s.half()), group=4)
    with pytest.raises(ValueError, match=r"bias is \(3,\) torch.float32 - allowed: \(4,\)"):
        quant_gemv(x, w, s, torch.zeros(3), group=4)
    with pytest.raises(ValueError, match=r"residual is \(2, 3\) torch.float32 - allowed: \(2, 4\)"):
        quant_gemv(x, w, s, group=4, residual=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="act='swish'"):
        quant_gemv(x, w, s, group=4, act="swish")
