"""Trying out a module on a copy: its code traced, its arithmetic compared. The model stays as it is.

The copies share nothing that a forward could change: parameters are new random numbers in the dtype that will
run, so a model on the meta device can be tried out as well.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from trinfer.rewrite.match import Found

# what code that is traced or fed with random numbers may raise, where it is none of the kinds looked for
STRANGE = (
    fx.proxy.TraceError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
# RMS error relative to the RMS of a row, a few roundings of the dtype; 1 % is too much for each of them
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class _Tracer(fx.Tracer):
    """Every child is a leaf: its call is one node, whatever it does inside."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def parameters_of(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    """Parameters of a module's forward but `self`, through decorators."""
    return list(inspect.signature(inspect.unwrap(forward)).parameters.values())[1:]


def trace(module: nn.Module) -> fx.Graph | str:
    """The graph of this module's own code, children as single nodes, or why there is none.

    Arguments that have a default keep it, so the graph is that of the plain call.
    """
    forward = inspect.unwrap(type(module).forward)
    needed = [p for p in parameters_of(forward) if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if not 1 <= len(needed) <= len(_CALLS):
        return f"its forward needs {len(needed)} arguments"
    shell = shallow(module)
    shell.__class__ = type(
        type(module).__name__, (type(module),), {"forward": _CALLS[len(needed) - 1](forward)}
    )
    try:
        return _Tracer().trace(shell)
    except STRANGE as error:
        return f"its code cannot be traced ({type(error).__name__})"


# torch.fx reads the number of arguments from the code, so each number has its own
_CALLS: tuple[Callable[[Any], Any], ...] = (
    lambda forward: lambda self, a: forward(self, a),
    lambda forward: lambda self, a, b: forward(self, a, b),
    lambda forward: lambda self, a, b, c: forward(self, a, b, c),
)


def shallow(module: nn.Module) -> nn.Module:
    """A copy of one module with the same parameters and children and no hooks."""
    copied: nn.Module = object.__new__(type(module))
    nn.Module.__init__(copied)
    for name, value in module.__dict__.items():
        if name not in copied.__dict__:
            copied.__dict__[name] = value
    for table in ("_parameters", "_buffers", "_modules"):
        copied.__dict__[table] = dict(module.__dict__[table])
    copied.training = False
    return copied


def twin(
    module: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> nn.Module:
    """A copy of a module with children, its parameters random numbers of `dtype`; the same in every run.

    `shapes`: of parameters that are to be smaller than in the model.
    """
    generator = torch.Generator(device).manual_seed(0)
    made: dict[int, nn.Parameter] = {}

    def copied(part: nn.Module) -> nn.Module:
        new = shallow(part)
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    shape = (shapes or {}).get(name, parameter.shape)
                    made[id(parameter)] = _random(shape, dtype, device, generator)
                new._parameters[name] = made[id(parameter)]
        for name, child in part._modules.items():
            new._modules[name] = None if child is None else copied(child)
        return new

    return copied(module)


def _random(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> nn.Parameter:
    values = torch.randn(tuple(shape), generator=generator, device=device)
    if len(shape) > 1:
        values = values / shape[-1] ** 0.5
    return nn.Parameter(values.to(dtype), requires_grad=False)


def rows(width: int, dtype: torch.dtype, device: torch.device, scales: Sequence[float]) -> Tensor:
    """Random inputs [2, len(scales), width] with a mean of their own, a row for each scale."""
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(2, len(scales), width, generator=generator, device=device) + 0.3
    return (x * torch.tensor(scales, device=device)[:, None]).to(dtype)


def answer(module: nn.Module, *inputs: Tensor) -> Tensor | str:
    """What the module's own code gives for the inputs, or why that is no answer."""
    try:
        with torch.no_grad():
            y = type(module).forward(module, *(x.clone() for x in inputs))
    except STRANGE as error:
        return f"its code fails on random numbers ({type(error).__name__})"
    if not isinstance(y, Tensor):
        return f"gives a {type(y).__name__}, not a tensor"
    x = inputs[0]
    if y.dtype != x.dtype or y.device != x.device:
        return f"gives {y.dtype} on {y.device} for {x.dtype} on {x.device}"
    return y


def error_of(found: Tensor, expected: Tensor) -> float:
    """RMS error relative to the RMS of the rows, or an eighth of the largest one, whichever is more.

    Infinite where shapes differ or anything is not finite.
    """
    if found.shape != expected.shape:
        return float("inf")
    a, b = found.double(), expected.double()
    if not bool((a.isfinite() & b.isfinite()).all()):
        return float("inf")
    error = ((a - b) / (b.square().mean(-1, keepdim=True).sqrt() + 1e-30)).abs()
    return float(torch.maximum(error.square().mean().sqrt(), error.max() / 8)) if b.numel() else 0.0


@dataclass
class Probes:
    """Where and in which dtype modules are tried out; remembers what came of it.

    `shared`: ids of modules that stand in more than one place of the model.
    """

    dtype: torch.dtype
    device: torch.device
    shared: frozenset[int] = frozenset()
    tried: dict[Any, str] = field(default_factory=dict)
    rules: dict[Any, Found | str] = field(default_factory=dict)

    def refusal(
        self, module: nn.Module, found: Found, widths: tuple[int, ...], scales: tuple[float, ...]
    ) -> str:
        """Why the bound forward of `found` is not what the module's own code computes; empty if it is.

        `widths`: of the inputs; `scales`: of their rows.
        """
        shapes = tuple((name, p.shape) for name, p in module.named_parameters())
        key = (type(module), found, shapes, widths)
        if key not in self.tried:
            self.tried[key] = self._compare(module, found, widths, scales)
        return self.tried[key]

    def _compare(
        self, module: nn.Module, found: Found, widths: tuple[int, ...], scales: tuple[float, ...]
    ) -> str:
        # the forwards need triton, which a plan without kernels does without
        from trinfer.rewrite.apply import FORWARDS

        copied = twin(module, self.dtype, self.device)
        inputs = [rows(width, self.dtype, self.device, scales) for width in widths]
        expected = answer(copied, *inputs)
        if isinstance(expected, str):
            return expected
        copied.__dict__["_trinfer"] = found.record
        with torch.no_grad():
            error = error_of(FORWARDS[found.forward](copied, *inputs), expected)
        if error <= TOLERANCE[self.dtype]:
            return ""
        return f"looks like {found.text}, which gives something else: {error:.1e} off on random numbers"
