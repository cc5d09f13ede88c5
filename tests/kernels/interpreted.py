"""Tiny cases of every kernel in every dtype, to run interpreted: `python -m tests.kernels.interpreted`."""

from functools import partial

import torch

from tests.strategies import DTYPES, assert_close, make, make_weights, truth
from trinfer import backend, kernels
from trinfer.autotune import pin


def check(op, dtype, *args, **options):
    """Run an op and compare every tensor it gives with the truth."""
    with kernels.count_launches() as launches:
        actual = getattr(kernels, op)(*args, **options)
    assert launches == {op: 1}, launches
    expected = truth(getattr(kernels, f"{op}_ref"), *args, **options)
    pairs = zip(actual, expected, strict=True) if isinstance(actual, tuple) else ((actual, expected),)
    for a, e in pairs:
        if a.is_floating_point():
            assert_close(a, e, dtype)
        else:
            assert torch.equal(a, e), (a, e)


def norms(dtype):
    x, residual, w, b = (
        make((3, 37), dtype, 0),
        make((3, 37), dtype, 1),
        make((37,), dtype, 2),
        make((37,), dtype, 3),
    )
    # the truth of the sum is not rounded to the dtype, so the residual is exact in it
    residual = residual.round()
    x = x.round()
    # the interpreter cuts float32 off to bfloat16 where it should round; a second cut is beyond the tolerance
    cast = "float32" if dtype == torch.bfloat16 else "input"
    check("rms_norm", dtype, x, w, 1e-6, residual=residual, cast=cast)
    check("rms_norm", dtype, x, w, 1e-6, cast="float32", weight_offset=1.0)
    check("layer_norm", dtype, x, w, b, 1e-6, residual=residual)


def activations(dtype):
    for act in ("gelu", "gelu_quick", "gelu_tanh", "relu", "relu2", "silu"):
        check("activation", dtype, make((3, 37), dtype, 0), act)
    check("gated_activation", dtype, make((3, 37), dtype, 0), make((3, 37), dtype, 1), "silu")


def positions(dtype):
    q, k, cos = make((1, 3, 2, 24), dtype, 0), make((1, 1, 2, 24), dtype, 1), make((1, 2, 16), dtype, 2)
    for interleaved in (False, True):
        check("rotary", dtype, q, k, cos, cos, interleaved=interleaved)
    check("embedding", dtype, torch.tensor([[1, 0], [4, 2]]), make((5, 37), dtype, 0), scale=3.0)
    if dtype == torch.bfloat16:
        # the interpreter cuts float32 off to bfloat16 where it should round: see norms
        return
    tables = {
        "types": kernels.Table(make((2, 37), dtype, 1), torch.tensor([1, 0])),
        "positions": kernels.Table(make((9, 37), dtype, 2), kv_range=torch.tensor([[1, 5], [2, 3]]).int()),
        "norm": kernels.Norm(make((37,), dtype, 3), make((37,), dtype, 4), 1e-5, "layer"),
    }
    check("embedding", dtype, torch.tensor([4, 2]), make((5, 37), dtype, 0), **tables)


def products(dtype):
    x, w, b = make((3, 34), dtype, 0), make_weights((17, 5), 34, dtype, 1), (make((17,), dtype, 3), None)
    for op in ("gemv", "matmul"):
        check(op, dtype, x, w, b, act="silu", residual=make((3, 22), dtype, 4))
        check(op, dtype, x, (w[0], w[0]), act="gelu", gated=True)
        if dtype != torch.bfloat16:
            # the interpreter cuts float32 off to bfloat16 where it should round: see norms
            norm = kernels.Norm(make((34,), dtype, 5), make((34,), dtype, 6), 1e-5, "layer")
            check(op, dtype, x, w, b, norm=norm)


def tokens(dtype):
    x, w = make((3, 34), dtype, 0), make_weights((37,), 34, dtype, 1)[0]
    check("softmax", dtype, x)
    check("lm_head", dtype, x, w, softcap=2.0)
    seed, offset = torch.tensor([5]), torch.tensor([6])
    check("gumbel", dtype, x, 0.7, seed, offset)


def quantised(dtype):
    x = make((3, 34), dtype, 0)
    for bits, group, symmetric in ((8, None, True), (4, 16, False)):
        weight = make_weights((17,), 34, torch.float32, 1)[0]
        q, scale = kernels.quantize(weight, bits=bits, group=group, symmetric=symmetric)
        error = (kernels.dequantize(q, scale, 34, group=group) - weight).abs().max()
        assert error <= scale.max() * 0.501
        for op in ("quant_gemv", "quant_matmul"):
            check(op, dtype, x, q, scale, group=group, residual=make((3, 17), dtype, 4))


def attentions(dtype):
    q, k, v = make((2, 2, 5, 24), dtype, 0), make((2, 1, 9, 24), dtype, 1), make((2, 1, 9, 24), dtype, 2)
    valid = torch.tensor([[0, 9], [4, 4]], dtype=torch.int32)
    check("attention", dtype, q, k, v, sm_scale=0.3, is_causal=True, kv_range=valid)
    check(
        "attention",
        dtype,
        q,
        k,
        v,
        sm_scale=0.3,
        is_causal=False,
        window=2,
        bias=make((1, 2, 5, 9), dtype, 3),
    )
    check("decode_attention", dtype, q[:, :, :1], k, v, sm_scale=0.3, window=4)
    check("decode_attention", dtype, q[:, :, :1], k, v, sm_scale=0.3, bias=make((2, 1, 1, 9), dtype, 3) > 0)


