"""grouped_matmul against its reference and a dense loop, and the laws of a mixture of experts."""

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
    grouped_matmul,
    grouped_matmul_ref,
    matmul,
    routing,
    sort_by_expert,
)

OP = next(op for op in OPS if op.name == "grouped_matmul")


@given(cases, sizes(0, 70), layouts, st.booleans(), seeds)
def test_grouped_matmul_matches_ref(case, T, layout, stray, seed):
    (variant, N, K), dtype, top_k = case, case[0].dtype, case[0].top_k
    weight, options = variant.weight_and_options(N, K, seed)
    order, offsets = sort_by_expert(make_ids(T, variant.top_k, variant.E, seed, stray), variant.E)
    x = make((1, T, K), dtype, seed + 1, layout)[0]
    with count_launches() as launches:
        y = grouped_matmul(x, weight, order, offsets, gather=True, **options)
    assert launches == ({"grouped_matmul": 1} if T else {})
    assert_close(y, truth(grouped_matmul_ref, x, weight, order, offsets, gather=True, **options), dtype)
    x = make((1, T * top_k, K), dtype, seed + 2, layout)[0]
    y = grouped_matmul(x, weight, order, offsets, scatter=True, **options)
    assert_close(y, truth(grouped_matmul_ref, x, weight, order, offsets, scatter=True, **options), dtype)


@given(sizes(1, 70), st.sampled_from([1, 60]), seeds)
def test_grouped_matmul_is_a_dense_loop_over_experts(T, E, seed):
    weights = make_experts(E, 40, 34, torch.float32, seed)
    x, ids = make((T, 34), torch.float32, seed + 1), make_ids(T, 2, E, seed)
    order, offsets = sort_by_expert(ids, E)
    y = grouped_matmul(x, weights, order, offsets, act="silu", gated=True, gather=True, scatter=True)
    assert_close(y.view(T, 2, 40), check_dense(ids, x, weights, "silu"), torch.float32)


@given(sizes(1, 70), seeds)
def test_grouped_matmul_of_one_expert_is_matmul(T, seed):
    (w, _), x = make_experts(3, 40, 34, torch.float32, seed), make((T, 34), torch.float32, seed + 1)
    order, offsets = sort_by_expert(torch.full((T, 1), 1, dtype=torch.int32), 3)
    assert_close(grouped_matmul(x, w, order, offsets), matmul(x, w[1]).double(), torch.float32)


@given(sizes(2, 70), seeds)
def test_grouped_matmul_gives_a_token_the_same_in_any_order(T, seed):
    weights, x = make_experts(7, 40, 34, torch.float32, seed), make((T, 34), torch.float32, seed + 1)
    ids, shuffle = make_ids(T, 2, 7, seed), torch.randperm(T, generator=torch.Generator().manual_seed(seed))
    options = {"act": "silu", "gated": True, "gather": True, "scatter": True}
    y = grouped_matmul(x, weights, *sort_by_expert(ids, 7), **options).view(T, 2, 40)
    moved = grouped_matmul(x[shuffle], weights, *sort_by_expert(ids[shuffle], 7), **options).view(T, 2, 40)
    assert torch.equal(moved, y[shuffle])


@pytest.mark.parametrize("dtype", DTYPES)
def test_moe_layer_is_that_of_mixtral(dtype):
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    sizes = {"hidden_size": 48, "intermediate_size": 40, "num_local_experts": 8, "num_experts_per_tok": 2}
    config = modeling.MixtralConfig(**sizes)
    config._experts_implementation = "eager"
    block = modeling.MixtralSparseMoeBlock(config)
    for seed, parameter in enumerate(block.parameters()):
        parameter.data = make(tuple(parameter.shape), torch.float32, seed, scale=0.15)
    x = make((2, 37, 48), dtype, 9)
    with torch.no_grad():
        expected = block.to(dtype).double()(x.double())
    block.to(dtype)
    rows, experts, router = x.flatten(0, 1), block.experts, block.gate
    # the choice is made in float64: in 16 bits another expert may win
    ids, weights = routing(rows.float() @ router.weight.float().T, 2, renormalize=True)
    order, offsets = sort_by_expert(ids, 8)
    pair = experts.gate_up_proj.detach().chunk(2, 1)
    h = grouped_matmul(rows, pair, order, offsets, act="silu", gated=True, gather=True)
    z = grouped_matmul(h, experts.down_proj.detach(), order, offsets, scatter=True)
    assert_close(combine_experts(z, weights), expected.flatten(0, 1), dtype)


@pytest.mark.parametrize(("N", "K"), [(1, 1), (1, 34), (33, 1)])
def test_grouped_matmul_of_one_column(N, K):
    (w, _), x = make_experts(3, N, K, torch.float32, 0), make((9, K), torch.float32, 1)
    ids = make_ids(9, 1, 3, 0)
    y = grouped_matmul(x, w, *sort_by_expert(ids, 3), gather=True, scatter=True)
    assert_close(y[:, None], check_dense(ids, x, (w,), "none"), torch.float32)


CONFIGS = [
    {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP_M": 1},
    {"BLOCK_M": 64, "BLOCK_N": 16, "BLOCK_K": 64, "GROUP_M": 8},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS)
def test_grouped_matmul_is_right_in_every_configuration(config, dtype):
    weights, ids = make_experts(5, 70, 50, dtype, 0), make_ids(90, 2, 5, 0, stray=True)
    x, routed = make((90, 50), dtype, 1), sort_by_expert(ids, 5)
    options = {"act": "silu", "gated": True, "gather": True}
    with pin(OP, config):
        y = grouped_matmul(x, weights, *routed, **options)
    assert_close(y, truth(grouped_matmul_ref, x, weights, *routed, **options), dtype)


def test_grouped_matmul_refuses_what_does_not_fit():
    x, w, (order, offsets) = torch.zeros(4, 8), torch.zeros(3, 6, 8), sort_by_expert(make_ids(4, 1, 3, 0), 3)
    with pytest.raises(ValueError, match=r"weight is \(3, 8, 6\) torch.float32 .* allowed: \(3, 8, 8\)"):
        grouped_matmul(x, w.transpose(1, 2), order, offsets)
    with pytest.raises(ValueError, match="1 weights and 1 biases with gated=True"):
        grouped_matmul(x, w, order, offsets, gated=True)
    with pytest.raises(ValueError, match=r"offsets \(4,\) torch.int32 - allowed: torch.int32, \(3,\)"):
        grouped_matmul(x, w[:2], order, offsets)
    with pytest.raises(ValueError, match=r"x is \(3, 8\) for 4 pairs"):
        grouped_matmul(x[:3], w, order, offsets, gather=True)
    with pytest.raises(ValueError, match=r"bias is \(6,\) torch.float32 - allowed: \(3, 6\)"):
        grouped_matmul(x, w, order, offsets, torch.zeros(6))
    with pytest.raises(ValueError, match="act='swish'"):
        grouped_matmul(x, w, order, offsets, act="swish")
