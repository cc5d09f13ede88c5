"""Element offsets beyond 2**31: memory that is reserved but, except for a few pages, never touched."""

import mmap
import sys

import pytest
import torch

from tests.strategies import assert_close, make, truth
from trinfer.kernels import (
    Norm,
    Prologue,
    Table,
    advance,
    attention,
    attention_ref,
    decode_attention,
    embedding,
    gated_activation,
    gemv,
    grouped_gemv,
    grouped_matmul,
    gumbel,
    layer_norm,
    lm_head,
    matmul,
    qkv_post,
    quant_gemv,
    quant_matmul,
    quantize,
    rms_norm,
    rotary,
    softmax,
    sort_by_expert,
)

STRIDE = 2**31 + 16
# Linux: reserve addresses without promising memory; Python 3.13 is the first to name it
MAP_NORESERVE = 0x4000


def far_apart(rows, dim=0, stride=STRIDE):
    """The slices of `rows` along `dim`, `stride` elements away from each other."""
    slices = rows.unbind(dim)
    elements = stride * (len(slices) - 1) + slices[0].numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = torch.frombuffer(mmap.mmap(-1, elements * rows.element_size(), flags=flags), dtype=rows.dtype)
    strides = list(slices[0].contiguous().stride())
    strides.insert(dim, stride)
    x = memory.as_strided(rows.shape, strides)
    x.copy_(rows)
    return x


