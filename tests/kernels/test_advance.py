"""advance against its reference, and against the greedy loop that it stands for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import seeds, sizes
from trinfer.autotune import pin
from trinfer.kernels import OPS, advance, advance_ref, count_launches

OP = next(op for op in OPS if op.name == "advance")
NAMES = OP.writes
batches = sizes(0, 20)
columns = sizes(1, 40)
# None, or the number of tokens that end a sequence: two compiled kernels, and one without
ends = st.sampled_from([None, 1, 2, 3, 16, 17])


def draw(B, S, E, seed, finished=torch.bool, length=torch.int64):
    """Tokens of a small vocabulary, so that some end their sequence, and lengths around the buffer's ends."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, shape, dtype=torch.int64):
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    margins = torch.full((B, S + 3), -7)
    return {
        "token": integers(0, 7, (B,)),
        "finished": integers(0, 2, (B,), finished),
        "kv_range": integers(0, 50, (B, 2), torch.int32),
        "sequences": margins[:, 1 : S + 1],
        "length": integers(-2, S + 2, (B,), length),
        "eos": None if E is None else integers(0, 7 * E, (E,)),
        "pad": seed % 5 - 1,
    }


def copies(state):
    """The same values in other memory; of sequences, with what lies around them."""
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in state.items()}


@given(
    batches,
    columns,
    ends,
    st.sampled_from([torch.bool, torch.uint8]),
    st.sampled_from([torch.int32, torch.int64]),
    seeds,
)
def test_advance_matches_ref(B, S, E, finished, length, seed):
    actual = draw(B, S, E, seed, finished, length)
    expected = copies(actual)
    margins = actual["sequences"].untyped_storage()
    with count_launches() as launches:
        token = advance(**actual)
    assert launches == ({"advance": 1} if B else {})
    assert token is actual["token"]
    assert advance_ref(**expected) is expected["token"]
    for name in NAMES:
        assert actual[name].dtype == expected[name].dtype
        assert torch.equal(actual[name], expected[name]), name
    around = torch.tensor([], dtype=torch.int64).set_(margins).view(B, S + 3)
    assert (around[:, [0, -2, -1]] == -7).all()


@given(sizes(1, 9), sizes(1, 12), st.sampled_from([None, 1, 3]), seeds)
def test_advance_is_the_greedy_loop_of_transformers(B, S, E, seed):
    chosen = torch.randint(0, 7, (S, B), generator=torch.Generator().manual_seed(seed))
    eos, pad = None if E is None else torch.arange(E), 99
    # what the loop of transformers does, over a growing tensor
    input_ids, unfinished = torch.zeros(B, 1, dtype=torch.int64), torch.ones(B, dtype=torch.int64)
    for next_tokens in chosen:
        if eos is not None:
            next_tokens = next_tokens * unfinished + pad * (1 - unfinished)
        input_ids = torch.cat([input_ids, next_tokens[:, None]], dim=-1)
        if eos is not None:
            unfinished = unfinished & ~torch.isin(input_ids[:, -1], eos)
    state = draw(B, S + 1, E, seed) | {"eos": eos, "pad": pad}
    state |= {"finished": torch.zeros(B, dtype=torch.bool), "length": torch.ones(B, dtype=torch.int64)}
    state["sequences"].zero_()
    first = state["kv_range"].clone()
    for next_tokens in chosen:
        state["token"].copy_(next_tokens)
        advance(**state)
    assert torch.equal(state["sequences"], input_ids)
    assert torch.equal(state["token"], input_ids[:, -1])
    assert torch.equal(state["finished"], unfinished == 0)
    assert torch.equal(state["kv_range"] - first, torch.tensor([[0, S]]).expand(B, 2).int())


def test_advance_beyond_the_last_column_writes_nothing_there():
    state = draw(3, 4, None, 0) | {
        "finished": torch.zeros(3, dtype=torch.uint8),
        "token": torch.ones(3).long(),
    }
    state["length"] = torch.tensor([3, 4, 2**40])
    advance(**state)
    assert state["sequences"].tolist() == [[-7, -7, -7, 1], [-7] * 4, [-7] * 4]
    assert state["length"].tolist() == [4, 5, 2**40 + 1]


@pytest.mark.parametrize("config", [{"num_warps": 2}, {"BLOCK_E": 64}])
def test_advance_is_right_in_every_configuration(config):
    actual = draw(5, 9, 3, 1)
    expected = copies(actual)
    with pin(OP, config):
        advance(**actual)
    advance_ref(**expected)
    assert all(torch.equal(actual[name], expected[name]) for name in NAMES)


def test_advance_refuses_what_does_not_fit():
    state = draw(4, 5, 2, 0)
    with pytest.raises(ValueError, match=r"token is \(4,\) torch.int32 .* - allowed: \(4,\) torch.int64"):
        advance(**state | {"token": state["token"].int()})
    with pytest.raises(
        ValueError, match=r"finished is \(3,\) torch.bool .* torch.bool or torch.uint8, contig"
    ):
        advance(**state | {"finished": state["finished"][:3]})
    with pytest.raises(ValueError, match=r"kv_range is \(4, 2\) torch.int32 with strides \(1, 4\) - allowed"):
        advance(**state | {"kv_range": torch.zeros(2, 4, dtype=torch.int32).T})
    with pytest.raises(ValueError, match=r"length is \(1,\) torch.int64 .* - allowed: \(4,\) torch.int32 or"):
        advance(**state | {"length": state["length"][:1]})
    with pytest.raises(ValueError, match=r"sequences are \(3, 5\) torch.int64 .* - allowed: \[4, S\]"):
        advance(**state | {"sequences": state["sequences"][:3]})
    with pytest.raises(ValueError, match=r"eos is \(0,\) torch.int64 - allowed: \[E\] torch.int64 with 1"):
        advance(**state | {"eos": state["eos"][:0]})
