"""Reading one module: is it what a row or its class says it is, and what must its kernel remember of it?

A reader answers with a `Found`, or with the reason why the module keeps its own forward.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from trinfer.architectures import Arch
from trinfer.compat import is_known_code, kernel_window
from trinfer.layers import records

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# activation modules whose mathematics is one of the kernel's, by class name: transformers' own and torch's
ACTIVATIONS = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "BloomGelu": "gelu_tanh",
    "QuickGELUActivation": "gelu_quick",
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}

# subclasses of nn.Linear in transformers that compute what it computes
LINEARS = ("FalconLinear",)
IDLE = nn.Dropout | nn.Identity | nn.ModuleList | nn.ModuleDict | nn.CrossEntropyLoss
PLAIN_CLASSES = (
    "nn.Linear, Conv1D, nn.Conv2d over patches, nn.LayerNorm, nn.Embedding, "
    "nn.GELU, nn.SiLU, nn.ReLU or an HF activation"
)


@dataclass(frozen=True)
class Found:
    """What a module becomes: text for the plan, name of its forward, and the record that forward reads."""

    text: str
    forward: str
    record: records.Record
    why: str = ""


@dataclass(frozen=True)
class Reader:
    """Reads a module that a row names; `bypasses`: its new forward no longer calls its children."""

    read: Callable[[Any, Arch], Found | str]
    arch: Arch
    role: str
    bypasses: bool = True

    def __call__(self, module: nn.Module) -> Found | str:
        return self.read(module, self.arch)


def readers(arch: Arch) -> Iterator[tuple[str, Reader]]:
    """(path from a layer, reader) of every part that the row names."""
    closes = dict(_closes(arch))
    yield from ((name, norm_reader(arch)) for name in arch.norms if name.rpartition(".")[0] not in closes)
    yield arch.attention, Reader(_attention, arch, "attention")
    if arch.mlp:
        yield arch.mlp, Reader(_mlp, arch, "MLP")
    elif (owner := arch.up.rpartition(".")[0]) and owner == arch.activation.rpartition(".")[0]:
        yield owner, Reader(_dense_act, arch, "dense, activation")
    for owner, (dense, norm) in closes.items():
        read = partial(_dense_add_norm, dense=dense, norm_name=norm)
        yield owner, Reader(read, arch, "dense, residual, norm" if norm else "dense, residual")


def _closes(arch: Arch) -> Iterator[tuple[str, tuple[str, str]]]:
    """(module, (linear, norm)) of every module apart that closes a half of a layer: it adds the residual."""
    parts = ((arch.out, arch.attention_norm, arch.attention), (arch.down, arch.mlp_norm, arch.mlp))
    for dense, norm, part in parts:
        owner, _, name = dense.rpartition(".")
        if owner and owner != part:
            is_inside = owner == norm.rpartition(".")[0]
            yield owner, (name, norm.rpartition(".")[2] if is_inside else "")


def norm_reader(arch: Arch) -> Reader:
    """Reader of the row's kind of norm."""
    return Reader(_norm, arch, "norm", bypasses=False)


def plain(module: nn.Module) -> Found | str | None:
    """A torch module known by its exact class; None if it is not one."""
    if type(module) is Conv1D or is_linear(module):
        record = records.Linear(transposed=type(module) is Conv1D)
        return strange_weights(module) or Found(
            "gemv | matmul", "linear", record, f"is a {type(module).__name__}"
        )
    if type(module) is nn.LayerNorm:
        if len(module.normalized_shape) != 1:
            return f"normalises {len(module.normalized_shape)} dimensions, the kernel one"
        found = Found("layer_norm", "layer_norm", records.Norm("layer", module.eps), "is a LayerNorm")
        return strange_weights(module) or found
    if type(module) is nn.Embedding:
        if module.max_norm is not None:
            return "max_norm changes the table while it is read"
        return strange_weights(module) or Found(
            "embedding", "embedding", records.Embedding(), "is an Embedding"
        )
    if type(module) is nn.Conv2d:
        return strange_weights(module) or _patches(module)
    act = activation_name(module)
    if act is None:
        return None
    if getattr(module, "inplace", False):
        return "works in place"
    return Found("activation", "activation", records.Activation(act), f"is {act}")


