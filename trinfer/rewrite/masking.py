"""`triangular_masking`: causal attention for an encoder, attention in both directions for a decoder."""

from dataclasses import replace
from operator import attrgetter
from typing import Any

from torch import nn

from trinfer.architectures import Arch
from trinfer.compat import attention_modules
from trinfer.config import InferenceConfig
from trinfer.layers import records
from trinfer.rewrite import match
from trinfer.rewrite.plan import Masking, Step


def masking_of(
    model: nn.Module, arch: Arch | None, root: str, seen: Any, config: InferenceConfig
) -> tuple[Arch | None, Masking | None]:
    """The row with the causal rule that holds, and what differs from the architecture's own.

    Either `triangular_masking` asks for it, or the configuration of a decoder does, as transformers' masks
    understand it.

    Args:
        root: path of the model's backbone.
        seen: the model's configuration.

    Raises:
        ValueError: the option is set for a model that no row describes, or that cannot have the other mask.
    """
    is_set = config.is_set("triangular_masking")
    if arch is None or arch.decoder is not None:
        if is_set:
            why = "has masks of both kinds" if arch else "is described by no row in trinfer.ARCHITECTURES"
            raise ValueError(_refusal(model, config, why))
        return arch, None
    # masks that its own code makes never heard of the configuration
    makes_masks = arch.mask_is_inverted or arch.mask_is_open or bool(arch.foreign)
    own = _is_causal(model, arch, root)
    is_told = own and not makes_masks and getattr(seen, "is_causal", None) is False
    asked = config.triangular_masking if is_set else own and not is_told
    if asked == own and not is_told:
        return arch, None
    if own and not asked and makes_masks:
        raise ValueError(_refusal(model, config, "makes its own masks, which are always causal"))
    configured = vars(model.config).get("is_causal") if hasattr(model, "config") else None
    modules = tuple(path for path, m in model.named_modules() if m.__dict__.get("is_causal") is (not asked))
    why = f"triangular_masking={asked}" if is_set else "config.is_causal=False"
    return replace(arch, is_causal=asked), Masking(asked, modules, configured, why)


def _refusal(model: nn.Module, config: InferenceConfig, why: str) -> str:
    option = f"triangular_masking={config.triangular_masking}"
    return f"{option}: {type(model).__name__} {why}; leave triangular_masking out"


def _is_causal(model: nn.Module, arch: Arch, root: str) -> bool:
    """The architecture's own rule, from the attention of its first layer that says it."""
    path = ".".join(filter(None, (root, arch.layers)))
    for layer in attrgetter(path)(model).children() if match.has(model, path) else ():
        if not match.has(layer, arch.attention):
            continue
        attention = attrgetter(arch.attention)(layer)
        if isinstance(arch.is_causal, bool) or match.has(attention, arch.is_causal):
            return bool(match.stated(attention, arch.is_causal))
    return arch.is_causal is True


def step_of(masking: Masking) -> Step:
    """The line of the plan."""
    was, becomes = "attention in both directions", "causal attention"
    if not masking.is_causal:
        was, becomes = becomes, was + ("; generate raises" if stops_generation(masking) else "")
    return Step("", was, becomes, masking.why)


def stops_generation(masking: Masking) -> bool:
    """True where the caller turned a decoder into what cannot generate."""
    return not masking.is_causal and masking.why.startswith("triangular_masking")


def with_masking(
    model: nn.Module, masking: Masking | None, swaps: list[Step], config: InferenceConfig
) -> list[Step]:
    """The swaps of a model that attends by the rule that is not its architecture's.

    transformers makes the masks of a decoder by `config.is_causal`, and its window then holds the token that
    far away; the masks of an encoder never are causal, so there each attention adds the rule.

    Raises:
        ValueError: attention that the kernels do not replace would go by its own rule.
    """
    if masking is None:
        return swaps
    attentions = {step.path for step in swaps if isinstance(step.record, records.Attention)}
    left = [path for path in sum(attention_modules(model), []) if path not in attentions]
    if not masking.is_causal:
        left = [path for path in left if getattr(model.get_submodule(path), "sliding_window", None)]
    if left or not attentions and masking.is_causal:
        where = ", ".join(left[:3]) or type(model).__name__
        raise ValueError(_refusal(model, config, f"keeps attention of its own at {where}"))
    turned = _causal if masking.is_causal else _both_ways
    return [replace(step, record=turned(step.record)) for step in swaps]


def _causal(record: Any) -> Any:
    if isinstance(record, records.Block):
        return replace(record, attention=_causal(record.attention))
    return replace(record, mask_is_open=True) if isinstance(record, records.Attention) else record


def _both_ways(record: Any) -> Any:
    if isinstance(record, records.Block):
        return replace(record, attention=_both_ways(record.attention))
    if isinstance(record, records.Attention) and record.window is not None:
        return replace(record, window=record.window + 1)
    return record
