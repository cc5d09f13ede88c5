"""Plans by `injection_policy`: layers of classes that the caller names, read by names or by a row."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trinfer.architectures import Arch
from trinfer.layers import records
from trinfer.rewrite import match, probe, read_moe
from trinfer.rewrite.match import Found
from trinfer.rewrite.plan import Kept, Step
from trinfer.rewrite.read_mlp import LINEARS

Policy = dict[type[nn.Module], Any]
SCALES = (1.0, 0.1, 3.0)


def read_policy(model: nn.Module, policy: Policy, probes: probe.Probes) -> tuple[list[Step], list[Kept]]:
    """Swaps and kept parts of the layers that `policy` names; everything else stays as it is.

    Raises:
        ValueError: a class without a layer in the model, a name without a linear in one of them, or a row by
            which no part of a layer can be read.
    """
    swaps: dict[str, Step] = {}
    kept: dict[str, Kept] = {}
    for kind, target in policy.items():
        layers = [(path, part) for path, part in model.named_modules() if isinstance(part, kind)]
        if not layers:
            raise ValueError(
                f"injection_policy names {kind.__name__}: {type(model).__name__} has no such layer; it has "
                f"{', '.join(_classes(model))}; name one of these"
            )
        read = _by_row if isinstance(target, Arch) else _by_names
        for path, found in read(model, kind, layers, target, probes):
            was = type(model.get_submodule(path)).__name__
            if isinstance(found, Found):
                swaps[path] = Step(path, was, found.text, found.why, found.forward, found.record)
            else:
                kept[path] = Kept(path, was, found)
    order = [path for path, _ in model.named_modules()]
    return [swaps[path] for path in order if path in swaps], [kept[path] for path in order if path in kept]


def _classes(model: nn.Module) -> list[str]:
    """Classes of the modules that stand in a list: what layers are."""
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    return sorted({type(layer).__name__ for part in lists for layer in part}) or [type(model).__name__]


def _by_names(
    model: nn.Module,
    kind: type[nn.Module],
    layers: list[tuple[str, nn.Module]],
    names: Any,
    probes: probe.Probes,
) -> Iterator[tuple[str, Found | str]]:
    """Every linear of the layers: named ones would be cut by their inputs, the others by their outputs."""
    if not isinstance(names, tuple):
        raise ValueError(
            f"injection_policy of {kind.__name__} is a {type(names).__name__}; allowed: names of linears, or "
            "a trinfer.Arch; pass one of these"
        )
    missing, seen = set(names), set[str]()
    for path, layer in layers:
        for name, part in layer.named_modules():
            if type(part) not in LINEARS:
                continue
            seen.add(name)
            hits = {n for n in names if name == n or name.endswith(f".{n}")}
            missing -= hits
            cut = "row-parallel" if hits else "column-parallel"
            found = match.obstacle(part) or match.plain(part)
            assert found is not None
            if isinstance(found, Found):
                found = replace(found, why=f"injection_policy: {cut}, whole on one device")
            yield f"{path}.{name}", found
    if missing:
        raise ValueError(
            f"injection_policy of {kind.__name__} names {', '.join(sorted(missing))}: no linear of the layer "
            f"is called so; it has {', '.join(sorted(seen)) or 'none'}; name these, or their last parts"
        )


def _by_row(
    model: nn.Module,
    kind: type[nn.Module],
    layers: list[tuple[str, nn.Module]],
    row: Arch,
    probes: probe.Probes,
) -> Iterator[tuple[str, Found | str]]:
    """The parts of the layers that a row names, then what is left of them, each part tried out."""
    entries: dict[str, Found | str] = {}
    for path, layer in layers:
        entries |= {f"{path}.{name}": found for name, found in _parts(layer, row, probes).items()}
    names = {row.router, row.experts, *(name for name, _ in match.readers(row))}
    named = {f"{path}.{name}" for path, _ in layers for name in names}
    if not any(isinstance(found, Found) for place, found in entries.items() if place in named):
        reasons = sorted({found for found in entries.values() if isinstance(found, str)})
        raise ValueError(
            f"injection_policy of {kind.__name__}: no part of the layer is what row {row.model_type!r} "
            f"says: {'; '.join(reasons) or 'none has its name'}; change the names and flags of the row"
        )
    yield from entries.items()


def _parts(layer: nn.Module, arch: Arch, probes: probe.Probes) -> dict[str, Found | str]:
    """What becomes of the parts of one layer, by their paths in it."""
    entries: dict[str, Found | str] = {}
    below: tuple[str, ...] = ()
    for name, reader in match.readers(arch):
        part = _find(layer, name) if name else None
        if part is None:
            continue
        entries[name] = _part(part, reader, probes)
        if reader.bypasses and isinstance(entries[name], Found):
            below = (*below, f"{name}.")
    if arch.experts:
        entries |= dict(read_moe.readings(layer, probes))
    block = _find(layer, arch.mlp) if arch.dense_branch and arch.coefficient else None
    if block is not None and _find(layer, arch.experts) is not None:
        entries[arch.mlp] = read_moe.read_residual(block, arch, probes)
    for name, part in layer.named_modules():
        if not name or name.startswith(below) or isinstance(entries.get(name), Found):
            continue
        found = match.plain(part)
        if found is not None:
            entries[name] = match.obstacle(part) or found
    return entries


def _find(layer: nn.Module, name: str) -> nn.Module | None:
    return dict(layer.named_modules()).get(name)


def _part(part: nn.Module, reader: match.Reader, probes: probe.Probes) -> Found | str:
    """What the row makes of one part; its own code is trusted as far as it gives the same."""
    refusal = match.obstacle(part, (type(part).__name__,)) or match.bypassed(part, reader.bypasses)
    found = refusal or reader(part)
    if isinstance(found, str):
        return found
    if isinstance(found.record, records.Attention):
        refusal = _attention_refusal(part, found, found.record, probes)
    else:
        widths = _widths(part, found.record)
        refusal = probes.refusal(part, found, widths, SCALES) if widths else ""
    return refusal or replace(found, why=f"injection_policy: {reader.role}, tried out")


def _widths(part: nn.Module, record: records.Record) -> tuple[int, ...]:
    """Sizes of the inputs of a part; none for a kind that is not tried out."""
    if isinstance(record, records.Norm):
        return tuple(p.numel() for p in list(part.parameters(recurse=False))[:1])
    first = {
        records.Mlp: lambda r: r.gate_up or r.gate or r.up,
        records.DenseAct: lambda r: r.dense,
    }.get(type(record))
    if first is None:
        return ()
    linear = part.get_submodule(first(record))
    weight = linear.get_parameter("weight")
    return (weight.shape[1] if type(linear) is nn.Linear else weight.shape[0],)


def _attention_call(part: nn.Module, names: records.Attention, probes: probe.Probes) -> dict[str, Any]:
    """Random arguments of attention: five tokens, the 4-D mask that says what they see, angles."""
    first = part.get_submodule(names.qkv or names.query)
    weight = first.get_parameter("weight")
    width = weight.shape[1] if type(first) is nn.Linear else weight.shape[0]
    call: dict[str, Any] = {"hidden_states": probe.rows(width, probes.dtype, probes.device, (1.0,) * 5)}
    seen = torch.ones(5, 5, dtype=torch.bool, device=probes.device)
    mask = torch.zeros(2, 1, 5, 5, dtype=probes.dtype, device=probes.device)
    seen = seen.tril() if names.is_causal else seen
    call["attention_mask"] = mask.masked_fill(~seen, torch.finfo(probes.dtype).min)
    if names.rotary != "none":
        steps = torch.arange(1.0, 1 + names.head_dim // 2, device=probes.device)
        angles = torch.arange(5.0, device=probes.device)[None, :, None] / steps
        is_half = names.rotary == "half"
        angles = torch.cat((angles, angles), -1) if is_half else angles.repeat_interleave(2, -1)
        call["position_embeddings"] = angles.cos().to(probes.dtype), angles.sin().to(probes.dtype)
    return call


def _attention_refusal(part: nn.Module, found: Found, names: records.Attention, probes: probe.Probes) -> str:
    """Why attention as the row says it is not what the module's own code computes; empty if it is."""
    # the forwards need triton, which a plan without kernels does without
    from trinfer.rewrite.apply import FORWARDS

    copied = probe.twin(part, probes.dtype, probes.device)
    call = _attention_call(copied, names, probes)
    try:
        with torch.no_grad():
            expected = type(part).forward(copied, **call)
    except probe.STRANGE as error:
        return f"is not called as the row's attention is ({type(error).__name__}: {error})"
    if not isinstance(expected, tuple) or len(expected) != 2:
        return f"gives a {type(expected).__name__}, the row's attention a pair"
    copied.__dict__["_trinfer"] = names
    with torch.no_grad():
        given = FORWARDS[found.forward](copied, **call)
    error_size = probe.error_of(given[0], expected[0])
    if error_size <= 2 * probe.TOLERANCE[probes.dtype]:
        return ""
    return f"looks like {found.text}, which gives something else: {error_size:.1e} off on random numbers"