def _patches(module: nn.Conv2d) -> Found | str:
    is_tiling = module.stride == module.kernel_size and module.padding in ("valid", (0, 0))
    if not is_tiling or module.dilation != (1, 1) or module.groups != 1:
        return "its windows overlap, or leave gaps"
    return Found("gemv | matmul over patches", "patches", records.Patches(), "is a Conv2d over patches")


def activation_name(module: nn.Module) -> str | None:
    """The kernel's name of an activation module, None if it has none."""
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return ACTIVATIONS.get(type(module).__name__) if is_known_code(module) else None


def obstacle(module: nn.Module, known: tuple[str, ...] = ()) -> str:
    """Why the forward of this module must not be replaced; empty if it may. `known`: classes to trust."""
    if "forward" in module.__dict__:
        return "has a forward of its own on the instance, which a swap would drop"
    if not is_known_code(module) and type(module).__name__ not in known:
        where = type(module).forward.__module__
        return f"its forward is defined in {where}, not in transformers, and may compute something else"
    return ""


def bypassed(module: nn.Module, bypasses: bool) -> str:
    """Why a forward that no longer calls the children of this module would drop something; empty if not."""
    if not bypasses:
        return ""
    for name, child in module.named_modules():
        if child is module:
            continue
        if child._forward_hooks or child._forward_pre_hooks:
            return f"{name} has forward hooks, which a fused forward would not run"
        if "forward" in child.__dict__:
            return f"{name} has a forward of its own on the instance"
    return ""


def has(module: nn.Module, path: str) -> bool:
    """True if there is something at this path."""
    try:
        attrgetter(path)(module)
    except AttributeError:
        return False
    return True


def computes(module: nn.Module) -> bool:
    """False for leaves that hand their input on while a model is in eval mode, and for losses."""
    return not isinstance(module, IDLE)


def strange_weights(module: nn.Module) -> str:
    """Why the kernels cannot read the parameters of this module itself; empty if they can."""
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
            return f"{name} is a {type(parameter.data).__name__}, not a plain tensor"
        if parameter.dtype not in FLOATS:
            return f"{name} is {parameter.dtype}, not a floating point type of the kernels"
    return ""


def _strangers(module: nn.Module, expected: set[str]) -> str:
    """Children or parameters that the row does not name, so that the row does not describe this module."""
    children = {name for name, child in module.named_children() if computes(child)}
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    strange = sorted((children | parameters) - expected)
    return f"has {', '.join(strange)}, which the row does not name" if strange else ""


def _linears(module: nn.Module, names: tuple[str, ...]) -> str:
    """Why these children are not all plain linears of one kind; empty if they are."""
    for name in names:
        child = getattr(module, name, None)
        if child is None:
            return f"has no {name}"
        if type(child) is not Conv1D and not is_linear(child):
            return f"{name} is a {type(child).__name__} of {type(child).__module__}, not a plain Linear"
        if problem := strange_weights(child):
            return f"{name}: {problem}"
    kinds = {type(getattr(module, name)) is Conv1D for name in names}
    return "" if len(kinds) == 1 else f"{', '.join(names)} are not all of one class"


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or (type(module).__name__ in LINEARS and is_known_code(module))


def _switched_on(module: nn.Module, arch: Arch) -> str:
    """Which attribute that the row's reading does not cover is set on this module; empty if none is."""
    found = [name for name in arch.must_be_off if has(module, name) and attrgetter(name)(module)]
    return f"has {', '.join(found)} set, which the kernels do not compute" if found else ""


def _act(module: nn.Module, name: str) -> tuple[str, str]:
    """Kernel name of the activation child, and why there is none."""
    child = getattr(module, name, None)
    act = activation_name(child) if isinstance(child, nn.Module) else None
    return (act, "") if act else ("", f"no kernel for its activation {type(child).__name__}")


