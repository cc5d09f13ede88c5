"""lm_head against its reference, and its tokens against torch.argmax."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import assert_close, layouts, make, make_weights, seeds, truth
from trinfer.autotune import pin
from trinfer.kernels import OPS, Norm, count_launches, gemv, lm_head, lm_head_ref
from trinfer.kernels.norm_elements import normalise_ref

OP = next(op for op in OPS if op.name == "lm_head")
K = 100
# (dtype, order of the weight, dtype of the logits, option): each is a compiled kernel, twice for more rows
VARIANTS = (
    (torch.float32, "rows", None, "plain"),
    (torch.float32, "columns", None, "norm"),
    (torch.float32, "gaps", None, "cap"),
    (torch.float16, "rows", torch.float32, "norm"),
    (torch.bfloat16, "rows", None, "norm"),
    (torch.bfloat16, "rows", torch.float32, "bias"),
)
variants = st.sampled_from(VARIANTS)
# no multiple of 16, which would be another compiled kernel
odd = st.sampled_from([3, 13, 31, 33, 61, 97, 127, 251, 300])


def make_options(option, V, dtype, seed):
    return {
        "plain": {},
        "norm": {"norm": Norm(make((K,), dtype, seed))},
        "cap": {"softcap": 1.5, "scale": 3.0, "norm": Norm(None, None, 1e-5, "layer")},
        "bias": {"bias": make((V,), dtype, seed), "scale": 0.25},
    }[option]


@given(variants, st.sampled_from([1, 5, 16]), odd, layouts, seeds)
def test_lm_head_matches_ref(variant, M, V, layout, seed):
    dtype, order, logits_dtype, option = variant
    x, (w,) = make((1, M, K), dtype, seed, layout), make_weights((V,), K, dtype, seed + 1, order)
    options = make_options(option, V, dtype, seed + 2)
    with count_launches() as launches:
        logits, token = lm_head(x, w, dtype=logits_dtype, **options)
    assert launches == {"lm_head": 1}
    # the truth of the rows as they are rounded before the product
    rest = {name: value for name, value in options.items() if name != "norm"}
    expected = truth(lm_head_ref, normalise_ref(x, options.get("norm")), w, **rest)[0]
    assert logits.dtype == (logits_dtype or dtype)
    assert_close(logits.to(dtype), expected, dtype)
    assert token.dtype == torch.int64
    assert torch.equal(token, logits.argmax(-1))
    none, same = lm_head(x, w, dtype=logits_dtype, has_logits=False, **options)
    assert none is None
    assert torch.equal(same, token)


@given(st.sampled_from([1, 5, 16]), odd, seeds)
def test_lm_head_takes_the_lowest_of_equal_logits(M, V, seed):
    x, w = make((M, K), torch.float32, seed), make((V, K), torch.float32, seed + 1)
    w = w[torch.randint(0, max(1, V // 3), (V,), generator=torch.Generator().manual_seed(seed))]
    logits, token = lm_head(x, w)
    assert torch.equal(token, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))


@given(st.sampled_from([1, 16]), odd, seeds)
def test_lm_head_ranks_every_float_as_torch_does(M, V, seed):
    # the bias alone decides: the product is 0
    generator = torch.Generator().manual_seed(seed)
    inf, nan = float("inf"), float("nan")
    extremes = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, inf, -inf, nan])
    some = extremes[torch.randperm(len(extremes), generator=generator)[: 1 + seed % 3]]
    bias = some[torch.randint(0, len(some), (V,), generator=generator)]
    x, w = torch.zeros(M, K), torch.zeros(V, K)
    logits, token = lm_head(x, w, bias)
    assert torch.equal(token, logits.argmax(-1))
    assert torch.equal(token, bias.argmax().expand(M))


@given(st.sampled_from([1, 5, 16]), odd, seeds)
def test_lm_head_stores_what_gemv_gives(M, V, seed):
    x, (w,) = make((M, K), torch.float32, seed), make_weights((V,), K, torch.float32, seed + 1)
    assert torch.equal(lm_head(x, w)[0], gemv(x, w))


def test_lm_head_leaves_its_scratch_ready_for_any_batch():
    scratch, memory = torch.zeros(32, dtype=torch.int64), torch.full((16,), -1)
    w = make((333, K), torch.float32, 1)
    for M in (16, 1, 7, 2, 16, 3):
        x = make((M, K), torch.float32, M)
        logits, token = lm_head(x, w, scratch=scratch, out=memory[:M])
        assert token.data_ptr() == memory.data_ptr()
        assert torch.equal(memory[:M], logits.argmax(-1))
        assert not scratch.any()


@pytest.mark.parametrize("op", [lm_head, lm_head_ref])
@pytest.mark.parametrize(("M", "dtype"), [(1, None), (5, torch.float32), (16, None)])
def test_lm_head_writes_logits_where_it_is_told(op, M, dtype):
    x, w = make((M, K), torch.bfloat16, 0), make_weights((333,), K, torch.bfloat16, 1)[0]
    memory = torch.full((M, 333), float("nan"), dtype=dtype or torch.bfloat16)
    logits, token = op(x, w, dtype=dtype, logits=memory)
    assert logits is memory
    expected, same = op(x, w, dtype=dtype)
    assert torch.equal(memory, expected)
    assert torch.equal(token, same)


def test_lm_head_is_right_with_many_threads():
    torch.set_num_threads(4)
    x, w = make((3, K), torch.float32, 0), make((3000, K), torch.float32, 1)
    expected = lm_head_ref(x, w)[1]
    scratch = torch.zeros(6, dtype=torch.int64)
    for _ in range(300):
        assert torch.equal(lm_head(x, w, has_logits=False, scratch=scratch)[1], expected)


def test_lm_head_cap_is_a_tanh_for_every_size():
    bias = torch.cat([torch.linspace(-8, 8, 999), 10.0 ** torch.arange(-30, 30)])
    x, w = torch.zeros(1, 1), torch.zeros(len(bias), 1)
    logits, _ = lm_head(x, w, bias, softcap=1.0)
    assert_close(logits[0], torch.tanh(bias.double()), torch.float32)
    error = (logits[0].double() / torch.tanh(bias.double()) - 1).abs()
    assert error[bias != 0].max() < 1e-6


CONFIGS = [
    {"BLOCK_M": 1, "BLOCK_N": 4, "BLOCK_K": 32, "SPANS_K": False, "BLOCKS": 8},
    {"BLOCK_M": 1, "BLOCK_N": 16, "BLOCK_K": 128, "SPANS_K": True, "BLOCKS": 4},
    {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "SPANS_K": False, "BLOCKS": 3},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS)
def test_lm_head_is_right_in_every_configuration(config, dtype):
    x, w = make((5, K), dtype, 0), make_weights((333,), K, dtype, 1)[0]
    norm = Norm(make((K,), dtype, 2))
    with pin(OP, config):
        logits, token = lm_head(x, w, norm=norm)
    assert_close(logits, truth(lm_head_ref, x, w, norm=norm)[0], dtype)
    assert torch.equal(token, logits.argmax(-1))


def test_lm_head_of_one_word_and_of_nothing():
    assert lm_head(torch.ones(2, 3), torch.ones(1, 3))[1].tolist() == [0, 0]
    logits, token = lm_head(torch.zeros(0, 3, 7), torch.zeros(5, 7))
    assert logits.shape == (0, 3, 5)
    assert token.shape == (0, 3)


def test_lm_head_refuses_what_does_not_fit():
    x, w = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(ValueError, match="x has 17 rows of 8 for a vocabulary of 4 - allowed: up to 16 rows"):
        lm_head(torch.zeros(17, 8), w)
    with pytest.raises(ValueError, match="vocabulary of 0"):
        lm_head(x, w[:0])
    with pytest.raises(ValueError, match="dtype=torch.float16 - allowed: torch.float32"):
        lm_head(x, w, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"scratch is \(3,\) torch.int64 .* - allowed: 4 or more entries"):
        lm_head(x, w, scratch=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"logits is \(2, 3\) torch.float32 .* - allowed: \(2, 4\) torch.float32"
    ):
        lm_head(x, w, logits=torch.zeros(2, 3))
    with pytest.raises(
        ValueError, match=r"logits is \(2, 4\) torch.float16 .* - allowed: \(2, 4\) torch.float32"
    ):
        lm_head(x.half(), w.half(), logits=torch.zeros(2, 4).half(), dtype=torch.float32)
    with pytest.raises(ValueError, match="has_logits=False comes with logits - allowed: one of them"):
        lm_head(x, w, has_logits=False, logits=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="logits shares memory with an argument"):
        lm_head(torch.zeros(1, 8), w, logits=w.view(-1)[:4][None])
    with pytest.raises(ValueError, match=r"out is \(2,\) torch.int32 .* - allowed: \(2,\) torch.int64"):
        lm_head(x, w, out=torch.zeros(2, dtype=torch.int32))
