"""Reading whole layers, and a whole model: can it run as one, and what must its forward remember?"""

import inspect
from operator import attrgetter
from typing import Any

from torch import nn

from trinfer.architectures import Arch
from trinfer.compat import gives_tuple
from trinfer.layers import records
from trinfer.rewrite import match
from trinfer.rewrite.match import Found


def layer(module: nn.Module, arch: Arch) -> Found | str:
    """A whole layer as one forward, or why it runs part by part."""
    refusal = arch.only_by_parts or _unknown_order(arch)
    refusal = (
        refusal or match.obstacle(module) or match.bypassed(module, True) or _strange_parts(module, arch)
    )
    if refusal:
        return refusal
    parts: dict[str, Any] = {}
    for name, reader in match.readers(arch):
        part = attrgetter(name)(module)
        if isinstance(part, nn.Identity):
            continue
        found = reader(part)
        if isinstance(found, str):
            return f"{name} {found}"
        parts[name] = found.record
    mlp = _mlp(module, arch, parts)
    if isinstance(mlp, str):
        return mlp
    record = records.Block(
        owner=arch.attention,
        attention=parts[arch.attention],
        out=arch.out,
        mlp=mlp,
        attention_norm=_place(arch.attention_norm, parts),
        mlp_norm=_place(arch.mlp_norm, parts),
        attention_out_norm=_place(arch.attention_out_norm, parts),
        mlp_out_norm=_place(arch.mlp_out_norm, parts),
        residual=arch.residual,
        residual_scale=match.stated(module, arch.residual_scale) if arch.residual_scale else 1.0,
        gives_tuple=arch.layer_output == "tuple" or gives_tuple(module),
    )
    return Found(_text(record), "block", record)


def decoder(
    model: nn.Module, seen: Any, arch: Arch, root: str, blocks: dict[str, records.Block]
) -> records.Decoder | str:
    """What a decode step of launches must know of a model, or why the model's own forward runs the step.

    `seen` is the model's configuration, `root` the path of its backbone; `blocks` are the layers that run
    whole, by path.
    """

    def at(path: str) -> str:
        return f"{root}.{path}" if root and path else path

    layers = [f"{at(arch.layers)}.{name}" for name, _ in attrgetter(at(arch.layers))(model).named_children()]
    apart = [path for path in layers if path not in blocks]
    if apart or not layers:
        return f"{apart[0]} runs part by part" if apart else "it has no layers"
    backbone = model.get_submodule(root)
    refusal = _unfit(blocks.values()) or _strange_around(model, backbone, arch, root)
    if refusal:
        return refusal
    found = {path: _read_norm(backbone, arch, path) for path in (arch.embedding_norm, arch.final_norm)}
    for norm in found.values():
        if isinstance(norm, str):
            return norm
    places = {
        path: records.Place(at(path), norm) if isinstance(norm, records.Norm) else None
        for path, norm in found.items()
    }
    return records.Decoder(
        embedding=at(arch.embedding),
        layers=tuple(layers),
        blocks=tuple(blocks[path] for path in layers),
        positions=at(arch.positions),
        position_offset=arch.position_offset,
        embedding_norm=places[arch.embedding_norm],
        embedding_scale=match.stated(backbone, arch.embedding_scale) if arch.embedding_scale else 1.0,
        is_scale_rounded=arch.embedding_scale.startswith(f"{arch.embedding}."),
        rotary=at(arch.rotary_table) if arch.rotary != "none" else "",
        rotary_kinds=_rotary_kinds(seen, backbone, arch, len(layers)),
        final_norm=places[arch.final_norm],
        head=arch.head,
        **_logits(model, arch),
        max_positions=_max_positions(seen, backbone, arch),
    )


def _unknown_order(arch: Arch) -> str:
    """Why the order in which a layer adds and normalises is none that a whole layer knows."""
    if arch.residual == "parallel" and (arch.attention_out_norm or arch.mlp_out_norm or arch.residual_scale):
        return "a parallel layer with a factor or norms of what its halves give"
    if arch.residual_scale and (arch.attention_out_norm or arch.mlp_out_norm):
        return "it has both norms and a factor of what its halves give"
    return ""


def _unfit(blocks: Any) -> str:
    """Why the attention of these layers cannot run in a step."""
    heads = [record.attention for record in blocks]
    if not all(names.is_causal for names in heads):
        return "its attention sees the tokens that follow"
    if any(names.qk_norm == "head" and names.norm and names.norm.kind != "rms" for names in heads):
        return "the norms of its queries and keys are layer norms"
    if any(names.qk_norm == "width" and names.qkv for names in heads):
        return "the norms of its queries and keys go over parts of one projection"
    return ""


def _strange_around(model: nn.Module, backbone: nn.Module, arch: Arch, root: str) -> str:
    """What is around the layers and not what the row says, so that a step would compute something else."""
    named = (
        arch.embedding,
        arch.layers,
        arch.positions,
        arch.embedding_norm,
        arch.rotary_table,
        arch.final_norm,
    )
    for owner, names in ((backbone, named), (model, (root, arch.head))):
        known = {path.split(".")[0] for path in names}
        if owner is model and owner is backbone:
            return "it has no head"
        children = [name for name, child in owner.named_children() if match.computes(child)]
        strange = [name for name in children if name not in known]
        if strange:
            return f"{type(owner).__name__} has {', '.join(strange)}, unknown to the row"
    tables = [path for path in (arch.embedding, arch.positions) if path]
    if arch.token_types or not tables:
        return "its embedding adds token types" if tables else "it reads no tokens"
    for path in tables:
        table = attrgetter(path)(backbone) if match.has(backbone, path) else None
        is_known = arch.embedding_scale.startswith(f"{path}.") or path == arch.positions
        if not isinstance(table, nn.Embedding) or (type(table) is not nn.Embedding and not is_known):
            return f"{path} is a {type(table).__name__}, which computes more than a table"
    if arch.rotary != "none" and not match.has(backbone, arch.rotary_table):
        return "its rotary table is no module of its own"
    if not arch.head or not match.has(model, arch.head):
        return "it has no head"
    head = match.plain(attrgetter(arch.head)(model))
    return "" if isinstance(head, Found) else f"{arch.head} is no plain linear: {head}"


