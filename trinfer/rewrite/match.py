"""Reading one module: is it what a row or its class says it is, and what must its kernel remember of it?

A reader answers with a `Found`, or with the reason why the module keeps its own forward.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from trinfer.architectures import Arch
from trinfer.layers import records

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# activation modules whose mathematics is one of the kernel's, by class name: transformers' own and torch's
ACTIVATIONS = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "QuickGELUActivation": "gelu_quick",
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "ReLU": "relu",
}

PLAIN_CLASSES = "nn.Linear, Conv1D, nn.LayerNorm, nn.Embedding, nn.GELU, nn.SiLU, nn.ReLU or an HF activation"


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
        yield owner, Reader(read, arch, "dense, residual, norm")


def _closes(arch: Arch) -> Iterator[tuple[str, tuple[str, str]]]:
    """(module, (linear, norm)) of every module that closes a half of a post-norm layer."""
    for dense, norm in ((arch.out, arch.attention_norm), (arch.down, arch.mlp_norm)):
        owner, _, name = dense.rpartition(".")
        if arch.residual == "post" and owner and owner == norm.rpartition(".")[0]:
            yield owner, (name, norm.rpartition(".")[2])


def norm_reader(arch: Arch) -> Reader:
    """Reader of the row's kind of norm."""
    return Reader(_norm, arch, "norm", bypasses=False)


def plain(module: nn.Module) -> Found | str | None:
    """A torch module known by its exact class; None if it is not one."""
    if type(module) in (nn.Linear, Conv1D):
        record = records.Linear(transposed=type(module) is Conv1D)
        return _weights(module) or Found("gemv | matmul", "linear", record, f"is a {type(module).__name__}")
    if type(module) is nn.LayerNorm:
        if len(module.normalized_shape) != 1:
            return f"normalises {len(module.normalized_shape)} dimensions, the kernel one"
        found = Found("layer_norm", "layer_norm", records.Norm("layer", module.eps), "is a LayerNorm")
        return _weights(module) or found
    if type(module) is nn.Embedding:
        if module.max_norm is not None:
            return "max_norm changes the table while it is read"
        return _weights(module) or Found("embedding", "embedding", records.Embedding(), "is an Embedding")
    act = activation_name(module)
    if act is None:
        return None
    if getattr(module, "inplace", False):
        return "works in place"
    return Found("activation", "activation", records.Activation(act), f"is {act}")


def activation_name(module: nn.Module) -> str | None:
    """The kernel's name of an activation module, None if it has none."""
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return ACTIVATIONS.get(type(module).__name__) if _is_known_code(module) else None


def obstacle(module: nn.Module) -> str:
    """Why the forward of this module must not be replaced; empty if it may."""
    if "forward" in module.__dict__:
        return "has a forward of its own on the instance, which a swap would drop"
    if not _is_known_code(module):
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
    """False for leaves that hand their input on while a model is in eval mode."""
    return not isinstance(module, nn.Dropout | nn.Identity | nn.ModuleList | nn.ModuleDict)


def _is_known_code(module: nn.Module) -> bool:
    return type(module).forward.__module__.split(".")[0] in ("torch", "transformers")


def _weights(module: nn.Module) -> str:
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
            return f"{name} is a {type(parameter.data).__name__}, not a plain tensor"
        if parameter.dtype not in FLOATS:
            return f"{name} is {parameter.dtype}, not a floating point type of the kernels"
    return ""


def _strangers(module: nn.Module, expected: set[str]) -> str:
    """Children or parameters that the row does not name, so that the row does not describe this module."""
    children = {name for name, child in module.named_children() if computes(child)}
    strange = sorted(children - expected | {name for name, _ in module.named_parameters(recurse=False)})
    return f"has {', '.join(strange)}, which the row does not name" if strange else ""


def _linears(module: nn.Module, names: tuple[str, ...]) -> str:
    """Why these children are not all plain linears of one kind; empty if they are."""
    for name in names:
        child = getattr(module, name, None)
        if child is None:
            return f"has no {name}"
        if type(child) is not nn.Linear:
            return f"{name} is a {type(child).__name__}, not a plain Linear"
        if problem := _weights(child):
            return f"{name}: {problem}"
    return ""


