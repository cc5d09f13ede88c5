"""Elementwise TTIR ops as C expressions on single elements, and the C types that hold them."""

import re
import struct

from trinfer.cpu.ttir import Op, Value

MEMORY = {
    "i1": "int8_t",
    "i8": "int8_t",
    "i16": "int16_t",
    "i32": "int32_t",
    "i64": "int64_t",
    "f16": "t_f16",
    "bf16": "t_bf16",
    "f32": "float",
    "f64": "double",
    "f8E4M3FN": "uint8_t",
    "f8E5M2": "uint8_t",
}
"""How an element lies in memory."""

NARROW_FLOATS = ("f16", "bf16", "f8E4M3FN", "f8E5M2")
"""Types held as float in registers and rounded after every op."""

UNSIGNED = {"i1": "uint32_t", "i8": "uint8_t", "i16": "uint16_t", "i32": "uint32_t", "i64": "uint64_t"}


def c_type(elem: str) -> str:
    """The C type of a value in a register."""
    if elem.startswith("ptr<"):
        pointee = elem[4:-1]
        return "void**" if pointee.startswith("ptr") else f"{MEMORY[pointee]}*"
    if elem in NARROW_FLOATS:
        return "float"
    return "int32_t" if elem == "i1" else MEMORY[elem]


def tile_type(elem: str) -> str:
    """The C type of an element of a tile in an array: narrow floats lie there as in memory."""
    return MEMORY[elem] if elem in NARROW_FLOATS else c_type(elem)


def from_memory(elem: str, place: str) -> str:
    """Read an element of memory into a register."""
    return f"t_{elem}_f32({place})" if elem in NARROW_FLOATS else place


def to_memory(elem: str, value: str) -> str:
    """Round a register value to what memory holds."""
    return f"t_f32_{elem}({value})" if elem in NARROW_FLOATS else value


def rounded(elem: str, value: str) -> str:
    """A float result in the precision of `elem`."""
    return f"t_round_{elem}({value})" if elem in NARROW_FLOATS else value


_SIGNED = {"addi": "+", "subi": "-", "muli": "*"}

_TEMPLATES = {
    "arith.addf": "({0} + {1})",
    "arith.subf": "({0} - {1})",
    "arith.mulf": "({0} * {1})",
    "arith.divf": "({0} / {1})",
    "tt.precise_divf": "({0} / {1})",
    "arith.negf": "(-{0})",
    "arith.remf": "t_fmod({0}, {1})",
    "arith.divsi": "t_div_{E}({0}, {1})",
    "arith.remsi": "t_rem_{E}({0}, {1})",
    "arith.divui": "t_udiv_{E}({0}, {1})",
    "arith.remui": "t_urem_{E}({0}, {1})",
    "arith.andi": "({0} & {1})",
    "arith.ori": "({0} | {1})",
    "arith.xori": "({0} ^ {1})",
    "arith.shli": "(({T})(({U}){0} << {1}))",
    "arith.shrsi": "({0} >> {1})",
    "arith.shrui": "(({T})(({U}){0} >> {1}))",
    "arith.maxsi": "({0} > {1} ? {0} : {1})",
    "arith.minsi": "({0} < {1} ? {0} : {1})",
    "arith.maxui": "(({U}){0} > ({U}){1} ? {0} : {1})",
    "arith.minui": "(({U}){0} < ({U}){1} ? {0} : {1})",
    # num: the other operand when one is NaN; imum: NaN when one is NaN
    "arith.maxnumf": "(({0} > {1}) | ({1} != {1}) ? {0} : {1})",
    "arith.minnumf": "(({0} < {1}) | ({1} != {1}) ? {0} : {1})",
    "arith.maximumf": "(({0} > {1}) | ({0} != {0}) ? {0} : {1})",
    "arith.minimumf": "(({0} < {1}) | ({0} != {0}) ? {0} : {1})",
    "arith.select": "({0} ? {1} : {2})",
    "arith.extf": "(({T}){0})",
    "arith.truncf": "(({T}){0})",
    "tt.fp_to_fp": "(({T}){0})",
    "arith.sitofp": "(({T}){0})",
    "arith.uitofp": "(({T})({F}){0})",
    "arith.fptosi": "(({T}){0})",
    "arith.fptoui": "(({T})({U}){0})",
    "arith.extui": "(({T})({F}){0})",
    "arith.index_cast": "(({T}){0})",
    "tt.clampf": "t_clamp({0}, {1}, {2})",
    "tt.mulhiui": "t_mulhi_{E}({0}, {1})",
    "tt.int_to_ptr": "(({T})(intptr_t){0})",
    "tt.ptr_to_int": "((int64_t)(intptr_t){0})",
    "math.fma": "{fma}({0}, {1}, {2})",
    "math.absi": "({0} < 0 ? ({T})(0 - ({U}){0}) : {0})",
    "math.rsqrt": "(1 / {sqrt}({0}))",
    "math.sqrt": "{sqrt}({0})",
    "tt.precise_sqrt": "{sqrt}({0})",
}
"""{0} {1} {2}: operands; T: C type of the result; U: its unsigned twin; F: unsigned twin of the operand;
E: element."""