@pytest.mark.skipif(sys.platform != "linux", reason="reserves memory without using it")
class TestOffsetsBeyond32Bits:
    x = make((2, 3, 48), torch.float16, 0)
    w = make((3, 48), torch.float16, 1)

    def test_u018_norms_and_activations(self):
        x, far = self.x[:, 0], far_apart(self.x[:, 0])
        w = self.w[0]
        assert torch.equal(rms_norm(far, w, 1e-6, residual=far)[0], rms_norm(x, w, 1e-6, residual=x)[0])
        assert torch.equal(
            layer_norm(far, w, w, 1e-6, residual=far)[0], layer_norm(x, w, w, 1e-6, residual=x)[0]
        )
        assert torch.equal(gated_activation(far, far, "silu"), gated_activation(x, x, "silu"))

    def test_u018_products_of_small_strides(self):
        # each factor fits 32 bits, row times stride does not: 319 * 7,864,320 = 2,508,718,080
        x, w = make((320, 48), torch.float16, 2), self.w
        far = far_apart(x, 0, 7_864_320)
        ids = torch.tensor([0, 319, 280])
        assert torch.equal(embedding(ids, far), x[ids])
        assert torch.equal(rms_norm(far, w[0], 1e-6), rms_norm(x, w[0], 1e-6))
        assert torch.equal(matmul(far, w), matmul(x, w))
        assert torch.equal(matmul(w, far), matmul(w, x))
        assert torch.equal(gemv(w, far), gemv(w, x))
        codes, scale = quantize(x)
        assert all(map(torch.equal, quantize(far), (codes, scale)))
        far_codes = far_apart(codes, 0, 7_864_320)
        assert torch.equal(quant_gemv(w, far_codes, scale), quant_gemv(w, codes, scale))
        assert torch.equal(quant_matmul(w, far_codes, scale), quant_matmul(w, codes, scale))
        q, k, cache = w[None, None, :1], x[None, None], far[None, None]
        expected = decode_attention(q, k, k, sm_scale=0.2)
        assert torch.equal(decode_attention(q, cache, cache, sm_scale=0.2), expected)
        options = {"sm_scale": 0.2, "is_causal": True}
        assert torch.equal(attention(cache, cache, cache, **options), attention(k, k, k, **options))

    def test_u018_embedding(self):
        ids = torch.tensor([2, 0, 1])
        assert torch.equal(embedding(ids, far_apart(self.w)), self.w[ids])
        table = Table(far_apart(self.w), ids)
        y = embedding(ids, self.w, types=table, positions=table)
        assert torch.equal(y, self.w[ids] + self.w[ids] + self.w[ids])

    def test_u018_sequences(self):
        sequences = far_apart(torch.zeros(2, 3, dtype=torch.int64))
        token, kv_range = torch.tensor([5, 6]), torch.zeros(2, 2, dtype=torch.int32)
        advance(token, torch.zeros(2, dtype=torch.bool), kv_range, sequences, torch.tensor([0, 2]))
        assert sequences.tolist() == [[5, 0, 0], [0, 0, 6]]

    def test_u018_products(self):
        x, w = self.x[:, 0], self.w
        assert torch.equal(matmul(far_apart(x), w), matmul(x, w))
        # one row a block, so that the second block starts beyond 2**31
        y = torch.nn.functional.linear(x.double(), w.double())
        assert_close(gemv(x, far_apart(w)), y, torch.float16)
        assert_close(matmul(x, far_apart(w)), y, torch.float16)
        assert_close(lm_head(x, far_apart(w))[0], y, torch.float16)
        norm = Norm(w[0])
        assert torch.equal(matmul(far_apart(x), w, norm=norm), matmul(x, w, norm=norm))
        assert torch.equal(gemv(far_apart(x), w, norm=norm), gemv(x, w, norm=norm))

    def test_u018_rows_of_logits(self):
        x, far = self.x[:, 0], far_apart(self.x[:, 0])
        assert torch.equal(softmax(far), softmax(x))
        seed = torch.tensor([1])
        assert torch.equal(gumbel(far, 1.0, seed, seed), gumbel(x, 1.0, seed, seed))

    def test_u018_experts(self):
        # the second of two experts starts beyond 2**31, as those of large models do
        x, w, ids = (
            self.x[:, 0],
            make((2, 5, 48), torch.float16, 3),
            torch.tensor([[1], [0]], dtype=torch.int32),
        )
        far, routed = far_apart(w), sort_by_expert(ids, 2)
        assert torch.equal(grouped_gemv(x, far, ids), grouped_gemv(x, w, ids))
        assert torch.equal(grouped_matmul(x, far, *routed), grouped_matmul(x, w, *routed))

    def test_u018_rotary(self):
        q, cos = self.x[None].repeat(2, 1, 1, 1), self.w[None]
        expected = rotary(q, q, cos, cos)
        for dim in (0, 1, 2):
            far = far_apart(q, dim)
            for y, e in zip(rotary(far, far, cos, cos), expected, strict=True):
                assert torch.equal(y, e)

    @pytest.mark.parametrize("dim", [0, 1, 2])
    def test_u018_new_keys_and_values(self, dim):
        heads = make((2, 2, 3, 48), torch.float16, 3)
        tables = make((2, 4, 48), torch.float32, 4)
        prologue = Prologue(self.w[0], self.w[1], 1e-6, 0.0, *tables)
        k = make((2, 2, 4, 48), torch.float16, 5)
        kv_range, places = torch.tensor([[0, 4], [1, 3]], dtype=torch.int32), torch.tensor([[0, 1, 2]] * 2)
        results = []
        for move in (lambda x: x.clone(), lambda x: far_apart(x, dim)):
            x, caches = move(heads), [move(k), move(k)]
            q = qkv_post(x, x, x, *caches, places, prologue, kv_range=kv_range)
            packed, rows = x[1:], torch.tensor([1, 0, 1])
            q_packed = qkv_post(*(packed,) * 3, *caches, places[1:], prologue, rows=rows, kv_range=kv_range)
            one = x[:, :, 1:2]
            options = {"sm_scale": 0.2, "kv_range": kv_range, "prologue": prologue}
            o = decode_attention(one, *caches, new=(one, one), **options)
            results.append((q, q_packed, o, *(cache.clone() for cache in caches)))
        for near, far in zip(*results, strict=True):
            assert torch.equal(near, far)

    @pytest.mark.parametrize("dim", [0, 1, 2])
    def test_u018_attention(self, dim):
        q, k, v = (make((2, 2, n, 48), torch.float16, n) for n in (3, 4, 5))
        k = v = v[:, :, :4]
        options = {"sm_scale": 0.2, "is_causal": True}
        expected = truth(attention_ref, q, k, v, **options)
        far = far_apart(k, dim)
        assert_close(attention(far_apart(q, dim), far, far, **options), expected, torch.float16)
        packed, valid = far_apart(q[1:], max(dim, 1)), torch.tensor([[0, 4]] * 2, dtype=torch.int32)
        q_range = torch.tensor([[0, 0], [0, 3]], dtype=torch.int32)
        o = attention(packed, far, far, kv_range=valid, q_range=q_range, max_queries=3, **options)
        assert_close(o, expected[1:], torch.float16)
        last = far_apart(q[:, :, 2:], min(dim, 1))
        assert_close(decode_attention(last, far, far, sm_scale=0.2), expected[:, 2:], torch.float16)
