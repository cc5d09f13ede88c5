"""grouped_gemv against its reference, a dense loop and the sorted form."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.experts import cases, check_dense, make_experts, make_ids
from tests.strategies import DTYPES, assert_close, layouts, make, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import (
    OPS,
    combine_experts,
    count_launches,
    grouped_gemv,
    grouped_gemv_ref,
    grouped_matmul,
    sort_by_expert,
)

OP = next(op for op in OPS if op.name == "grouped_gemv")


@given(cases, sizes(0, 16), layouts, st.booleans(), seeds)
def test_grouped_gemv_matches_ref(case, T, layout, stray, seed):
    (variant, N, K), dtype, top_k = case, case[0].dtype, case[0].top_k
    weight, options = variant.weight_and_options(N, K, seed)
    ids = make_ids(T, variant.top_k, variant.E, seed, stray)
    x = make((1, T, K), dtype, seed + 1, layout)[0]
    with count_launches() as launches:
        y = grouped_gemv(x, weight, ids, **options)
    assert launches == ({"grouped_gemv": 1} if T else {})
    assert_close(y, truth(grouped_gemv_ref, x, weight, ids, **options), dtype)
    x = make((1, T * top_k, K), dtype, seed + 2, layout)[0]
    options |= {"combine": make((T, top_k), torch.float32, seed + 4)}
    if variant.gated:
        options |= {"residual": make((1, T, N), dtype, seed + 5, layout)[0]}
    y = grouped_gemv(x, weight, ids, **options)
    assert_close(y, truth(grouped_gemv_ref, x, weight, ids, **options), dtype)


@given(sizes(1, 32), st.sampled_from([1, 5, 60]), seeds)
def test_grouped_gemv_is_a_dense_loop_over_experts(T, E, seed):
    weights = make_experts(E, 40, 34, torch.float32, seed)
    x, ids = make((T, 34), torch.float32, seed + 1), make_ids(T, 2, E, seed)
    y = grouped_gemv(x, weights, ids, act="silu", gated=True)
    assert_close(y.view(T, 2, 40), check_dense(ids, x, weights, "silu"), torch.float32)


@given(sizes(1, 16), seeds)
def test_clamped_gates_saturate_in_both_forms(T, seed):
    weights = make_experts(5, 40, 34, torch.float32, seed, "alternate")
    x, ids = make((T, 34), torch.float32, seed + 1, scale=20), make_ids(T, 2, 5, seed)
    options = {"act": "swiglu_clamped", "gated": True}
    expected = truth(grouped_gemv_ref, x, weights, ids, **options)
    # gates above 7 give at most 7 · 8, those far below 0 nothing
    assert float(expected.abs().max()) <= 56 and (T < 4 or float(expected.abs().max()) > 50)
    assert_close(grouped_gemv(x, weights, ids, **options), expected, torch.float32)
    order, offsets = sort_by_expert(ids, 5)
    many = grouped_matmul(x, weights, order, offsets, gather=True, scatter=True, **options)
    assert_close(many, expected, torch.float32)
    with pytest.raises(ValueError, match="act='swiglu_clamped' is not an activation"):
        grouped_gemv(x, weights[0], ids, act="swiglu_clamped")


@given(sizes(1, 16), st.sampled_from([5, 60]), st.booleans(), seeds)
def test_sort_free_form_is_the_sorted_form(T, E, stray, seed):
    x, ids = make((T, 34), torch.float32, seed), make_ids(T, 4, E, seed, stray)
    gate_up, (down, _) = (
        make_experts(E, 40, 34, torch.float32, seed + 1),
        make_experts(E, 34, 40, torch.float32, seed),
    )
    weights = make((T, 4), torch.float32, seed + 2).softmax(-1)
    options = {"act": "silu", "gated": True}
    few = grouped_gemv(grouped_gemv(x, gate_up, ids, **options), down, ids, combine=weights, residual=x)
    order, offsets = sort_by_expert(ids, E)
    h = grouped_matmul(x, gate_up, order, offsets, gather=True, **options)
    many = combine_experts(grouped_matmul(h, down, order, offsets, scatter=True), weights, x)
    assert_close(few, many.double(), torch.float32)


@pytest.mark.parametrize(("N", "K"), [(1, 1), (1, 34), (33, 1)])
def test_grouped_gemv_of_one_column(N, K):
    (w, _), x = make_experts(3, N, K, torch.float32, 0), make((9, K), torch.float32, 1)
    ids = make_ids(9, 1, 3, 0)
    assert_close(grouped_gemv(x, w, ids)[:, None], check_dense(ids, x, (w,), "none"), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [{"BLOCK_N": 2, "BLOCK_K": 64}, {"BLOCK_N": 64, "BLOCK_K": 16}])
def test_grouped_gemv_is_right_in_every_configuration(config, dtype):
    weights, ids = make_experts(5, 70, 50, dtype, 0), make_ids(9, 2, 5, 0)
    x, options = make((9, 50), dtype, 1), {"act": "silu", "gated": True}
    with pin(OP, config):
        y = grouped_gemv(x, weights, ids, **options)
        assert_close(y, truth(grouped_gemv_ref, x, weights, ids, **options), dtype)
        options = {"combine": make((9, 2), torch.float32, 3)}
        x = make((18, 50), dtype, 1)
        y = grouped_gemv(x, weights[0], ids, **options)
        assert_close(y, truth(grouped_gemv_ref, x, weights[0], ids, **options), dtype)


def test_grouped_gemv_refuses_what_does_not_fit():
    x, w, ids = torch.zeros(4, 8), torch.zeros(3, 6, 8), make_ids(4, 1, 3, 0)
    with pytest.raises(
        ValueError, match=r"ids are \(65, 1\) torch.int32 .* up to 64 of them - call sort_by_expert"
    ):
        grouped_gemv(torch.zeros(65, 8), w, make_ids(65, 1, 3, 0))
    with pytest.raises(ValueError, match=r"x is \(3, 8\) - allowed: 4 rows, one a token"):
        grouped_gemv(x[:3], w, ids)
    with pytest.raises(ValueError, match=r"combine is \(4, 2\) torch.float32 - allowed: \(4, 1\)"):
        grouped_gemv(x, w, ids, combine=torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"residual is \(4, 6\) .* together with combine"):
        grouped_gemv(x, w, ids, residual=torch.zeros(4, 6))
