"""Inputs of ops over experts."""

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies import make

ORDERS = ("fused", "interleaved", "columns", "alternate")
"""Gate and up are halves of one parameter, its alternate rows, or columns of one stored [E, K, 2N]: halves
of them, or alternate ones."""


class Variant(NamedTuple):
    """What makes a compiled kernel; sizes are multiples of 16, or those plus 7."""

    dtype: torch.dtype
    order: str
    act: str
    gated: bool
    top_k: int
    E: int
    extra: int

    def weight_and_options(self, N: int, K: int, seed: int) -> tuple[Any, dict[str, Any]]:
        """The weights, and the activation with its biases."""
        weights = make_experts(self.E, N, K, self.dtype, seed, self.order)
        options: dict[str, Any] = {"act": self.act, "gated": self.gated}
        if self.act != "none":
            bias = make((self.E, N), self.dtype, seed + 3, "sliced")
            up_bias = None if self.order == "fused" else make((self.E, N), self.dtype, seed + 4, "sliced")
            options["bias"] = (bias, up_bias) if self.gated else bias
        return weights if self.gated else weights[1], options


VARIANTS = (
    Variant(torch.float32, "fused", "silu", True, 2, 5, 7),
    Variant(torch.float32, "columns", "none", False, 1, 5, 7),
    Variant(torch.float16, "interleaved", "gelu", True, 4, 60, 0),
    Variant(torch.bfloat16, "fused", "relu", False, 2, 60, 7),
    Variant(torch.bfloat16, "columns", "silu", True, 4, 5, 0),
    Variant(torch.float32, "alternate", "swiglu_clamped", True, 2, 5, 7),
)
cases = st.tuples(st.sampled_from(VARIANTS), st.integers(1, 7), st.integers(1, 7)).map(
    lambda drawn: (drawn[0], *(16 * n + drawn[0].extra for n in drawn[1:]))
)
"""(variant, N, K)"""


def make_experts(
    E: int, N: int, K: int, dtype: torch.dtype, seed: int, order: str = "fused"
) -> tuple[Tensor, Tensor]:
    """Gate and up weights [E, N, K] as views of one parameter, scaled so that products stay near 1."""
    if order in ("columns", "alternate"):
        both = make((E, K, 2 * N), dtype, seed, scale=K**-0.5).transpose(1, 2)
    else:
        both = make((E, 2 * N, K), dtype, seed, scale=K**-0.5)
    alternates = order in ("interleaved", "alternate")
    return (both[:, ::2], both[:, 1::2]) if alternates else (both[:, :N], both[:, N:])


def make_ids(T: int, top_k: int, E: int, seed: int, stray: bool = False) -> Tensor:
    """[T, top_k] experts, a few of them crowded, others empty; `stray`: some ids that are no expert."""
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(T, top_k, generator=generator) ** 2 * (E + (E // 3 + 1) * stray)).long()
    return torch.where(ids % 5 == 3, -1, ids).int() if stray else ids.int()


def check_dense(ids: Tensor, x: Tensor, weights: tuple[Tensor, ...], act: str) -> Tensor:
    """[T, top_k, N] in float64: every token through every expert, of which it takes its own."""
    every = [torch.einsum("tk,enk->ten", x.double(), w.double()) for w in weights]
    gate = torch.nn.functional.silu(every[0]) if act == "silu" else every[0]
    y = gate * every[1] if len(weights) == 2 else gate
    return y.gather(1, ids.long()[..., None].expand(-1, -1, y.shape[-1]))