def _act(module: nn.Module, name: str) -> tuple[str, str]:
    """Kernel name of the activation child, and why there is none."""
    child = getattr(module, name, None)
    act = activation_name(child) if isinstance(child, nn.Module) else None
    return (act, "") if act else ("", f"no kernel for its activation {type(child).__name__}")


def _norm(module: Any, arch: Arch) -> Found | str:
    eps = getattr(module, arch.norm_eps, None)
    if not isinstance(eps, float):
        return f"has no {arch.norm_eps}"
    names = {name for name, _ in module.named_parameters(recurse=False)}
    if arch.norm == "rms":
        if names != {"weight"} or module.weight.dim() != 1:
            return f"has parameters {', '.join(sorted(names)) or 'none'}, an RMS norm has one weight"
        record = records.Norm("rms", eps, arch.norm_cast, arch.norm_offset)
        return _weights(module) or Found("rms_norm", "rms_norm", record)
    return _weights(module) or Found("layer_norm", "layer_norm", records.Norm("layer", eps))


def _inside(path: str, owner: str) -> str:
    """A path from the layer as one from `owner`; empty if it does not lie there."""
    return path.removeprefix(f"{owner}.") if path.startswith(f"{owner}.") else ""


def _mlp(module: Any, arch: Arch) -> Found | str:
    gate, up, down, activation = (
        _inside(path, arch.mlp) for path in (arch.gate, arch.up, arch.down, arch.activation)
    )
    linears = tuple(filter(None, (gate, up, down)))
    act, no_act = _act(module, activation)
    refusal = _strangers(module, {*linears, activation}) or _linears(module, linears) or no_act
    if refusal:
        return refusal
    text = f"gemv | matmul: {act}(gate)·up, then down" if gate else f"gemv | matmul: {act}(up), then down"
    return Found(text, "mlp", records.Mlp(gate, up, down, act))


def _dense_act(module: Any, arch: Arch) -> Found | str:
    dense, activation = (path.rpartition(".")[2] for path in (arch.up, arch.activation))
    act, no_act = _act(module, activation)
    refusal = _strangers(module, {dense, activation}) or _linears(module, (dense,)) or no_act
    return refusal or Found(f"gemv | matmul with {act}", "dense_act", records.DenseAct(dense, act))


def _dense_add_norm(module: Any, arch: Arch, dense: str, norm_name: str) -> Found | str:
    norm = getattr(module, norm_name, None)
    refusal = _strangers(module, {dense, norm_name}) or _linears(module, (dense,))
    if refusal:
        return refusal
    if type(norm) is not nn.LayerNorm or len(norm.normalized_shape) != 1:
        return f"{norm_name} is a {type(norm).__name__}, not a plain LayerNorm of one dimension"
    record = records.DenseAddNorm(dense, norm_name, norm.eps)
    return _weights(norm) or Found("gemv | matmul with residual, layer_norm", "dense_add_norm", record)


def stated(module: nn.Module, given: Any) -> Any:
    """What a row says of a module: the attribute that it names, or the value that it gives."""
    return attrgetter(given)(module) if isinstance(given, str) else given


def _attention(module: Any, arch: Arch) -> Found | str:
    query, key, value, out = (
        _inside(path, arch.attention) for path in (arch.query, arch.key, arch.value, arch.out)
    )
    linears = tuple(filter(None, (query, key, value, out)))
    refusal = _strangers(module, set(linears)) or _linears(module, linears)
    if refusal:
        return refusal
    head_dim, num_heads, num_kv_heads = (
        attrgetter(name)(module) for name in (arch.head_dim, arch.num_heads, arch.num_kv_heads)
    )
    heads = {query: num_heads, key: num_kv_heads, value: num_kv_heads}
    for name, count in heads.items():
        width = getattr(module, name).out_features
        if width != count * head_dim:
            return f"{name} has {width} outputs, not {count} heads of {head_dim}"
    record = records.Attention(
        query,
        key,
        value,
        out,
        head_dim,
        stated(module, arch.sm_scale) if arch.sm_scale else head_dim**-0.5,
        stated(module, arch.is_causal),
        attrgetter(arch.window)(module) if arch.window else None,
        arch.rotary,
    )
    turn = "rotary, " if arch.rotary != "none" else ""
    close = f", {out}" if out else ""
    text = f"gemv | matmul q|k|v, {turn}attention | decode_attention{close}"
    return Found(text, "decoder_attention" if arch.rotary != "none" else "encoder_attention", record)