def _logits(model: nn.Module, arch: Arch) -> dict[str, Any]:
    """What happens to logits behind the head."""
    scale = match.stated(model, arch.logit_scale) if arch.logit_scale else 1.0
    divisor = match.stated(model, arch.logit_divisor) if arch.logit_divisor else 1.0
    cap = match.stated(model, arch.logit_softcap) if arch.logit_softcap else None
    return {"logit_scale": scale / divisor, "logit_cap": cap}


def _read_norm(backbone: nn.Module, arch: Arch, path: str) -> records.Norm | str | None:
    """The norm at a path of the backbone, None for no path, or why it is none of the kernels."""
    if not path:
        return None
    found = match.norm_reader(arch)(attrgetter(path)(backbone)) if match.has(backbone, path) else "is missing"
    if isinstance(found, str):
        return f"{path} {found}"
    assert isinstance(found.record, records.Norm)
    return found.record


def _rotary_kinds(seen: Any, backbone: nn.Module, arch: Arch, layers: int) -> tuple[str, ...]:
    """What the rotary module wants to be told of each layer: its type, or nothing."""
    if arch.rotary == "none":
        return ("",) * layers
    takes = inspect.signature(attrgetter(arch.rotary_table)(backbone).forward).parameters
    return tuple(seen.layer_types) if "layer_type" in takes else ("",) * layers


def _max_positions(seen: Any, backbone: nn.Module, arch: Arch) -> int | None:
    """Positions that the tables of a model have room for."""
    if arch.positions:
        return len(attrgetter(arch.positions)(backbone).weight) - arch.position_offset
    is_table = arch.rotary != "none" and arch.rotary_layout == "sines_first"
    return int(seen.max_position_embeddings) if is_table else None


def _parts(arch: Arch) -> list[str]:
    """Everything in a layer that its row names."""
    linears = (arch.gate, arch.up, arch.gate_up, arch.down, arch.activation, arch.out)
    return [*(name for name, _ in match.readers(arch)), *filter(None, linears)]


def _strange_parts(module: nn.Module, arch: Arch) -> str:
    """Parts that the row does not name, or names and the layer does not have."""
    if arch.experts and match.has(module, arch.experts):
        return "its MLP is a mixture of experts"
    names = _parts(arch)
    missing = [name for name in names if not match.has(module, name)]
    children = {name for name, child in module.named_children() if match.computes(child)}
    strange = sorted(children - {name.split(".")[0] for name in names})
    if missing or strange:
        return f"has no {', '.join(missing)}" if missing else f"has {', '.join(strange)}, unknown to the row"
    return ""


def _mlp(module: nn.Module, arch: Arch, parts: dict[str, Any]) -> records.Mlp | str:
    """The MLP with paths from the layer, whether it is a module or its linears live in the layer."""
    whole = parts.get(arch.mlp) if arch.mlp else None
    if whole is not None:
        return records.Mlp(arch.gate, arch.up, arch.down, whole.act, whole.transposed, arch.gate_up)
    act = match.activation_name(attrgetter(arch.activation)(module))
    if act is None:
        return f"no kernel for its activation {arch.activation}"
    for path in filter(None, (arch.gate, arch.up, arch.down)):
        found = match.plain(attrgetter(path)(module))
        if not isinstance(found, Found) or found.record != records.Linear():
            return f"{path} is no plain linear"
    return records.Mlp(arch.gate, arch.up, arch.down, act)


def _place(path: str, parts: dict[str, Any]) -> records.Place | None:
    """A norm that is a part of the layer, or of a part that closes one half of it."""
    if path in parts:
        return records.Place(path, parts[path])
    close = parts.get(path.rpartition(".")[0]) if path else None
    return records.Place(path, records.Norm("layer", close.eps)) if close is not None else None


def _text(record: records.Block) -> str:
    """The launches of a token, for the plan."""
    up = "gate·up" if record.mlp.gate or record.mlp.gate_up else "up"
    before = ["qkv", up]
    if record.residual != "post":
        before = [f"norm·{name}" if norm else name for name, norm in _with_norms(record, *before)]
    between = ["norms of q and k"] if record.attention.qk_norm == "width" else []
    attention = [before[0], *between, "attention"]
    if record.residual == "parallel":
        steps = [*attention, before[1], "out + down + x"]
    else:
        steps = [*attention, *_close(record, "out", 0), before[1], *_close(record, "down", 1)]
    return f"{record.launches} launches a token: {', '.join(steps)}"


def _with_norms(record: records.Block, qkv: str, up: str) -> list[tuple[str, Any]]:
    return [(qkv, record.attention_norm), (up, record.mlp_norm)]


def _close(record: records.Block, name: str, half: int) -> list[str]:
    behind = (record.attention_out_norm, record.mlp_out_norm)[half]
    after = (record.attention_norm, record.mlp_norm)[half] if record.residual == "post" else None
    steps = [name, "norm + x"] if behind else [f"{name} + x"]
    return [*steps, "norm"] if after else steps
