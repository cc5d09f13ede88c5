"""The generic pass: norms, MLPs and experts that no row names, read from their code and then tried out.

A reader proposes, the numbers decide: constants come from the traced graph, which of the kernels' formulas it
is from comparing values, and a module is swapped only if its bound forward gives what its own code gives.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from trinfer.compat import attention_modules, leaves_window_to_mask, parts_attention
from trinfer.config import InferenceConfig
from trinfer.rewrite import match, read_moe
from trinfer.rewrite.match import Found
from trinfer.rewrite.plan import Kept
from trinfer.rewrite.probe import Probes
from trinfer.rewrite.read_mlp import LINEARS, loose_activations, read_linear, read_mlp
from trinfer.rewrite.read_norm import read_norm

# forwards that no longer call the children of their module
BYPASSING = ("experts", "read_mlp", "read_norm", "router")
READERS: dict[str, Callable[[nn.Module, Probes], Found | str | None]] = {
    "linear": read_linear,
    "mlp": read_mlp,
    "norm": read_norm,
}


@dataclass(frozen=True)
class Reading:
    """What was read of a model before its row, if it has one, was asked.

    `attention` is the implementation that trinfer's replaces in a model without a row, None if the model
    keeps its own; `asking` are the modules that ask transformers' interface for it, `apart` those that the
    readers of norms and MLPs pass over; `moe` is what becomes of routers and experts, `untouched` are the
    MoE layers that the caller wants to stay as they are.
    """

    probes: Probes
    moe: dict[str, Found | str]
    untouched: tuple[str, ...]
    kept: tuple[Kept, ...]
    attention: str | None
    asking: tuple[str, ...]
    apart: frozenset[str]

    def rest(self, model: nn.Module, taken: Container[str]) -> Iterator[tuple[str, Found | str]]:
        """(path, what it becomes or why not) of the norms and MLPs outside the paths in `taken`."""
        for path, found in readings(model, self.probes, self.apart):
            if path not in taken:
                yield path, found


def read(model: nn.Module, config: InferenceConfig, device: torch.device) -> Reading:
    """Read a model that will run on `device`; nothing in it changes."""
    asking, own = attention_modules(model)
    attention, kept = _attention(model, asking, own)
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    shared = frozenset(key for key, count in places.items() if count > 1)
    probes = Probes(config.dtype, device, shared)
    moe = dict(read_moe.readings(model, probes)) if config.moe.enabled else {}
    untouched = () if config.moe.enabled else tuple(read_moe.layers_in(model))
    apart = frozenset([*asking, *own, *moe])
    return Reading(probes, moe, untouched, tuple(kept), attention, tuple(asking), apart)


def _attention(model: nn.Module, asking: list[str], own: list[str]) -> tuple[str | None, list[Kept]]:
    """The implementation that trinfer's attention can replace, and which modules keep theirs and why."""
    alone = "computes attention itself and does not ask transformers' interface for it"
    used = parts_attention(model)
    kept = [Kept(path, type(model.get_submodule(path)).__name__, alone) for path in own]
    windows = leaves_window_to_mask(model, asking)
    if asking and not own and len(used) == 1 and not windows:
        return used.pop(), kept
    if windows:
        mixed = f"{windows[0]} does not tell the interface of its window, which only the masks hold"
    elif len(used) > 1:
        mixed = f"parts of the model use different attention ({', '.join(sorted(used))})"
    else:
        mixed = "other modules compute attention themselves, from the same mask"
    kept += [Kept(path, type(model.get_submodule(path)).__name__, mixed) for path in asking]
    return None, kept


def readings(model: nn.Module, probes: Probes, apart: frozenset[str]) -> Iterator[tuple[str, Found | str]]:
    """(path, what it becomes or why not) of every module that looks like a norm, an MLP or a part of one.

    `apart`: paths that something else speaks for, attention modules for one.
    """
    below: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if not path or path in apart or path.startswith(below):
            continue
        for where, found in _read(path, module, probes):
            yield where, found
            if where == path and isinstance(found, Found):
                below = (*below, f"{path}.")


def _read(path: str, module: nn.Module, probes: Probes) -> Iterator[tuple[str, Found | str]]:
    if match.plain(module) is not None:
        return
    kind = looks_like(module)
    if kind:
        found = unreadable(module) or READERS[kind](module, probes)
        if found is not None:
            yield path, found
        if isinstance(found, Found):
            return
    for name, entry in loose_activations(module, probes):
        yield f"{path}.{name}", entry


def looks_like(module: nn.Module) -> str:
    """linear: a matrix, perhaps a bias; norm: one or two vectors; mlp: up to three linears, nothing else."""
    named = dict(module.named_parameters(recurse=False))
    own = list(named.values())
    if not any(match.computes(child) for child in module.children()):
        is_linear = "weight" in named and named["weight"].dim() == 2 and named.keys() <= {"weight", "bias"}
        if is_linear and hasattr(module, "bias") and not isinstance(module, nn.Embedding):
            return "linear"
        are_rows = all(p.dim() == 1 and p.shape == own[0].shape for p in own)
        is_named = "norm" in type(module).__name__.lower()
        return "norm" if are_rows and len(own) <= 2 and (own or is_named) else ""
    linears = [part for part in module.modules() if type(part) in LINEARS]
    held = sum(len(list(linear.parameters(recurse=False))) for linear in linears)
    return "mlp" if 1 <= len(linears) <= 3 and len(list(module.parameters())) == held else ""


def unreadable(module: nn.Module) -> str:
    """Why the code of this module does not say all that happens in it; empty if it does."""
    if "forward" in module.__dict__:
        return "has a forward of its own on the instance, which a swap would drop"
    for name, part in module.named_modules():
        if problem := match.strange_weights(part):
            return f"{name}: {problem}" if name else problem
    return match.bypassed(module, True)