def _norm(module: Any, arch: Arch) -> Found | str:
    found = _norm_record(module, arch)
    if isinstance(found, str):
        return found
    name = f"{found.kind}_norm"
    return strange_weights(module) or Found(name, name, found)


def _norm_record(module: Any, arch: Arch) -> records.Norm | str:
    eps = getattr(module, arch.norm_eps, None)
    if not isinstance(eps, float):
        return f"has no {arch.norm_eps}"
    weights = dict(module.named_parameters(recurse=False))
    allowed = {"weight"} if arch.norm == "rms" else {"weight", "bias"}
    if set(weights) - allowed or (arch.norm == "rms" and not weights):
        kind = "an RMS norm has one weight" if arch.norm == "rms" else "a layer norm has a weight and a bias"
        return f"has parameters {', '.join(sorted(weights)) or 'none'}, {kind}"
    if any(weight.dim() != 1 for weight in weights.values()):
        return "normalises more than one dimension, the kernel one"
    return records.Norm(arch.norm, eps, arch.norm_cast, arch.norm_offset)


def _inside(path: str, owner: str) -> str:
    """A path from the layer as one from `owner`; empty if it does not lie there."""
    return path.removeprefix(f"{owner}.") if path.startswith(f"{owner}.") else ""


def _mlp(module: Any, arch: Arch) -> Found | str:
    paths = (arch.gate, arch.up, arch.gate_up, arch.down, arch.activation)
    gate, up, gate_up, down, activation = (_inside(path, arch.mlp) for path in paths)
    if arch.experts and hasattr(module, _inside(arch.experts, arch.mlp)):
        return "hands hidden states from its router to its experts in torch"
    linears = tuple(filter(None, (gate, up, gate_up, down)))
    act, no_act = _act(module, activation)
    refusal = _strangers(module, {*linears, activation}) or _linears(module, linears) or no_act
    if refusal := refusal or _switched_on(module, arch):
        return refusal
    transposed = type(getattr(module, down)) is Conv1D
    if gate_up and transposed:
        return f"{gate_up} is a Conv1D, whose halves are not rows"
    text = f"gemv | matmul: {act}(up), then down"
    if gate or gate_up:
        text = f"gemv | matmul: {act}(gate)·up, then down"
    record = records.Mlp(gate, up, down, act, transposed, gate_up)
    return Found(text, "residual_mlp" if arch.mlp_adds_residual else "mlp", record)


def _dense_act(module: Any, arch: Arch) -> Found | str:
    dense, activation = (path.rpartition(".")[2] for path in (arch.up, arch.activation))
    act, no_act = _act(module, activation)
    refusal = _strangers(module, {dense, activation}) or _linears(module, (dense,)) or no_act
    return refusal or Found(f"gemv | matmul with {act}", "dense_act", records.DenseAct(dense, act))


def _dense_add_norm(module: Any, arch: Arch, dense: str, norm_name: str) -> Found | str:
    refusal = _strangers(module, {dense, norm_name}) or _linears(module, (dense,))
    if refusal:
        return refusal
    if not norm_name:
        return Found("gemv | matmul with residual", "dense_add_norm", records.DenseAddNorm(dense))
    norm = getattr(module, norm_name, None)
    if type(norm) is not nn.LayerNorm or len(norm.normalized_shape) != 1:
        return f"{norm_name} is a {type(norm).__name__}, not a plain LayerNorm of one dimension"
    record = records.DenseAddNorm(dense, norm_name, norm.eps)
    return strange_weights(norm) or Found("gemv | matmul with residual, layer_norm", "dense_add_norm", record)


def stated(module: nn.Module, given: Any) -> Any:
    """What a row says of a module: the attribute that it names, or the value that it gives."""
    return attrgetter(given)(module) if isinstance(given, str) else given


