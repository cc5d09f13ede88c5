"""routing against its reference and Hugging Face's routers, and the laws of a choice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, layouts, make, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import OPS, count_launches, routing, routing_ref

OP = next(op for op in OPS if op.name == "routing")
# (dtype, experts, top_k, options): each is a compiled kernel
VARIANTS = (
    (torch.float32, 8, 2, {"renormalize": True}),
    (torch.bfloat16, 60, 4, {}),
    (torch.float16, 13, 3, {"scoring": "softmax_topk"}),
    (
        torch.float32,
        32,
        6,
        {"scoring": "sigmoid", "renormalize": True, "scale": 2.5, "num_groups": 4, "kept_groups": 2},
    ),
    (torch.float32, 5, 5, {"scoring": "sigmoid"}),
    (torch.float32, 24, 3, {"scale": 0.5, "num_groups": 6, "kept_groups": 2, "group_best": 1}),
    (torch.bfloat16, 1, 1, {}),
)
variants = st.sampled_from(VARIANTS)


def bias_of(E, options, seed):
    """The bias that only sigmoid scores come with."""
    return make((E,), torch.float32, seed, scale=0.1) if options.get("scoring") == "sigmoid" else None


@given(variants, sizes(0, 70), layouts, seeds)
def test_routing_matches_ref(variant, M, layout, seed):
    dtype, E, top_k, options = variant
    x, bias = make((2, M, E), dtype, seed, layout), bias_of(E, options, seed + 1)
    with count_launches() as launches:
        ids, weights = routing(x, top_k, bias, **options)
    assert launches == ({"routing": 1} if M else {})
    assert ids.dtype == torch.int32 and ids.shape == weights.shape == (2, M, top_k)
    # chosen in float32, because scores may be equal there and not in float64
    same = (ids == routing_ref(x, top_k, bias, **options)[0]).all(-1)
    # scores that differ in their last bit may change places
    assert same.float().mean() > 0.9 or M == 0
    assert_close(weights[same], truth(routing_ref, x, top_k, bias, **options)[1][same], torch.float32)


@given(variants, sizes(1, 40), seeds)
def test_routing_weights_sum_to_one_and_ids_differ(variant, M, seed):
    dtype, E, top_k, options = variant
    x, bias = make((M, E), dtype, seed, scale=3), bias_of(E, options, seed + 1)
    ids, weights = routing(x, top_k, bias, **{**options, "renormalize": True, "scale": 1.0})
    assert_close(weights.sum(-1), torch.ones(M).double(), torch.float32)
    assert ((ids >= 0) & (ids < E)).all()
    assert all(len(set(row)) == top_k for row in ids.tolist())


@given(sizes(1, 40), seeds)
def test_routing_takes_the_first_of_equal_experts(M, seed):
    x = make((M, 13), torch.float16, seed).round().clamp(-1, 1)
    x[:, ::4] *= -0.0
    ids, weights = routing(x, 3, scoring="softmax_topk")
    expected = torch.sort(x, dim=-1, descending=True, stable=True)
    assert torch.equal(ids.long(), expected.indices[:, :3])
    assert_close(weights, expected.values[:, :3].double().softmax(-1), torch.float32)


@given(sizes(1, 40), seeds)
def test_routing_permutes_with_the_experts(M, seed):
    x = make((M, 13), torch.float32, seed)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(seed))
    ids, weights = routing(x, 3, scoring="softmax_topk")
    moved, same = routing(x[:, order], 3, scoring="softmax_topk")
    assert torch.equal(order[moved.long()], ids.long()) and torch.equal(weights, same)


def test_routing_of_extreme_logits():
    x = torch.full((3, 8), float("-inf"))
    x[0, 5], x[1, :2], x[2] = 1.0, torch.tensor([3e38, -3e38]), -3e38
    ids, weights = routing(x, 2, renormalize=True)
    assert ids.tolist() == [[5, 0], [0, 1], [0, 1]]
    assert weights.tolist() == [[1, 0], [1, 0], [0.5, 0.5]]
    ids, _ = routing(torch.full((2, 8), float("nan")), 2)
    assert ((ids >= 0) & (ids < 8)).all()


def test_routing_is_that_of_deepseek_v3():
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    sizes = {
        "hidden_size": 16,
        "n_routed_experts": 32,
        "num_experts_per_tok": 6,
        "n_group": 4,
        "topk_group": 2,
    }
    router = modeling.DeepseekV3TopkRouter(modeling.DeepseekV3Config(**sizes, routed_scaling_factor=2.5))
    router.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    router.e_score_correction_bias.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, expected, indices = router(make((20, 16), torch.float32, 2))
    options = {"renormalize": True, "scale": 2.5, "num_groups": 4, "kept_groups": 2}
    ids, weights = routing(logits, 6, router.e_score_correction_bias, scoring="sigmoid", **options)
    # transformers leaves the order of the chosen open
    dense = torch.zeros(20, 32).scatter(1, indices, expected)
    assert_close(torch.zeros(20, 32).scatter(1, ids.long(), weights), dense.double(), torch.float32)


def test_routing_is_that_of_mixtral():
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    router = modeling.MixtralTopKRouter(modeling.MixtralConfig(hidden_size=16, num_local_experts=8))
    router.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, expected, indices = router(make((20, 16), torch.float32, 2))
    ids, weights = routing(logits, 2, renormalize=True)
    assert torch.equal(ids.long(), indices)
    assert_close(weights, expected.double(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [{"BLOCK_M": 1}, {"BLOCK_M": 16}])
def test_routing_is_right_in_every_configuration(config, dtype):
    x = make((19, 13), dtype, 0)
    with pin(OP, config):
        ids, weights = routing(x, 3)
    expected = truth(routing_ref, x, 3)
    assert torch.equal(ids, expected[0])
    assert_close(weights, expected[1], torch.float32)


def test_routing_refuses_what_does_not_fit():
    x = torch.zeros(2, 8)
    with pytest.raises(
        ValueError, match="scoring='max' is not known - allowed: softmax, softmax_topk, sigmoid"
    ):
        routing(x, 2, scoring="max")
    with pytest.raises(ValueError, match="top_k=9 of 8 experts - allowed: 1 to 8"):
        routing(x, 9)
    with pytest.raises(ValueError, match="top_k=3 of 8 experts - allowed: 1 to 2"):
        routing(x, 3, num_groups=4, kept_groups=1)
    with pytest.raises(ValueError, match="num_groups=3, kept_groups=1 for 8 experts"):
        routing(x, 2, num_groups=3)
    with pytest.raises(ValueError, match=r"bias is \(7,\) torch.float32 - allowed: \(8,\) torch.float32"):
        routing(x, 2, torch.zeros(7))
