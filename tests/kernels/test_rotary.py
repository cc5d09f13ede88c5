"""rotary against its reference, and the laws of a rotation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import DTYPES, assert_close, dtypes, layouts, make, seeds, sizes, truth
from trinfer.kernels import count_launches, rotary, rotary_ref

# (head dim, rotated entries); each is a compiled kernel
heads = st.sampled_from([(64, 64), (64, 16), (80, 32), (96, 96)])


def table(positions, R, interleaved):
    """Cos and sin [1, M, R] in float32 as HF lays them out."""
    angles = positions[:, None].double() / 10000 ** (torch.arange(R // 2).double() / (R // 2))
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return angles.cos().float()[None], angles.sin().float()[None]


@given(
    dtypes, sizes(1, 3), sizes(1, 9), sizes(1, 3), sizes(1, 33), heads, st.booleans(), layouts, layouts, seeds
)
def test_rotary_matches_ref(dtype, B, H, G, M, head, interleaved, q_layout, k_layout, seed):
    D, R = head
    q, k = make((B, H, M, D), dtype, seed, q_layout), make((B, G, M, D), dtype, seed + 1, k_layout)
    cos, sin = table(torch.arange(M) + seed % 1000, R, interleaved)
    with count_launches() as launches:
        rotated = rotary(q, k, cos, sin, interleaved=interleaved)
    assert launches == {"rotary": 1}
    for y, x, expected in zip(
        rotated, (q, k), truth(rotary_ref, q, k, cos, sin, interleaved=interleaved), strict=True
    ):
        assert_close(y, expected, dtype)
        assert torch.equal(y[..., R:], x[..., R:])


@given(dtypes, sizes(1, 4), heads, seeds)
def test_rotary_takes_a_table_a_sequence_in_any_dtype(dtype, B, head, seed):
    D, R = head
    q, k = make((B, 3, 5, D), dtype, seed), make((B, 1, 5, D), dtype, seed + 1)
    cos, sin = make((B, 5, R), dtype, seed + 2, "sliced"), make((B, 5, R), dtype, seed + 3)
    for y, expected in zip(rotary(q, k, cos, sin), truth(rotary_ref, q, k, cos, sin), strict=True):
        assert_close(y, expected, dtype)


@given(sizes(1, 33), heads, st.booleans(), seeds)
def test_rotary_preserves_norms(M, head, interleaved, seed):
    D, R = head
    q = make((1, 2, M, D), torch.float32, seed)
    y, _ = rotary(q, q, *table(torch.arange(M) * 37, R, interleaved), interleaved=interleaved)
    assert_close(y.norm(dim=-1), q.double().norm(dim=-1), torch.float32)


@given(st.integers(0, 4000), st.integers(0, 4000), heads, st.booleans(), seeds)
def test_rotary_scores_depend_on_relative_position_only(position, shift, head, interleaved, seed):
    D, R = head
    q, k = (make((1, 1, 2, D), torch.float32, seed + i) for i in range(2))
    # the same pair of vectors at positions (p, p + 5) and, further on, (p + shift, p + shift + 5)
    q[:, :, 1], k[:, :, 1] = q[:, :, 0], k[:, :, 0]
    at_q, at_k = torch.tensor([position, position + shift]), torch.tensor([position, position + shift]) + 5
    rotated_q, _ = rotary(q, k, *table(at_q, R, interleaved), interleaved=interleaved)
    _, rotated_k = rotary(q, k, *table(at_k, R, interleaved), interleaved=interleaved)
    scores = (rotated_q.double() * rotated_k.double()).sum(-1).flatten()
    assert abs(scores[0] - scores[1]) < 1e-5 * D


@given(sizes(2, 9), heads, seeds)
def test_rotary_permutes_with_heads(H, head, seed):
    D, R = head
    q = make((2, H, 7, D), torch.float32, seed)
    order = torch.randperm(H, generator=torch.Generator().manual_seed(seed))
    cos, sin = table(torch.arange(7), R, False)
    y, same = rotary(q, q, cos, sin)
    assert torch.equal(y, same)
    assert torch.equal(rotary(q[:, order], q, cos, sin)[0], y[:, order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_at_position_zero_and_of_nothing(dtype):
    q, k = make((2, 3, 1, 64), dtype, 0), make((2, 1, 1, 64), dtype, 1)
    cos, sin = table(torch.zeros(1), 64, False)
    rotated_q, rotated_k = rotary(q, k, cos, sin)
    assert torch.equal(rotated_q, q)
    assert torch.equal(rotated_k, k)
    assert rotary(q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0])[0].shape == (2, 3, 0, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("R", [0, 2, 8, 16])
def test_u024_rotary_in_both_layouts_is_a_product_of_complex_numbers(R, dtype):
    q, k = make((2, 5, 3, 16), dtype, 0), make((2, 1, 3, 16), dtype, 1)
    q[..., -1] = -0.0
    angles = torch.arange(3)[:, None] / 10000 ** (torch.arange(R // 2) / max(1, R // 2))
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)
    for interleaved in (False, True):
        cos, sin = table(torch.arange(3), R, interleaved)
        for x, y in zip((q, k), rotary(q, k, cos, sin, interleaved=interleaved), strict=True):
            tails = (z[..., R:].contiguous().view(torch.uint8) for z in (x, y))
            assert torch.equal(*tails), "bits beyond the rotated entries changed"
            if R == 0:
                continue
            head = x[..., :R].double()
            pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).mT
            turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
            turned = turned.flatten(-2) if interleaved else turned.mT.flatten(-2)
            assert_close(y[..., :R], turned, dtype)


def test_rotary_refuses_what_does_not_fit():
    q, k, cos = torch.zeros(2, 3, 5, 8), torch.zeros(2, 1, 5, 8), torch.zeros(1, 5, 8)
    with pytest.raises(ValueError, match=r"q is \(2, 3, 5, 8\), k \(2, 1, 5, 8\), cos \(1, 4, 8\)"):
        rotary(q, k, cos[:, :4], cos[:, :4])
    with pytest.raises(ValueError, match="cos rotates R=16 entries - allowed: even numbers up to D=8"):
        rotary(q, k, torch.zeros(1, 5, 16), torch.zeros(1, 5, 16))