def _attention(module: Any, arch: Arch) -> Found | str:
    if arch.attention_stays:
        return arch.attention_stays
    takes = inspect.signature(type(module).forward).parameters
    if type(module).__name__ in arch.foreign and "position_embeddings" not in takes:
        return "makes its rotary table itself"
    paths = (arch.query, arch.key, arch.value, arch.qkv, arch.out, arch.query_norm, arch.key_norm)
    query, key, value, qkv, out, query_norm, key_norm = (_inside(path, arch.attention) for path in paths)
    linears = tuple(filter(None, (query, key, value, qkv, out)))
    norms = tuple(filter(None, (query_norm, key_norm)))
    refusal = _switched_on(module, arch) or _strangers(module, {*linears, *norms, arch.sinks})
    if refusal := refusal or _linears(module, linears):
        return refusal
    head_dim, num_heads, num_kv_heads = (
        attrgetter(name)(module) for name in (arch.head_dim, arch.num_heads, arch.num_kv_heads)
    )
    heads = {query: num_heads, key: num_kv_heads, value: num_kv_heads, qkv: num_heads + 2 * num_kv_heads}
    for name in filter(None, heads):
        width = _outputs(getattr(module, name))
        if width != heads[name] * head_dim:
            return f"{name} has {width} outputs, not {heads[name]} heads of {head_dim}"
    norm = _head_norm(module, arch, norms)
    if isinstance(norm, str):
        return norm
    record = records.Attention(
        query=query,
        key=key,
        value=value,
        qkv=qkv,
        transposed=type(getattr(module, linears[0])) is Conv1D,
        out=out,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        query_norm=query_norm,
        key_norm=key_norm,
        norm=norm,
        **_flags(module, arch, head_dim, bool(norm)),
    )
    return Found(_attention_text(record), _attention_forward(arch), record)


def _flags(module: Any, arch: Arch, head_dim: int, norms: bool) -> dict[str, Any]:
    """What an attention record says beside names and sizes."""
    is_causal = bool(stated(module, arch.is_causal))
    rotates = not arch.rotary_flag or bool(attrgetter(arch.rotary_flag)(module))
    return {
        "qkv_layout": arch.qkv_layout,
        "layer": getattr(module, arch.layer_index, None),
        "sm_scale": stated(module, arch.sm_scale) if arch.sm_scale else head_dim**-0.5,
        "is_causal": is_causal,
        "window": _window(module, arch, is_causal),
        "softcap": stated(module, arch.softcap) if arch.softcap else None,
        "sinks": arch.sinks,
        "alibi": arch.alibi,
        "rotary": arch.rotary if rotates else "none",
        "rotary_layout": arch.rotary_layout,
        "qk_norm": arch.qk_norm if norms else "none",
        "mask_is_inverted": arch.mask_is_inverted,
        "mask_is_open": arch.mask_is_open,
    }


def _attention_forward(arch: Arch) -> str:
    if arch.attention_adds_residual:
        return "residual_attention"
    return "decoder_attention" if arch.rotary != "none" else "encoder_attention"


def _attention_text(record: records.Attention) -> str:
    parts = ["gemv | matmul q|k|v"]
    parts += ["norm of q and k"] if record.norm else []
    parts += ["rotary"] if record.rotary != "none" else []
    parts += ["attention | decode_attention"]
    parts += [record.out] if record.out else []
    return ", ".join(parts)


def _outputs(linear: Any) -> int:
    return int(linear.weight.shape[1 if type(linear) is Conv1D else 0])


def _window(module: nn.Module, arch: Arch, is_causal: bool) -> int | None:
    where = arch.window_where
    if not arch.window or (where and getattr(module, where[0]) != where[1]):
        return None
    return kernel_window(attrgetter(arch.window)(module), is_causal)


def _head_norm(module: nn.Module, arch: Arch, names: tuple[str, ...]) -> records.Norm | str | None:
    """The norm of queries and keys, or why it is not one that the kernels compute; None for none."""
    found = {_norm_record(getattr(module, name), arch) for name in names if hasattr(module, name)}
    if not names or not found:
        return None
    if len(found) > 1:
        return f"{', '.join(names)} are not alike"
    (norm,) = found
    return f"{', '.join(names)}: {norm}" if isinstance(norm, str) else norm
