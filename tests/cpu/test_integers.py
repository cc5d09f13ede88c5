"""Integer arithmetic of every width: it wraps, shifts, divides and compares as numpy does."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.cpu.arrays import poisoned

TYPES = [
    *(np.int8, np.int16, np.int32, np.int64),
    *(np.uint8, np.uint16, np.uint32, np.uint64),
]
COUNT = 1024


@triton.jit
def _arithmetic_kernel(a_ptr, b_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    a = tl.load(a_ptr + offs_n)
    b = tl.load(b_ptr + offs_n)
    tl.store(y_ptr + 0 * BLOCK_N + offs_n, a + b)
    tl.store(y_ptr + 1 * BLOCK_N + offs_n, a - b)
    tl.store(y_ptr + 2 * BLOCK_N + offs_n, a * b)
    tl.store(y_ptr + 3 * BLOCK_N + offs_n, a & b)
    tl.store(y_ptr + 4 * BLOCK_N + offs_n, a | b)
    tl.store(y_ptr + 5 * BLOCK_N + offs_n, a ^ b)
    tl.store(y_ptr + 6 * BLOCK_N + offs_n, ~a)
    tl.store(y_ptr + 7 * BLOCK_N + offs_n, 0 - a)
    tl.store(y_ptr + 8 * BLOCK_N + offs_n, tl.abs(a))
    tl.store(y_ptr + 9 * BLOCK_N + offs_n, tl.maximum(a, b))
    tl.store(y_ptr + 10 * BLOCK_N + offs_n, tl.minimum(a, b))
    tl.store(y_ptr + 11 * BLOCK_N + offs_n, a * a * b + a)


def operands(kind: type, seed: int) -> np.ndarray:
    """Random bits, and in front every pair of extreme values."""
    info, random = np.iinfo(kind), np.random.default_rng(seed)
    ends = np.array([info.min, info.min + 1, 0, 1, 2, info.max - 1, info.max, 5], dtype=kind)
    pairs = np.repeat(ends, 8) if seed == 0 else np.tile(ends, 8)
    return np.concatenate([pairs, random.integers(info.min, info.max, COUNT - 64, kind, endpoint=True)])


@pytest.mark.parametrize("kind", TYPES)
def test_arithmetic_wraps(kind):
    a, b = operands(kind, 0), operands(kind, 1)
    y = torch.from_numpy(np.empty((12, COUNT), kind))
    _arithmetic_kernel[(1,)](torch.from_numpy(a), torch.from_numpy(b), y, BLOCK_N=COUNT)
    with np.errstate(over="ignore"):
        expected = [a + b, a - b, a * b, a & b, a | b, a ^ b, ~a, 0 - a, np.abs(a)]
        expected += [np.maximum(a, b), np.minimum(a, b), a * a * b + a]
    for row, (actual, wanted) in enumerate(zip(y.numpy(), expected, strict=True)):
        assert np.array_equal(actual, wanted), row


@triton.jit
def _shift_kernel(a_ptr, b_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    a = tl.load(a_ptr + offs_n)
    b = tl.load(b_ptr + offs_n)
    tl.store(y_ptr + offs_n, a << b)
    tl.store(y_ptr + BLOCK_N + offs_n, a >> b)


@pytest.mark.parametrize("kind", TYPES)
def test_shifts(kind):
    a = operands(kind, 0)
    by = (np.arange(COUNT) % (8 * a.itemsize)).astype(kind)
    y = torch.from_numpy(np.empty((2, COUNT), kind))
    _shift_kernel[(1,)](torch.from_numpy(a), torch.from_numpy(by), y, BLOCK_N=COUNT)
    assert np.array_equal(y[0].numpy(), a << by)
    assert np.array_equal(y[1].numpy(), a >> by)


@triton.jit
def _divide_kernel(a_ptr, b_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    a = tl.load(a_ptr + offs_n)
    b = tl.load(b_ptr + offs_n)
    tl.store(y_ptr + offs_n, a // b)
    tl.store(y_ptr + BLOCK_N + offs_n, a % b)
    tl.store(y_ptr + 2 * BLOCK_N + offs_n, a // 7)


@pytest.mark.parametrize("kind", TYPES)
def test_division_truncates_and_never_traps(kind):
    a, b = operands(kind, 0), operands(kind, 1)
    y = torch.from_numpy(np.empty((3, COUNT), kind))
    _divide_kernel[(1,)](torch.from_numpy(a), torch.from_numpy(b), y, BLOCK_N=COUNT)
    seven = kind(7)
    with np.errstate(over="ignore", divide="ignore"):
        quotient, rest = np.fmod(a, b), np.fmod(a, b)
        quotient, by_seven = (a - rest) // b, (a - np.fmod(a, seven)) // seven
    # what a division by 0 gives is nowhere promised, only that the program goes on
    whole = b != 0
    assert np.array_equal(y[0].numpy()[whole], quotient[whole])
    assert np.array_equal(y[1].numpy()[whole], rest[whole])
    assert np.array_equal(y[2].numpy(), by_seven)


@triton.jit
def _compare_kernel(a_ptr, b_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    a = tl.load(a_ptr + offs_n)
    b = tl.load(b_ptr + offs_n)
    bits = (a < b).to(tl.int32) + 2 * (a <= b).to(tl.int32) + 4 * (a > b).to(tl.int32)
    bits += 8 * (a >= b).to(tl.int32) + 16 * (a == b).to(tl.int32) + 32 * (a != b).to(tl.int32)
    tl.store(y_ptr + offs_n, bits)


@pytest.mark.parametrize("kind", TYPES)
def test_comparisons(kind):
    a, b = operands(kind, 0), operands(kind, 1)
    y = poisoned(COUNT, dtype=torch.int32)
    _compare_kernel[(1,)](torch.from_numpy(a), torch.from_numpy(b), y, BLOCK_N=COUNT)
    truths = [a < b, a <= b, a > b, a >= b, a == b, a != b]
    assert np.array_equal(y.numpy(), sum(t.astype(np.int32) << k for k, t in enumerate(truths)))


@triton.jit
def _cast_kernel(x_ptr, i8, i16, i32, i64, u8, u16, u32, u64, f32, f64, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_n)
    tl.store(i8 + offs_n, x.to(tl.int8))
    tl.store(i16 + offs_n, x.to(tl.int16))
    tl.store(i32 + offs_n, x.to(tl.int32))
    tl.store(i64 + offs_n, x.to(tl.int64))
    tl.store(u8 + offs_n, x.to(tl.uint8))
    tl.store(u16 + offs_n, x.to(tl.uint16))
    tl.store(u32 + offs_n, x.to(tl.uint32))
    tl.store(u64 + offs_n, x.to(tl.uint64))
    tl.store(f32 + offs_n, x.to(tl.float32))
    tl.store(f64 + offs_n, x.to(tl.float64))


@pytest.mark.parametrize("kind", TYPES)
def test_casts_between_integers_and_to_floats(kind):
    x = operands(kind, 0)
    outs = {to: torch.from_numpy(np.empty(COUNT, to)) for to in [*TYPES, np.float32, np.float64]}
    _cast_kernel[(1,)](torch.from_numpy(x), *outs.values(), BLOCK_N=COUNT)
    for to, y in outs.items():
        assert np.array_equal(y.numpy(), x.astype(to)), to


@triton.jit
def _wide_product_kernel(a_ptr, b_ptr, y_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    tl.store(y_ptr + offs_n, tl.umulhi(tl.load(a_ptr + offs_n), tl.load(b_ptr + offs_n)))


@pytest.mark.parametrize("kind", [np.uint32, np.uint64])
def test_upper_half_of_products(kind):
    a, b = operands(kind, 0), operands(kind, 1)
    y = torch.from_numpy(np.empty(COUNT, kind))
    _wide_product_kernel[(1,)](torch.from_numpy(a), torch.from_numpy(b), y, BLOCK_N=COUNT)
    bits = 8 * a.itemsize
    expected = [int(p) * int(q) >> bits for p, q in zip(a, b, strict=True)]
    assert y.numpy().tolist() == expected


@triton.jit
def _hashed_index_kernel(x_ptr, y_ptr, seed, N, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    h = (offs_n + seed) * -1640531535
    h = h ^ (h >> 15)
    h = h * -2048144777
    tl.store(y_ptr + offs_n, tl.load(x_ptr + (h & (N - 1))))
    tl.store(y_ptr + BLOCK_N + offs_n, tl.load(x_ptr + (h.to(tl.uint32) % N.to(tl.uint32)).to(tl.int32)))
    tl.store(y_ptr + 2 * BLOCK_N + offs_n, tl.load(x_ptr + tl.where(h < 0, 0, 1)))


def test_hashes_wrap_also_where_they_end_in_an_address():
    x, y = torch.arange(256.0), poisoned(3, 256)
    _hashed_index_kernel[(1,)](x, y, 12345, 256, BLOCK_N=256)
    with np.errstate(over="ignore"):
        h = (np.arange(256, dtype=np.int32) + np.int32(12345)) * np.int32(-1640531535)
        h = (h ^ (h >> np.int32(15))) * np.int32(-2048144777)
    expected = np.stack([h & 255, h.view(np.uint32) % 256, np.where(h < 0, 0, 1)])
    assert np.array_equal(y.numpy(), expected.astype(np.float32))


@triton.jit
def _bool_kernel(a_ptr, b_ptr, y_ptr, sums_ptr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    a = tl.load(a_ptr + offs_n) != 0
    b = tl.load(b_ptr + offs_n)
    tl.store(y_ptr + offs_n, (a & ~b) | (a ^ b))
    tl.store(sums_ptr, tl.sum(a.to(tl.int32), 0))
    tl.store(sums_ptr + 1, tl.max((a & b).to(tl.int32), 0))
    tl.store(sums_ptr + 2, tl.sum(tl.where(b, a.to(tl.float32), -1.0), 0).to(tl.int32))
    tl.store(sums_ptr + 3, tl.reduce_or(a, 0).to(tl.int32))
    tl.store(sums_ptr + 4, tl.xor_sum(b.to(tl.int32), 0))


def test_booleans():
    random = np.random.default_rng(0)
    a, b = (random.integers(0, 2, 64).astype(bool) for _ in range(2))
    y, sums = poisoned(64, dtype=torch.bool), poisoned(5, dtype=torch.int32)
    _bool_kernel[(1,)](torch.from_numpy(a.astype(np.int8)), torch.from_numpy(b), y, sums, BLOCK_N=64)
    assert np.array_equal(y.numpy(), (a & ~b) | (a ^ b))
    assert sums.tolist() == [a.sum(), (a & b).max(), a[b].sum() - (~b).sum(), 1, b.sum() % 2]
