"""router against its reference, and against the product and the choice that it joins."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, layouts, make, make_weights, seeds, sizes, truth
from trinfer.autotune import pin
from trinfer.kernels import OPS, count_launches, router, router_ref, routing

OP = next(op for op in OPS if op.name == "router")
# (dtype, experts, top_k, has bias, options): each is a compiled kernel
VARIANTS = (
    (torch.float32, 8, 2, False, {"renormalize": True}),
    (torch.bfloat16, 60, 4, False, {}),
    (torch.float16, 13, 3, True, {"scoring": "softmax_topk"}),
    (
        torch.bfloat16,
        32,
        6,
        False,
        {
            "is_wide": True,
            "scoring": "sigmoid",
            "renormalize": True,
            "scale": 2.5,
            "num_groups": 4,
            "kept_groups": 2,
        },
    ),
    (torch.float32, 1, 1, True, {"scoring": "sigmoid"}),
)
variants = st.sampled_from(VARIANTS)
rows = sizes(0, 16)
inputs_K = st.sampled_from([1, 7, 34, 576])


def draw(variant, M, K, seed, layout="contiguous"):
    dtype, E, top_k, has_bias, options = variant
    x, (weight,) = make((1, M, K), dtype, seed, layout), make_weights((E,), K, dtype, seed + 1)
    bias = make((E,), dtype, seed + 2) if has_bias else None
    # only sigmoid scores come with it
    choice = make((E,), torch.float32, seed + 3, scale=0.1) if options.get("scoring") == "sigmoid" else None
    return (x, weight, top_k, bias, choice), options


@given(variants, rows, inputs_K, layouts, seeds)
def test_router_matches_ref(variant, M, K, layout, seed):
    args, options = draw(variant, M, K, seed, layout)
    with count_launches() as launches:
        logits, ids, weights = router(*args, **options)
    assert launches == ({"router": 1} if M else {})
    wide = torch.float32 if options.get("is_wide") else variant[0]
    assert logits.dtype == wide and ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert ids.shape == weights.shape == (1, M, variant[2])
    assert_close(logits, truth(router_ref, *args, **options)[0], wide)


@given(variants, sizes(1, 16), inputs_K, seeds)
def test_router_chooses_by_its_logits_as_routing_does(variant, M, K, seed):
    args, options = draw(variant, M, K, seed)
    logits, ids, weights = router(*args, **options)
    rule = {name: value for name, value in options.items() if name != "is_wide"}
    expected = routing(logits, variant[2], args[4], **rule)
    assert torch.equal(ids, expected[0])
    assert torch.equal(weights, expected[1])


@given(variants, sizes(2, 16), inputs_K, seeds)
def test_router_gives_a_token_the_same_alone_and_in_a_batch(variant, M, K, seed):
    (x, *rest), options = draw(variant, M, K, seed)
    alone = [router(row, *rest, **options) for row in x.split(1, 1)]
    for together, parts in zip(router(x, *rest, **options), zip(*alone, strict=True), strict=True):
        assert torch.equal(together, torch.cat(parts, 1))


def test_router_leaves_its_ticket_as_it_was():
    (x, *rest), options = draw(VARIANTS[0], 3, 34, 0)
    ticket = torch.zeros(1, dtype=torch.int32)
    first, second = (router(x, *rest, ticket=ticket, **options) for _ in range(2))
    assert ticket.tolist() == [0]
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [{"BLOCK_N": 1, "BLOCK_M": 1}, {"BLOCK_N": 16, "BLOCK_K": 64}])
def test_router_is_right_in_every_configuration(config, dtype):
    x, (weight,) = make((5, 100), dtype, 0), make_weights((13,), 100, dtype, 1)
    with pin(OP, config):
        logits, ids, weights = router(x, weight, 3)
    expected = routing(logits, 3)
    assert_close(logits, truth(router_ref, x, weight, 3)[0], dtype)
    assert torch.equal(ids, expected[0]) and torch.equal(weights, expected[1])


def test_router_refuses_what_does_not_fit():
    x, weight = torch.zeros(2, 8), torch.zeros(6, 8)
    with pytest.raises(ValueError, match=r"x is \(17, 8\) torch.float32, .* - allowed: up to 16 rows of 8"):
        router(torch.zeros(17, 8), weight, 2)
    with pytest.raises(ValueError, match="weight .6, 8. torch.float16"):
        router(x, weight.half(), 2)
    with pytest.raises(ValueError, match=r"bias is \(5,\)"):
        router(x, weight, 2, torch.zeros(5))
    with pytest.raises(ValueError, match="top_k=7 of 6 experts - allowed: 1 to 6"):
        router(x, weight, 7)
