"""Reading a normalisation that no row names: which of the kernels' norms is it, with what constants?"""

from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, fx, nn

from trinfer.layers import records
from trinfer.rewrite import probe
from trinfer.rewrite.match import Found

# epsilons show in rows that are hardly larger than they are
SCALES = (1.0, 30.0, 1e-1, 1e-2, 1e-3, 1e-4)
ANY_WIDTH = 64


def read_norm(module: nn.Module, probes: probe.Probes) -> Found | str:
    """The kernel's norm that computes what this module does."""
    if list(module.buffers()):
        return "has buffers, which no norm of the kernels has"
    copied = probe.twin(module, probes.dtype, probes.device)
    width = _width(module)
    x = probe.rows(width, probes.dtype, probes.device, SCALES)
    expected = probe.answer(copied, x)
    if isinstance(expected, str):
        return expected
    best, least = None, float("inf")
    for record in _norms(module):
        error = probe.error_of(_norm_ref(copied, record, x), expected)
        if error < least:
            best, least = record, error
    if best is None or least > probe.TOLERANCE[probes.dtype]:
        return "is none of the kernels' normalisations"
    weight = ", 1 + weight" if best.offset else ""
    why = f"read from its code, eps={best.eps:g}{weight}; tried out"
    found = Found(f"{best.kind}_norm", "read_norm", best, why)
    return probes.refusal(module, found, (width,), SCALES) or found


def _width(module: nn.Module) -> int:
    """Length of the rows: that of the parameters, or what a norm without any says of its shape."""
    lengths = [p.numel() for p in module.parameters()]
    shapes = [v for v in vars(module).values() if isinstance(v, tuple) and len(v) == 1]
    return next((n for n in [*lengths, *(n for (n,) in shapes)] if isinstance(n, int)), ANY_WIDTH)


def _norms(module: nn.Module) -> Iterator[records.ReadNorm]:
    """Every norm that could be meant, with the constants of its code."""
    argument = probe.parameters_of(type(module).forward)[0].name
    names = [name for name, _ in module.named_parameters(recurse=False)]
    epsilons = sorted(_constants(module))
    if len(names) == 1:
        for eps, offset, cast in product(epsilons, (0.0, 1.0), ("input", "float32")):
            yield records.ReadNorm(argument, "rms", names[0], "", eps, cast, offset)
    pairs = list(permutations([*names, "", ""][: max(2, len(names))], 2)) if names else [("", "")]
    for eps, offset, (weight, bias) in product(epsilons, (0.0, 1.0), pairs):
        if weight or not offset:
            yield records.ReadNorm(argument, "layer", weight, bias, eps, offset=offset)


def _constants(module: nn.Module) -> set[float]:
    """The small positive numbers in the code of a norm, one of which is its epsilon.

    They are the arguments in its traced graph; where it cannot be traced, the attributes of the module.
    """
    graph = probe.trace(module)
    if isinstance(graph, str):
        return {value for value in vars(module).values() if _is_small(value)}
    # what torch's own RMS norm adds where it is given no epsilon
    found = {float(torch.finfo(torch.float32).eps)}

    def see(value: Any) -> Any:
        found.update([value] if _is_small(value) else [])
        return value

    for node in graph.nodes:
        fx.node.map_aggregate((node.args, node.kwargs), see)
    return found


def _is_small(value: Any) -> bool:
    return isinstance(value, float) and 0.0 < value < 0.1


def _norm_ref(module: nn.Module, names: records.ReadNorm, x: Tensor) -> Tensor:
    """The kernels' formula in torch, to choose a record without compiling a kernel for each."""
    weight, bias = (getattr(module, name).float() if name else None for name in (names.weight, names.bias))
    h = x.float()
    if names.kind == "layer":
        weight = weight + names.offset if weight is not None else None
        return nn.functional.layer_norm(h, h.shape[-1:], weight, bias, names.eps).to(x.dtype)
    assert weight is not None
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + names.eps)
    h = h.to(x.dtype).float() if names.cast == "input" else h
    return (h * (weight + names.offset)).to(x.dtype)
