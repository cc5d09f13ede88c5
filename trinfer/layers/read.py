"""Forwards of modules that no row names: what the rewriting pass read from their code and tried out.

A call that says more than the inputs which were tried out goes to the module's own code.
"""

from typing import Any, cast

from torch import Tensor

from trinfer.kernels.layer_norm import layer_norm
from trinfer.kernels.rms_norm import rms_norm
from trinfer.layers.linear import product, segments


def read_norm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The normalisation of `records.ReadNorm`."""
    names = self._trinfer
    inputs = given_inputs((names.input,), args, kwargs)
    if inputs is None:
        return type(self).forward(self, *args, **kwargs)
    (x,) = inputs
    weight, bias = (getattr(self, name) if name else None for name in (names.weight, names.bias))
    if names.kind == "rms":
        return rms_norm(x, cast(Tensor, weight), names.eps, weight_offset=names.offset, cast=names.cast)
    # one addition over a row of weights, which the kernel does not know
    return layer_norm(x, weight + names.offset if names.offset else weight, bias, names.eps)


def read_mlp_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The MLP of `records.ReadMlp`: one launch for gate and up with their activation, one for down."""
    names = self._trinfer
    inputs = given_inputs((names.input, names.residual), args, kwargs)
    if inputs is None:
        return type(self).forward(self, *args, **kwargs)
    x, residual = inputs if names.residual else (inputs[0], None)
    weights, biases = segments(self, names.ups, names.transposed)
    if names.halves:
        weights = gate_and_up(weights[0], names.halves)
        biases = None if biases is None else gate_and_up(cast(Tensor, biases[0]), names.halves)
    options: dict[str, Any] = {"act": names.act, "gated": len(weights) == 2}
    if not names.down:
        return product(x, weights, biases, residual=residual, **options)
    h = product(x, weights, biases, **options)
    return product(h, *segments(self, (names.down,), names.transposed), residual=residual)


def linear_act_forward(self: Any, input: Tensor) -> Tensor:
    """act(linear(x)) in one launch; the activation module after it is bound to `done_forward`."""
    names = self._trinfer
    weight = self.weight.t() if names.transposed else self.weight
    return product(input, (weight,), None if self.bias is None else (self.bias,), act=names.act)


def done_forward(self: Any, input: Tensor) -> Tensor:
    """Hand on what the product before has activated already."""
    return input


def gate_and_up(fused: Tensor, halves: str, dim: int = 0) -> tuple[Tensor, Tensor]:
    """(gate, up) outputs of a fused weight or bias as views; `halves` as in `records.ReadMlp`."""
    if halves.endswith("rows"):
        first, second = fused.unflatten(dim, (-1, 2)).unbind(dim + 1)
    else:
        first, second = fused.chunk(2, dim)
    return (first, second) if halves.startswith("gate") else (second, first)


def given_inputs(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor] | None:
    """The tensors of a call, by position or by name, as `names` orders them; None if it says more or less."""
    names = tuple(name for name in names if name)
    said = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if v is not None}
    is_more = len(args) > len(names) or said.keys() != set(names)
    if is_more or not all(isinstance(value, Tensor) for value in said.values()):
        return None
    return [said[name] for name in names]
