"""quant_matmul against its reference, and the laws of a product with codes on one or on both sides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.test_quant_gemv import make_codes
from tests.strategies import DTYPES, assert_close, layouts, make, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import (
    OPS,
    count_launches,
    dequantize,
    quant_matmul,
    quant_matmul_ref,
    quantize,
    quantize_ref,
)

OP = next(op for op in OPS if op.name == "quant_matmul")
# small enough that shapes have several tiles, and one compiled kernel for all of them
SMALL = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32}
rows = sizes(1, 70)
inputs_K = st.sampled_from([1, 33, 100, 576])
# each is a compiled kernel: every value of every option, not every combination
VARIANTS = (
    (torch.float32, {"bits": 8}, "none"),
    (torch.bfloat16, {"bits": 4, "group": 32, "symmetric": False}, "silu"),
    (torch.float16, {"bits": 4}, "relu"),
    (torch.float32, {"bits": 8, "group": 64}, "gelu"),
)
# with rows of int8
INT_VARIANTS = (
    (torch.float32, {"bits": 8}, "none"),
    (torch.bfloat16, {"bits": 4, "group": 32, "symmetric": False}, "silu"),
    (torch.float16, {"bits": 8, "symmetric": False}, "relu"),
)


def extras(variant, M, N, seed):
    dtype, kind, act = variant
    options = {"act": act, "group": kind.get("group")}
    if act != "none":
        options["bias"] = make((N,), dtype, seed + 2)
        options["residual"] = make((1, M, N), dtype, seed + 3)
    return options


@given(st.sampled_from(VARIANTS), rows, sizes(1, 100), inputs_K, layouts, seeds)
def test_quant_matmul_matches_ref(variant, M, N, K, layout, seed):
    dtype, kind, _ = variant
    x, ((w,), (s,)) = make((1, M, K), dtype, seed, layout), make_codes((N,), K, kind, seed + 1)
    options = extras(variant, M, N, seed)
    with pin(OP, SMALL), count_launches() as launches:
        y = quant_matmul(x, w, s, **options)
    assert launches == {"quant_matmul": 1}
    assert_close(y, truth(quant_matmul_ref, x, w, s, **options), dtype)


@given(st.sampled_from(INT_VARIANTS), rows, sizes(1, 100), inputs_K, seeds)
def test_quant_matmul_of_codes_matches_ref(variant, M, N, K, seed):
    dtype, kind, _ = variant
    x, x_scale = quantize(make((1, M, K), torch.float32, seed))
    (w,), (s,) = make_codes((N,), K, kind, seed + 1)
    options = extras(variant, M, N, seed) | {"x_scale": x_scale, "dtype": dtype}
    with pin(OP, SMALL):
        y = quant_matmul(x, w, s, **options)
    assert_close(y, truth(quant_matmul_ref, x, w, s, **options), dtype)


@given(st.sampled_from(VARIANTS[1:3]), rows, sizes(2, 80), st.just(100), seeds)
def test_quant_matmul_gated_matches_ref(variant, M, N, K, seed):
    dtype, kind, _ = variant
    x, (w, s) = make((1, M, K), dtype, seed), make_codes((N, N), K, kind, seed + 1)
    options = extras(variant, M, N, seed) | {"gated": True}
    options["bias"] = (options["bias"], -options["bias"])
    with pin(OP, SMALL):
        y = quant_matmul(x, w, s, **options)
    assert_close(y, truth(quant_matmul_ref, x, w, s, **options), dtype)


@given(rows, st.sampled_from([(70, 5), (9, 33), (40, 65, 7)]), st.just(100), seeds)
def test_quant_matmul_of_segments_is_their_concatenation(M, counts, K, seed):
    kind = VARIANTS[3][1]
    x, (w, s) = make((M, K), torch.float32, seed), make_codes(counts, K, kind, seed + 1)
    bias = (None, *(make((n,), torch.float32, seed + 9) for n in counts[1:]))
    with pin(OP, SMALL):
        parts = [quant_matmul(x, *segment, group=64) for segment in zip(w, s, bias, strict=True)]
        assert torch.equal(quant_matmul(x, w, s, bias, group=64), torch.cat(parts, -1))


@given(rows, sizes(1, 80), inputs_K, seeds)
def test_quant_matmul_of_codes_is_exact_in_integers(M, N, K, seed):
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randint(-127, 128, (n, K), generator=generator, dtype=torch.int8) for n in (M, N))
    x_scale, scale = torch.full((M, 1), 0.5), torch.full((N, 1), 2.0)
    with pin(OP, SMALL):
        y = quant_matmul(x, w, scale, x_scale=x_scale, dtype=torch.float32)
    assert torch.equal(y.double(), x.double() @ w.double().T)


@given(sizes(1, 40), sizes(1, 60), seeds)
def test_quant_matmul_of_its_rows_alone_is_the_same(M, N, seed):
    x, ((w,), (s,)) = make((M, 100), torch.float32, seed), make_codes((N,), 100, VARIANTS[3][1], seed + 1)
    with pin(OP, SMALL):
        alone = torch.cat([quant_matmul(row, w, s, group=64) for row in x.split(7)])
        assert torch.equal(quant_matmul(x, w, s, group=64), alone)


@pytest.mark.parametrize("K", [4096, 16384])
def test_u124_large_sums_are_scaled_before_they_are_rounded(K):
    w, scale = torch.full((5, K), 127, dtype=torch.int8), torch.full((5, 1), 1e-3 / 127)
    expected = torch.full((20, 5), 6e-3 * K, dtype=torch.float64)
    x = torch.full((20, K), 6.0, dtype=torch.float16)
    assert_close(quant_matmul(x, w, scale), expected, torch.float16)
    codes, x_scale = quantize(x)
    y = quant_matmul(codes, w, scale, x_scale=x_scale, dtype=torch.float16)
    assert_close(y, expected, torch.float16)


@pytest.mark.parametrize("is_int", [False, True])
def test_u127_zeros_give_exactly_the_bias(is_int):
    weight, x = make((20, 100), torch.float32, 0), make((30, 100), torch.float32, 1)
    weight[3] = 0
    x[5] = 0
    q, s = quantize_ref(weight, bits=4, group=32, symmetric=False)
    bias, options = make((20,), torch.float32, 2), {"group": 32}
    if is_int:
        x, options["x_scale"] = quantize(x)
        options["dtype"] = torch.float32
    with pin(OP, SMALL):
        y = quant_matmul(x, q, s, bias, **options)
    assert torch.equal(y[5], bias) and torch.equal(y[:, 3], bias[3].expand(30)) and y.isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("sizes", [(192, 128), (100, 64), (7, 8), (48, 7)], ids=str)
def test_u128_groups_that_do_not_divide_the_columns(sizes, bits):
    K, group = sizes
    q, s = quantize_ref(make((15, K), torch.float32, 0), bits=bits, group=group)
    x = make((20, K), torch.float32, 1)
    with pin(OP, SMALL):
        y = quant_matmul(x, q, s, group=group)
    assert_close(y, truth(quant_matmul_ref, x, q, s, group=group), torch.float32)


@pytest.mark.parametrize("sizes", [(32, 15), (33, 1), (64, 48)], ids=str)
def test_u131_any_number_of_outputs(sizes):
    K, N = sizes
    q, s = quantize_ref(make((K, N), torch.float32, 0).T, bits=4)
    for shape in ((0, K), (1, K), (3, 7, K)):
        x = make(shape, torch.float32, 1, "transposed")
        expected = torch.nn.functional.linear(x.double(), dequantize(q, s, K).double())
        with pin(OP, SMALL):
            assert_close(quant_matmul(x, q, s), expected, torch.float32)


@pytest.mark.parametrize("is_int", [False, True])
def test_quant_matmul_in_its_own_configuration(is_int):
    for kind in ({"bits": 8}, {"bits": 4, "group": 64}):
        x, ((w,), (s,)) = make((70, 130), torch.float32, 0), make_codes((90,), 130, kind, 1)
        options = {"group": kind.get("group")}
        if is_int:
            x, options["x_scale"] = quantize(x)
            options["dtype"] = torch.float32
        y = quant_matmul(x, w, s, **options)
        assert_close(y, truth(quant_matmul_ref, x, w, s, **options), torch.float32)


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("kind", [{"bits": 8}, {"bits": 4, "group": 32, "symmetric": False}], ids=str)
def test_quant_matmul_of_codes_is_the_same_in_integers_and_floats(kind, as_float):
    x, x_scale = quantize(make((40, 300), torch.float32, 0))
    (w,), (s,) = make_codes((90,), 300, kind, 1)
    options = {"group": kind.get("group"), "x_scale": x_scale, "dtype": torch.float32}
    with pin(OP, SMALL | {"AS_FLOAT": as_float}):
        y = quant_matmul(x, w, s, **options)
    assert_close(y, truth(quant_matmul_ref, x, w, s, **options), torch.float32)


@pytest.mark.parametrize("variant", VARIANTS[::2], ids=str)
@pytest.mark.parametrize("config", [{"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 128}], ids=str)
def test_quant_matmul_is_right_in_every_configuration(config, variant):
    dtype, kind, _ = variant
    x, (w, s) = make((1, 40, 300), dtype, 0), make_codes((90, 17), 300, kind, 1)
    options = extras(variant, 40, 107, 3) | {"bias": (make((90,), dtype, 3), None)}
    with pin(OP, config):
        assert_close(quant_matmul(x, w, s, **options), truth(quant_matmul_ref, x, w, s, **options), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quant_matmul_of_nothing(dtype):
    x, ((w,), (s,)) = make((2, 3, 7), dtype, 0), make_codes((5,), 7, {"bits": 4}, 1)
    assert quant_matmul(x[:0], w, s).shape == (0, 3, 5)
    assert quant_matmul(x, w[:0], s[:0]).shape == (2, 3, 0)


def test_quant_matmul_refuses_rows_that_do_not_fit():
    x, ((w,), (s,)) = torch.zeros(20, 8), make_codes((4,), 8, {"bits": 8}, 0)
    codes, x_scale = quantize(x)
    for arguments in (
        {"x": codes},
        {"x": codes, "x_scale": x_scale},
        {"x": codes, "dtype": torch.float32},
        {"x": x, "x_scale": x_scale},
        {"x": x, "dtype": torch.float16},
    ):
        with pytest.raises(ValueError, match="allowed: int8 with x_scale and a dtype, or a floating point x"):
            quant_matmul(weight=w, scale=s, **arguments)
    with pytest.raises(ValueError, match=r"x_scale is \(20,\) torch.float32 - allowed: \(20, 1\)"):
        quant_matmul(codes, w, s, x_scale=x_scale[:, 0], dtype=torch.float32)
    with pytest.raises(ValueError, match="act='swish'"):
        quant_matmul(x, w, s, act="swish")
