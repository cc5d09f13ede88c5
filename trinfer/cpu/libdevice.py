"""`triton.language.extra.libdevice` on a CPU: the functions that C's math library has under the same
names."""

from typing import Any

from triton.language import core

_UNARY = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "cbrt",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "exp10",
    "exp2",
    "expm1",
    "fabs",
    "floor",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "nearbyint",
    "rint",
    "round",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "tgamma",
    "trunc",
]
_BINARY = ["atan2", "copysign", "fdim", "fmax", "fmin", "fmod", "hypot", "nextafter", "pow", "remainder"]
_VECTORISED = {"exp", "exp2", "log", "log2", "erf", "tanh"}


def _function(name: str, arity: int) -> Any:
    """The function `name` of `arity` floats: float and double of libm, or the prelude's vectorising form."""
    single = f"t_{name}" if name in _VECTORISED else f"{name}f"
    kinds = {"fp32": single, "fp64": name, "fp16": single, "bf16": single}
    symbols = {(core.dtype(kind),) * arity: (symbol, core.dtype(kind)) for kind, symbol in kinds.items()}

    def call(*args: Any, _semantic: Any = None) -> Any:
        return core.extern_elementwise("", "", list(args), symbols, is_pure=True, _semantic=_semantic)

    call.__name__ = name
    return core.extern(call)


globals().update({name: _function(name, 1) for name in _UNARY})
globals().update({name: _function(name, 2) for name in _BINARY})
