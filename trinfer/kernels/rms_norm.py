"""Root mean square normalisation, with an optional residual addition before it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trinfer.autotune import Config
from trinfer.kernels.op import Op, nbytes, wide


class Key(NamedTuple):
    """What a launch configuration may depend on."""

    dtype: torch.dtype
    N: int


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    cast: str = "input",
) -> Tensor | tuple[Tensor, Tensor]:
    """y = x / sqrt(mean(x², last) + eps) · (weight + weight_offset).

    Args:
        x: [..., N] float16|bfloat16|float32, any strides (copied unless rows are contiguous).
        weight: [N].
        eps: added inside the root.
        residual: like x; then h = x + residual, rounded to x.dtype, is what is normalised.
        weight_offset: 1.0 for models that store weight - 1 (Gemma).
        cast: "input" rounds to x.dtype before the weight is multiplied (Llama, T5); "float32" after (Gemma, OLMo2).

    Returns:
        y like x; with residual the pair (y, h).

    Raises:
        ValueError: weight or residual do not fit x, or cast is unknown.

    Numerics:
        Sum of squares, root and product in float32; tolerance of the dtype in tests/strategies.py.

    Source: https://arxiv.org/abs/1910.07467
    """
    check(x, weight, residual, cast)
    return rms_norm_ref(x, weight, eps, residual=residual, weight_offset=weight_offset, cast=cast)


def check(x: Tensor, weight: Tensor, residual: Tensor | None, cast: str) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)} - allowed: ({x.shape[-1]},), the last size of x - "
            "pass the weight of this norm"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"residual has shape {tuple(residual.shape)} - allowed: {tuple(x.shape)}, the shape of x - expand it first"
        )
    if cast not in ("input", "float32"):
        raise ValueError(f"cast={cast!r} is unknown - allowed: 'input', 'float32' - pass one of these")


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    cast: str = "input",
) -> Tensor | tuple[Tensor, Tensor]:
    """The truth of `rms_norm`."""
    h = x if residual is None else x + residual
    n = h.to(wide(x))
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "input":
        n = n.to(x.dtype)
    y = (n * (weight.to(wide(x)) + weight_offset)).to(x.dtype)
    return y if residual is None else (y, h)


def default(key: Key) -> Config:
    """Placeholder until the kernel lands."""
    return {}


def inputs(M: int, N: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Random arguments of `rms_norm`."""
    return {
        "x": torch.randn(M, N, dtype=dtype, device=device),
        "weight": torch.randn(N, dtype=dtype, device=device),
        "eps": 1e-6,
    }


def cost(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[int, int]:
    """Bytes moved and operations of one call."""
    return nbytes(x, x, weight, residual, residual), 4 * x.numel()


OP = Op("rms_norm", rms_norm, rms_norm_ref, ({},), default, inputs, cost)
