"""Exact sampling from the softmax of logits, without a softmax: the largest of logits plus Gumbel noise."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trinfer import backend
from trinfer.autotune import Config, choose
from trinfer.kernels.argmax_elements import argmax_memory, finish_argmax, rank
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.op import Op, as_rows, nbytes, wide


class _Key(NamedTuple):
    dtype: torch.dtype
    V: int


@triton.jit
def _noisy_rank(x_ptr, random, index, mask, temperature):
    """Ranks of x / temperature + Gumbel noise made of 32 random bits an entry."""
    x = tl.load(x_ptr + index, mask=mask, other=0.0).to(tl.float32)
    # uniform in (0, 1): 2**-32 a step, half a step above 0, and the highest float32 below 1
    u = tl.minimum(random.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)
    # -log(1 - u), where 1 - u loses the low bits of u: the quotient brings them back
    rest = 1.0 - u
    waiting = tl.where(rest == 1.0, u, tl.log(rest) * (u / (rest - 1.0)))
    return rank(x / temperature - tl.log(waiting), index, mask)


# M is the batch and changes from call to call: it must not recompile
@triton.jit(do_not_specialize=["M"])
def _gumbel_kernel(
    x_ptr,
    temperature,
    seed_ptr,
    offset_ptr,
    scratch_ptr,
    token_ptr,
    M,
    V,
    stride_xm,
    IS_TENSOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per (row, 4 times BLOCK_N entries)."""
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    if IS_TENSOR:
        temperature = tl.load(temperature)
    x_ptr += pid_m.to(tl.int64) * stride_xm
    seed = tl.load(seed_ptr)
    offset = tl.load(offset_ptr)
    # four entries, a quarter of the row apart, share one draw of four words: the same in every configuration
    quarter = tl.cdiv(V, 4)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    r0, r1, r2, r3 = tl.philox(seed, offs_n, pid_m, offset.to(tl.int32), (offset >> 32).to(tl.int32))
    mask_n = offs_n < quarter
    best = _noisy_rank(x_ptr, r0, offs_n, mask_n, temperature)
    index = offs_n + quarter
    best = tl.maximum(best, _noisy_rank(x_ptr, r1, index, mask_n & (index < V), temperature))
    index += quarter
    best = tl.maximum(best, _noisy_rank(x_ptr, r2, index, mask_n & (index < V), temperature))
    index += quarter
    best = tl.maximum(best, _noisy_rank(x_ptr, r3, index, mask_n & (index < V), temperature))
    tl.atomic_max(scratch_ptr + pid_m, tl.max(best, 0), sem="relaxed")
    best_ptr = scratch_ptr + pid_m
    finish_argmax(best_ptr, best_ptr + M, token_ptr + pid_m, 1, tl.num_programs(1), 1)


