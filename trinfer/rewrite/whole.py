"""Reading whole layers, and a whole model: can it run as one, and what must its forward remember?"""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from torch import nn

from trinfer.architectures import Arch
from trinfer.layers import records
from trinfer.rewrite import match
from trinfer.rewrite.match import Found

# what a row may say of a layer that a whole layer does not do: the field, and when it says so
APART: dict[str, Callable[[Any], bool]] = {
    "attention_out_norm": bool,
    "mlp_out_norm": bool,
    "residual_scale": bool,
    "qkv": bool,
    "gate_up": bool,
    "qk_norm": lambda value: value != "none",
    "alibi": lambda value: value != "none",
    "softcap": bool,
    "sinks": bool,
    "rotary_flag": bool,
    "layer_output": lambda value: value != "tensor",
}


def layer(module: nn.Module, arch: Arch) -> Found | str:
    """A whole layer as one forward, or why it runs part by part."""
    fields = [name for name, says in APART.items() if says(getattr(arch, name))]
    if arch.only_by_parts or fields:
        return arch.only_by_parts or f"no whole layer with {', '.join(fields)}"
    refusal = match.obstacle(module) or match.bypassed(module, True) or _strange_parts(module, arch)
    if refusal:
        return refusal
    parts: dict[str, Any] = {}
    for name, reader in match.readers(arch):
        found = reader(attrgetter(name)(module))
        if isinstance(found, str):
            return f"{name} {found}"
        parts[name] = found.record
    names = {"query": arch.query, "key": arch.key, "value": arch.value, "out": arch.out}
    record = records.Block(
        owner=arch.attention,
        attention=replace(parts[arch.attention], **names),
        mlp=records.Mlp(arch.gate, arch.up, arch.down, _act(parts)),
        attention_norm=_place(arch.attention_norm, parts),
        mlp_norm=_place(arch.mlp_norm, parts),
        residual=arch.residual,
    )
    return Found(_text(record), "block", record)


def decoder(
    model: nn.Module, arch: Arch, root: str, blocks: dict[str, records.Block]
) -> records.Decoder | str:
    """What a decode step of launches must know of a model, or why the model's own forward runs the step.

    `root` is the path of the backbone; `blocks` are the layers that run whole, by path.
    """

    def at(path: str) -> str:
        return f"{root}.{path}" if root and path else path

    layers = [f"{at(arch.layers)}.{name}" for name, _ in attrgetter(at(arch.layers))(model).named_children()]
    apart = [path for path in layers if path not in blocks]
    if apart or not layers:
        return f"{apart[0]} runs part by part" if apart else "it has no layers"
    if not all(record.attention.is_causal for record in blocks.values()):
        return "its attention sees the tokens that follow"
    if arch.positions or arch.token_types or arch.embedding_norm or arch.embedding_scale:
        return "its embedding is more than one table"
    if arch.rotary_layout != "halves" or arch.logit_divisor:
        return f"a step does not know {arch.rotary_layout} rotary tables or a divisor of logits"
    head = match.plain(attrgetter(arch.head)(model)) if arch.head and match.has(model, arch.head) else None
    final = match.norm_reader(arch)(attrgetter(at(arch.final_norm))(model)) if arch.final_norm else ""
    if not isinstance(head, Found) or not isinstance(final, Found):
        return f"it has no plain head: {head}" if not isinstance(head, Found) else f"final norm: {final}"
    assert isinstance(final.record, records.Norm)
    return records.Decoder(
        embedding=at(arch.embedding),
        layers=tuple(layers),
        blocks=tuple(blocks[path] for path in layers),
        rotary=at(arch.rotary_table) if arch.rotary != "none" else "",
        final_norm=records.Place(at(arch.final_norm), final.record),
        head=arch.head,
        logit_scale=match.stated(model, arch.logit_scale) if arch.logit_scale else 1.0,
        logit_cap=match.stated(model, arch.logit_softcap) if arch.logit_softcap else None,
    )


def _strange_parts(module: nn.Module, arch: Arch) -> str:
    """Parts that the row does not name, or names and the layer does not have."""
    names = [name for name, _ in match.readers(arch)]
    missing = [name for name in names if not match.has(module, name)]
    children = {name for name, child in module.named_children() if match.computes(child)}
    strange = sorted(children - {name.split(".")[0] for name in names})
    if missing or strange:
        return f"has no {', '.join(missing)}" if missing else f"has {', '.join(strange)}, unknown to the row"
    return ""


def _act(parts: dict[str, Any]) -> str:
    found = [part.act for part in parts.values() if isinstance(part, records.Mlp | records.DenseAct)]
    return str(found[0])


def _place(path: str, parts: dict[str, Any]) -> records.Place:
    """A norm that is a part of the layer, or of a part that closes one half of it."""
    norm = parts.get(path)
    if norm is None:
        norm = records.Norm("layer", parts[path.rpartition(".")[0]].eps)
    return records.Place(path, norm)


def _text(record: records.Block) -> str:
    up = "gate·up" if record.mlp.gate else "up"
    if record.residual == "post":
        return f"5 + 2 launches: qkv, attention, out + x, norm, {up}, down + x, norm"
    order = "out + x, down + x" if record.residual == "parallel" else f"out + x, norm·{up}, down + x"
    before = f"norm·{up}, " if record.residual == "parallel" else ""
    return f"5 launches a token: norm·qkv, attention, {before}{order}"
