"""Bound forwards: that kernels do all the arithmetic in them, and what the mask function hands them."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import DEVICE, ZOO, engine_of, inputs_of, left_padded, make
from trinfer import ARCHITECTURES, backend
from trinfer.compat import cache_key
from trinfer.kernels import count_launches
from trinfer.layers.attention import attention_function
from trinfer.layers.mask import mask_function

# what may run in torch inside a swapped module: looking at tensors, allocating, moving; no arithmetic
HARMLESS = {
    "_local_scalar_dense",
    "alias",
    "aminmax",
    "as_strided",
    "cat",
    "clone",
    "contiguous",
    "copy_",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "lift_fresh",
    "new_empty",
    "permute",
    "reshape",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unflatten",
    "unsqueeze",
    "view",
    "_reshape_alias",
    "_unsafe_view",
    "zeros",
}


class OpsInside(TorchDispatchMode):
    """Collects the aten ops that run while any of the watched modules is in its forward."""

    def __init__(self, model: nn.Module, paths: list[str]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.depth = 0
        for path in paths:
            module = model.get_submodule(path)
            module.register_forward_pre_hook(lambda *_: self.enter(1))
            module.register_forward_hook(lambda *_: self.enter(-1))

    def enter(self, by: int) -> None:
        self.depth += by

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth:
            self.found.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(backend.kind() == "reference", reason="references are made of the ops this looks for")
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_only_kernels_compute_inside_swapped_modules(name: str) -> None:
    engine = engine_of(make(name))
    whole = [step.path for step in engine.plan.swapped if step.forward == "block"]
    apart = [step.path for step in engine.plan.swapped if not step.path.startswith(tuple(whole))]
    # hooks inside a whole layer would make it run part by part
    ops = OpsInside(engine.module, [*whole, *apart])
    ids, mask = left_padded([40, 7])
    # transformers' cache works in torch
    options = {"use_cache": False} if name == "llama" else {}
    # the first launch of a shape may compile and measure in torch
    engine(ids, attention_mask=mask, **options)
    ops.found.clear()
    with count_launches() as launches, ops:
        engine(ids, attention_mask=mask, **options)
        engine(ids, **options)
    assert not ops.found - HARMLESS
    layers, forwards = 2, 2
    products = {"llama": 4 * layers + 1, "bert": 4 * layers + 2}[name]
    expected = {
        "llama": {"rms_norm": 2 * layers + 1, "rotary": layers, "attention": layers, "embedding": 1},
        "bert": {"layer_norm": 2 * layers + 2, "attention": layers, "embedding": 3, "activation": 1},
    }[name] | {"matmul": products}
    assert launches == {op: forwards * count for op, count in expected.items()}


# what no kernel takes over: an inverted mask
BESIDE = {"mpt": {"bitwise_not"}}
if cache_key() != "cache":
    # in transformers 5.17 these look their rotary tables up inside
    BESIDE |= {"gptj": {"index"}, "codegen": {"index"}}


@pytest.mark.skipif(backend.kind() == "reference", reason="references are made of the ops this looks for")
@pytest.mark.parametrize("name", [name for name, (row, _, _) in ZOO.items() if row in ARCHITECTURES])
def test_only_kernels_compute_inside_the_parts_of_every_row(name: str) -> None:
    engine = engine_of(make(name))
    # hooks inside a whole layer make it run part by part
    parts = [step.path for step in engine.plan.swapped if step.forward != "block"]
    ops = OpsInside(engine.module, parts)
    inputs = inputs_of(name, 2, 33)
    engine(**inputs)
    ops.found.clear()
    with ops:
        engine(**inputs)
    assert ops.found - HARMLESS == BESIDE.get(name, set())


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU would have to be waited for")
def test_ids_outside_the_table_raise() -> None:
    engine = engine_of(make("llama"))
    with pytest.raises(IndexError, match="ids from 5 to 99 in a table of 99 rows; allowed: 0 to 98"):
        engine(torch.tensor([[5, 99]], device=DEVICE))


def test_forwards_accept_arguments_of_other_versions() -> None:
    engine = engine_of(make("llama"))
    layer = engine.module.model.layers[0]
    hidden = torch.randn(1, 3, 72, device=DEVICE)
    table = engine.module.model.rotary_emb(hidden, torch.arange(3, device=DEVICE)[None])
    out, weights = layer.self_attn(
        hidden_states=hidden,
        position_embeddings=table,
        attention_mask=None,
        past_key_values=None,
        cache_position=torch.arange(3),
        something_new=1,
    )
    assert out.shape == hidden.shape
    assert weights is None


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([[1, 1, 1], [1, 1, 1]], None),
        ([[0, 1, 1], [1, 1, 1]], [[1, 3], [0, 3]]),
        ([[1, 1, 0], [0, 1, 0]], [[0, 2], [1, 2]]),
        ([[0, 0, 0], [1, 1, 1]], [[0, 0], [0, 3]]),
    ],
)
def test_mask_function_gives_ranges(mask: list[list[int]], expected: list[list[int]] | None) -> None:
    bounds = mask_function(2, 3, 3, attention_mask=torch.tensor(mask, dtype=torch.bool))
    assert expected is None if bounds is None else bounds.tolist() == expected
    assert bounds is None or bounds.dtype == torch.int32


@given(rows=st.integers(1, 3), keys=st.integers(1, 9), queries=st.integers(1, 9), data=st.data())
def test_mask_function_says_what_the_mask_says(
    rows: int, keys: int, queries: int, data: st.DataObject
) -> None:
    queries = min(queries, keys)
    bits = data.draw(st.lists(st.booleans(), min_size=rows * keys, max_size=rows * keys))
    mask = torch.tensor(bits).view(rows, keys)
    found = mask_function(rows, queries, keys, q_offset=keys - queries, attention_mask=mask)
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if found is not None and found.dim() == 4:
        assert torch.equal(found[:, 0], mask[:, None] & causal)
        return
    key = torch.arange(keys)
    valid = mask if found is not None else torch.ones_like(mask)
    bounds = torch.tensor([[0, keys]] * rows) if found is None else found
    assert torch.equal((key >= bounds[:, :1]) & (key < bounds[:, 1:]), valid)
    assert torch.equal(valid, mask)


def test_mask_function_falls_back_to_a_full_mask() -> None:
    hole = torch.tensor([[1, 0, 1]], dtype=torch.bool)
    full = mask_function(1, 3, 3, attention_mask=hole)
    assert full.tolist() == [[[[True, False, False], [True, False, False], [True, False, True]]]]
    # the last query is not at the last key: start and end cannot say where it is
    static = mask_function(1, 1, 4, q_offset=1)
    assert static.tolist() == [[[[True, True, False, False]]]]
    short = mask_function(1, 1, 3, q_offset=2, attention_mask=torch.ones(1, 2, dtype=torch.bool))
    assert short.tolist() == [[0, 2]]


@pytest.mark.parametrize("bias", [True, False])
def test_patches_are_products(bias: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 10, (4, 2), stride=(4, 2), bias=bias)).eval().to(DEVICE)
    # rows and columns that fill no window are left out
    image = torch.randn(2, 3, 15, 9, device=DEVICE)
    expected = model.double()(image.double()).float()
    engine = engine_of(model.float())
    with count_launches() as launches:
        patches = engine(image)
    assert launches == {"matmul": 1}
    assert patches.shape == expected.shape
    assert torch.allclose(patches, expected, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"stride": 3}, {"stride": 4, "padding": 1}, {"stride": 4, "groups": 2}, {"stride": 4, "dilation": 2}],
)
def test_other_convolutions_stay(options: dict[str, int]) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 4, **options), nn.Flatten(), nn.LazyLinear(3)).eval().to(DEVICE)
    image = torch.randn(1, 4, 13, 13, device=DEVICE)
    expected = model(image).detach()
    engine = engine_of(model)
    assert torch.allclose(engine(image), expected, atol=1e-5)
    assert [entry.why for entry in engine.plan.kept if entry.path == "0"] == [
        "its windows overlap, or leave gaps"
    ]


@pytest.mark.parametrize("kind", ["none", "range", "bool", "float"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_with_a_position_bias_and_a_mask_of_any_kind(dtype: torch.dtype, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 16, generator=generator).to(DEVICE, dtype) for _ in range(3))
    bias = 40 * torch.randn(1, 3, 7, 7, generator=generator).to(DEVICE, dtype)
    valid = torch.tensor([[1] * 7, [0, 0, 0, 1, 1, 1, 1]], dtype=torch.bool, device=DEVICE)
    causal = torch.ones(7, 7, dtype=torch.bool, device=DEVICE).tril()
    allowed = (causal & valid[:, None]) if kind != "none" else causal.expand(2, 7, 7)
    masks = {
        "none": None,
        "range": torch.tensor([[0, 7], [3, 7]], dtype=torch.int32, device=DEVICE),
        "bool": allowed[:, None],
        "float": torch.zeros_like(allowed[:, None], dtype=dtype).masked_fill(
            ~allowed[:, None], torch.finfo(dtype).min
        ),
    }
    module = nn.Module()
    out, _ = attention_function(module, q, k, v, masks[kind], scaling=1.0, position_bias=bias)
    scores = q.double() @ k.double().transpose(-1, -2) + bias.double()
    weights = scores.masked_fill(~allowed[:, None], float("-inf")).softmax(-1)
    # a row that may attend to nothing gives zeros
    truth = (weights.nan_to_num(0) @ v.double()).transpose(1, 2)
    assert bool(out.isfinite().all())
    assert float((out.double() - truth).abs().max()) <= {torch.float32: 1e-5, torch.float16: 5e-3}[dtype]