_MATH = ("exp", "exp2", "log", "log2", "sin", "cos", "erf", "tanh", "absf", "floor", "ceil", "log1p", "expm1")

_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNORDERED = {"ult": ">=", "ule": ">", "ugt": "<=", "uge": "<"}

EXTRA_ELEMENTWISE = {
    "tt.splat",
    "tt.expand_dims",
    "tt.broadcast",
    "tt.make_range",
    "tt.addptr",
    "tt.trans",
    "tt.join",
    "tt.split",
    "tt.bitcast",
    "tt.load",
    "tt.extern_elementwise",
    *(name for name in _TEMPLATES if name.startswith("tt.")),
}


def is_elementwise(op: Op) -> bool:
    """True if each element of the result depends on one element of each operand."""
    return op.name.startswith(("arith.", "math.")) or op.name in EXTRA_ELEMENTWISE


_NUMBER = re.compile(r"(?:dense<)?(-?0x[0-9A-F]+|-?[\d.]+(?:[eE][+-]?\d+)?|true|false)>?")


def literal(op: Op) -> str:
    """An `arith.constant`, scalar or splat, as C text."""
    kind = op.results[0].type
    if kind.is_float:
        return c_float(float_literal(op), kind.elem)
    number = int_literal(op)
    return "INT64_MIN" if number == -(1 << 63) else f"{number}LL" if kind.elem == "i64" else str(number)


def float_literal(op: Op) -> float:
    """A floating point `arith.constant` as a Python number; MLIR prints infinities and NaNs as their bits."""
    text, elem = _number(op), op.results[0].type.elem
    if not text.startswith("0x"):
        return float(text)
    bits = int(text, 16)
    if elem == "bf16":
        bits, elem = bits << 16, "f32"
    code, size = {"f16": ("e", 2), "f32": ("f", 4), "f64": ("d", 8)}[elem]
    return float(struct.unpack(f"<{code}", bits.to_bytes(size, "little"))[0])


def _number(op: Op) -> str:
    found = _NUMBER.search(op.attrs)
    assert found, op.attrs
    return found[1]


def int_literal(op: Op) -> int:
    """An integer `arith.constant` as a Python number."""
    text = _number(op)
    return int(text == "true") if text in ("true", "false") else int(text)


def c_float(value: float, elem: str) -> str:
    """A Python float as a C literal."""
    if value != value:
        return "NAN"
    if value in (float("inf"), float("-inf")):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    text = repr(value) + ("" if elem == "f64" else "f")
    return f"({text})" if value < 0 else text