@launcher
def gumbel(
    logits: Tensor,
    temperature: float | Tensor,
    seed: Tensor,
    offset: Tensor,
    *,
    scratch: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """token = argmax(logits / temperature + g), g Gumbel noise: a sample of softmax(logits / temperature).

    Args:
        logits: [..., V] float16|bfloat16|float32, any strides; copied if its rows are not contiguous.
        temperature: above 0; a number, or float32 [1] on the device.
        seed: int64 [1] on the device.
        offset: int64 [1] on the device, another one for each step of a generation.
        scratch: int64 [2 · rows] or more, zeros before the first launch; every launch leaves zeros.
        out: int64 [...], memory for the tokens.

    Returns:
        [...] int64. The same (seed, offset, row, entry) gives the same noise on every device.

    Raises:
        ValueError: a temperature of 0 or less, an empty vocabulary, seed, offset or memory that do not fit.

    Numerics:
        Noise from 32 bits of Philox 4x32-10 by -log(-log(1 - u)) in float32, accurate where u is small.

    Source: https://arxiv.org/abs/1411.0030 (the largest of noisy logits); Philox, https://doi.org/10.1145/2063384.2063405
    """
    V = logits.shape[-1]
    if V == 0:
        raise ValueError("logits have an empty last dimension - allowed: 1 or more entries - pass logits")
    _check(logits, temperature, seed, offset)
    scratch, tokens = argmax_memory(logits, scratch, out)
    if not backend.runs_triton(logits):
        return gumbel_ref(logits, temperature, seed, offset, out=tokens)
    rows = as_rows(logits)
    M = rows.shape[0]
    if M:
        config = choose(OP, _Key(logits.dtype, V))
        grid = (M, -(-V // (4 * config["BLOCK_N"])))
        launched("gumbel")
        pointers = (rows, temperature, seed, offset, scratch, tokens)
        is_tensor = isinstance(temperature, Tensor)
        launch(_gumbel_kernel, grid)(*pointers, M, V, rows.stride(0), is_tensor, **config)
    return tokens


def gumbel_ref(
    logits: Tensor,
    temperature: float | Tensor,
    seed: Tensor,
    offset: Tensor,
    *,
    scratch: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The truth of `gumbel`, with the same noise."""
    x = logits.to(wide(logits))
    rows, V = logits.shape[:-1].numel(), logits.shape[-1]
    quarter = -(-V // 4)
    entry = torch.arange(quarter, device=logits.device).expand(rows, quarter)
    row = torch.arange(rows, device=logits.device)[:, None].expand(rows, quarter)
    low, high = (torch.full_like(entry, int(offset) >> shift & 0xFFFFFFFF) for shift in (0, 32))
    words = torch.cat(_philox(int(seed), [entry, row, low, high]), -1)[:, :V]
    u = (words.float() * 2**-32 + 2**-33).clamp(max=1 - 2**-24).to(x.dtype)
    noise = -torch.log(-torch.log1p(-u)).view(x.shape)
    token = (x / temperature + noise).argmax(-1)
    return token if out is None else out.copy_(token)


def _philox(seed: int, c: list[Tensor]) -> list[Tensor]:
    """Ten rounds of Philox 4x32 on four counters: four words below 2**32 each, as int64."""
    k = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        (high_0, low_0), (high_1, low_1) = _product(0xD2511F53, c[0]), _product(0xCD9E8D57, c[2])
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of a · b, both below 2**32; int64 cannot hold the product at once."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    total = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (total >> 32), total & 0xFFFFFFFF


def _check(logits: Tensor, temperature: float | Tensor, seed: Tensor, offset: Tensor) -> None:
    expected = [("seed", seed, torch.int64), ("offset", offset, torch.int64)]
    if isinstance(temperature, Tensor):
        expected.append(("temperature", temperature, torch.float32))
    elif temperature <= 0:
        raise ValueError(f"temperature={temperature} - allowed: above 0 - for 0 take their argmax")
    for name, value, dtype in expected:
        if value.numel() != 1 or value.dtype != dtype or value.device != logits.device:
            raise ValueError(
                f"{name} is {tuple(value.shape)} {value.dtype} on {value.device} - allowed: one {dtype} on "
                f"{logits.device} - make it with torch.tensor([...], dtype={dtype}, device=...)"
            )


def _default(key: _Key) -> Config:
    block = min(1024, max(16, triton.next_power_of_2(-(-key.V // 4))))
    return {"BLOCK_N": block, "num_warps": min(4, max(1, block // 128)), "num_stages": 1}


def _inputs(M: int, V: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    seed, offset = torch.tensor([[1], [2]], device=device)
    logits = torch.randn(M, V, dtype=dtype, device=device)
    return {"logits": logits, "temperature": 0.7, "seed": seed, "offset": offset}


def _cost(
    logits: Tensor, temperature: float | Tensor, seed: Tensor, offset: Tensor, **options: Any
) -> tuple[int, int]:
    return nbytes(logits) + 8 * logits.shape[:-1].numel(), 50 * logits.numel()


_SPACE = tuple({"BLOCK_N": n, "num_warps": w} for n in (256, 512, 1024) for w in (2, 4, 8))

OP = Op("gumbel", gumbel, gumbel_ref, _SPACE, _default, _inputs, _cost)