def experts(dtype):
    ids = torch.tensor([[1, 0], [2, 9], [2, 1]], dtype=torch.int32)
    weight, combine = make((3, 10, 34), dtype, 0, scale=0.2), make((3, 2), torch.float32, 1)
    (order, offsets), x = kernels.sort_by_expert_ref(ids, 3), make((3, 34), dtype, 2)
    pair, options = (weight[:, :5], weight[:, 5:]), {"act": "silu", "gated": True}
    check("grouped_matmul", dtype, x, pair, order, offsets, gather=True, scatter=True, **options)
    check("grouped_gemv", dtype, x, pair, ids, **options)
    rows = make((6, 34), dtype, 3)
    check("grouped_gemv", dtype, rows, weight, ids, combine=combine, residual=make((3, 10), dtype, 4))
    check("combine_experts", dtype, rows, combine)


def choices(dtype):
    logits, bias = make((3, 12), dtype, 0), make((12,), torch.float32, 1)
    groups = {"num_groups": 4, "kept_groups": 2}
    for options in ({"scoring": "softmax_topk"}, {"scoring": "sigmoid", "bias": bias, **groups}):
        ids, weights = kernels.routing(logits, 3, renormalize=True, **options)
        expected = kernels.routing_ref(logits, 3, renormalize=True, **options)
        assert torch.equal(ids, expected[0])
        assert_close(weights, expected[1], torch.float32)
        choice_bias = options.pop("bias", None)
        given = (make((3, 34), dtype, 2), make_weights((12,), 34, dtype, 3)[0], 3, None, choice_bias)
        found, *choice = kernels.router(*given, **options)
        assert_close(found, truth(kernels.router_ref, *given, **options)[0], dtype)
        assert all(map(torch.equal, choice, kernels.routing(found, 3, choice_bias, **options)))
        sorted_pairs = zip(kernels.sort_by_expert(ids, 12), kernels.sort_by_expert_ref(ids, 12), strict=True)
        assert all(torch.equal(a, e) for a, e in sorted_pairs)


def steps(dtype):
    valid = torch.tensor([[0, 9], [4, 7]], dtype=torch.int32)
    heads = make((2, 4, 1, 24), dtype, 0)
    q, new, k, v = (
        heads[:, :2],
        (heads[:, 2:3], heads[:, 3:]),
        *(make((2, 1, 9, 24), dtype, i) for i in (1, 2)),
    )
    tables = (make((9, 16), torch.float32, 3), make((9, 16), torch.float32, 4))
    options = {"sm_scale": 0.3, "kv_range": valid, "softcap": 2.0, "sinks": make((2,), dtype, 5)}
    for interleaved in (False, True):
        prologue = kernels.Prologue(
            make((24,), dtype, 6), make((24,), dtype, 7), 1e-6, 0.0, *tables, interleaved
        )
        op = next(op for op in kernels.OPS if op.name == "decode_attention")
        with pin(op, {"SPLITS": 1 + interleaved}):
            check("decode_attention", dtype, q, k, v, new=new, prologue=prologue, **options)
        places = torch.tensor([[3], [-1]])
        check("qkv_post", dtype, q, *new, k, v, places, prologue, kv_range=valid)
    places, rows = torch.tensor([[3, 4, 5]]), torch.tensor([0, 1, 1])
    x = make((1, 4, 3, 24), dtype, 8)
    check("qkv_post", dtype, x[:, :2], x[:, 2:3], x[:, 3:], k, v, places, prologue, rows=rows, kv_range=valid)
    q_range = torch.tensor([[0, 1], [1, 3]], dtype=torch.int32)
    packed = {"q_range": q_range, "max_queries": 2, "is_causal": True}
    check("attention", dtype, x[:, :2], k, v, **packed, **options)
    check("attention", dtype, q, k, v, is_causal=True, alibi=kernels.alibi_slopes(2), **options)


def advances(dtype):
    for eos in (None, torch.tensor([4, 5, 6])):
        memory = {
            "token": torch.tensor([5, 3, 6]),
            "finished": torch.tensor([False, True, False]),
            "kv_range": torch.tensor([[0, 3], [1, 4], [2, 5]], dtype=torch.int32),
            "sequences": torch.zeros(3, 4, dtype=torch.int64),
            "length": torch.tensor([1, 3, 4]),
        }
        expected = {name: x.clone() for name, x in memory.items()}
        kernels.advance(**memory, eos=eos, pad=7)
        kernels.advance_ref(**expected, eos=eos, pad=7)
        assert all(torch.equal(memory[name], expected[name]) for name in memory), memory


ELEMENTWISE = (norms, activations, positions)
CASES = {
    f"{case.__name__} {str(dtype).removeprefix('torch.')}": partial(case, dtype)
    for case in (
        norms,
        activations,
        positions,
        products,
        quantised,
        attentions,
        experts,
        choices,
        steps,
        tokens,
        advances,
    )
    for dtype in DTYPES
}


def main():
    """Print one verdict a case."""
    assert backend.kind() == "interpreter", backend.kind()
    for name, case in CASES.items():
        try:
            case()
            print(f"{name}: ok")
        except AssertionError as error:
            print(f"{name}: {error}")


if __name__ == "__main__":
    main()