def expression(op: Op, args: list[str], wraps: bool) -> str | None:
    """The C expression of one element of an elementwise op; None if there is no rule for it.

    `wraps`: integer overflow must wrap (hashes); False for addresses, where C may assume that it does
    not happen,
    which is what lets the C compiler vectorise.
    """
    result = op.results[0].type
    of = op.operands[0].type if op.operands else result
    name = op.name.split(".", 1)[1]
    t, u = c_type(result.elem), UNSIGNED.get(result.elem, "")
    if name in _SIGNED and op.name.startswith("arith."):
        sign = _SIGNED[name]
        # narrower operands would become int, in which a product may overflow
        wide = "uint64_t" if result.elem == "i64" else "uint32_t"
        text = f"({wide}){args[0]} {sign} ({wide}){args[1]}"
        return f"(({t})({text}))" if wraps else f"({args[0]} {sign} {args[1]})"
    if name in ("cmpi", "cmpf"):
        return _compare(op, args, of.elem)
    if name == "bitcast":
        return _bitcast(of.elem, result.elem, args[0])
    if name in ("extsi", "trunci"):
        if of.elem == "i1":
            return f"(-({t}){args[0]})"
        return f"(({t})({args[0]} & 1))" if result.elem == "i1" else f"(({t}){args[0]})"
    if name == "addptr":
        return f"({args[0]} + {args[1]})"
    if name == "fp_to_fp" and "rtz" in op.attrs:
        return f"t_truncate_{result.elem}({args[0]})" if result.elem in ("f16", "bf16") else None
    if name == "extern_elementwise":
        symbol = re.search(r'symbol = "(\w+)"', op.attrs)
        return rounded(result.elem, f"{symbol[1]}({', '.join(args)})") if symbol else None
    if op.name.startswith("math.") and name in _MATH:
        text = f"t_{name}_f64({args[0]})" if result.elem == "f64" else f"t_{name}({args[0]})"
        return rounded(result.elem, text)
    template = _TEMPLATES.get(op.name)
    if template is None:
        return None
    libm = {name: name if result.elem == "f64" else f"{name}f" for name in ("sqrt", "fma")}
    text = template.format(*args, T=t, U=u, F=UNSIGNED.get(of.elem, ""), E=result.elem, **libm)
    return rounded(result.elem, text) if result.is_float else text


def _compare(op: Op, args: list[str], elem: str) -> str:
    a, b = args
    if op.name == "arith.cmpi":
        predicate = re.search(r"\b(eq|ne|[su][lg][te])\b", op.attrs)
        assert predicate, op.attrs
        if predicate[1][0] == "u":
            return f"(({UNSIGNED[elem]}){a} {_COMPARE[predicate[1][1:]]} ({UNSIGNED[elem]}){b})"
        return f"({a} {_COMPARE[predicate[1][-2:]]} {b})"
    found = re.search(r"\b([ou](?:eq|ne|lt|le|gt|ge)|uno|ord)\b", op.attrs)
    assert found, op.attrs
    if found[1] in ("uno", "ord"):
        either = f"(({a} != {a}) | ({b} != {b}))"
        return either if found[1] == "uno" else f"(!{either})"
    if found[1] in _UNORDERED:
        return f"(!({a} {_UNORDERED[found[1]]} {b}))"
    if found[1] == "one":
        return f"(({a} < {b}) | ({a} > {b}))"
    if found[1] == "ueq":
        return f"(!(({a} < {b}) | ({a} > {b})))"
    return f"({a} {_COMPARE[found[1][1:]]} {b})"


def _bitcast(source: str, target: str, arg: str) -> str:
    if target.startswith("ptr<") or (source[0] == target[0] == "i"):
        return f"(({c_type(target)}){arg})"
    raw = f"t_raw_{source}({arg})" if source[0] in "bf" else arg
    return f"t_from_{target}({raw})" if target[0] in "bf" else f"(({c_type(target)}){raw})"


def constant_of(value: Value) -> Op | None:
    """The `arith.constant` that defines `value`, if one does."""
    return value.op if value.op is not None and value.op.name == "arith.constant" else None
