"""Making a plan: which modules of a model become kernels, which stay, and why. Works on meta models."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import GenerationMixin

from trinfer.architectures import ARCHITECTURES, Arch
from trinfer.backend import Backend
from trinfer.compat import ATTENTION_NAME, attention_implementation, dtype_name, uses_interface
from trinfer.config import InferenceConfig
from trinfer.layers import records
from trinfer.rewrite import generic, match, read_moe, whole
from trinfer.rewrite.findings import backbone, find_swaps, model_type, names_residual, row_of, rows_of
from trinfer.rewrite.layout import transposed
from trinfer.rewrite.masking import masking_of, step_of, with_masking
from trinfer.rewrite.overrides import SeenConfig
from trinfer.rewrite.plan import Kept, Plan, Step
from trinfer.rewrite.policy import read_policy
from trinfer.rewrite.probe import Probes

KERNELS_INSIDE = "the kernels below run in it, and what is listed as kept runs in torch between them"


def make_plan(model: nn.Module, config: InferenceConfig, backend: Backend) -> Plan:
    """What `init_inference` will do to `model`; nothing is touched.

    Raises:
        ValueError: kernel injection is asked for and no part of the model can be swapped, or `config.moe`,
            `config.injection_policy` or another option describes another model.
    """
    seen = SeenConfig(getattr(model, "config", None), config.config)
    plan = _plan(model, seen, config, backend)
    seen.refuse_unread()
    return transposed(model, plan) if config.transposed_mode else plan


def _plan(model: nn.Module, seen: SeenConfig, config: InferenceConfig, backend: Backend) -> Plan:
    training = tuple(path for path, module in model.named_modules() if module.training)
    steps = list(_whole_model(model, config, backend, bool(training)))
    # a policy says itself how its layers are read
    row = row_of(seen) if config.injection_policy is None else None
    arch, policy = by_moe_type(row, seen, config)
    read_moe.check(model, config, any(map(names_residual, (arch, *policy.values()))))
    if config.injection_policy is not None:
        swaps, kept = read_policy(model, policy, Probes(config.dtype, backend.device))
        if config.enable_cuda_graph:
            swaps = _in_pieces(model, swaps, "a policy swaps parts of layers")
        return Plan(
            "user policy",
            type(model).__name__,
            "",
            (*steps, *swaps),
            tuple(kept),
            f"model.forward; {KERNELS_INSIDE}",
            training=training,
        )
    if not config.replace_with_kernel_inject:
        step = "model.forward; replace_with_kernel_inject was not asked for"
        return Plan("pass-through", type(model).__name__, "", tuple(steps), (), step, training=training)
    return _injected(model, seen, config, backend, arch, steps, training)


def _injected(
    model: nn.Module,
    seen: SeenConfig,
    config: InferenceConfig,
    backend: Backend,
    arch: Arch | None,
    steps: list[Step],
    training: tuple[str, ...],
) -> Plan:
    """The plan of kernel injection, behind the steps that change the whole model."""
    read = generic.read(model, config, backend.device)
    arch, masking = masking_of(model, arch, backbone(model, arch) if arch else "", seen, config)
    swaps, kept = find_swaps(model, arch, read)
    if not swaps:
        raise ValueError(_nothing_found(model, kept))
    if masking is not None:
        steps.append(step_of(masking))
    swaps = _returning(model, with_masking(model, masking, swaps, config), config.return_tuple)
    attention = _former_attention(model, arch, swaps) if arch else read.attention
    if attention is not None:
        why = "attention and mask function are registered under this name"
        why += "" if arch else f"; asked for by {len(read.asking)} modules"
        steps.append(Step("", f"{attention} attention", f"{ATTENTION_NAME} attention", why))
    decoder = _decoder(model, seen, arch, swaps)
    if isinstance(decoder, str):
        step = f"model.forward, as {decoder}; {KERNELS_INSIDE}"
        swaps = _in_pieces(model, swaps, decoder, bool(masking)) if config.enable_cuda_graph else swaps
    else:
        step = _launches(decoder) + ("; recorded once per batch size" if config.enable_cuda_graph else "")
    return Plan(
        "kernel injection",
        type(model).__name__,
        arch.model_type if arch else "",
        (*steps, *swaps),
        tuple(kept),
        step,
        attention=attention,
        training=training,
        decoder=None if isinstance(decoder, str) else decoder,
        masking=masking,
    )


def _returning(model: nn.Module, swaps: list[Step], return_tuple: bool) -> list[Step]:
    """The swaps, with whole layers that give what `return_tuple` says when they are called by hand.

    Raises:
        ValueError: it is False, and no layer is replaced as a whole.
    """
    if return_tuple:
        return swaps
    if not any(isinstance(step.record, records.Block) for step in swaps):
        raise ValueError(
            f"return_tuple=False: no whole layer of {type(model).__name__} is replaced, and its own layers "
            "give what they always give; leave return_tuple out"
        )
    return [
        replace(step, record=replace(step.record, return_tuple=False))
        if isinstance(step.record, records.Block)
        else step
        for step in swaps
    ]


def by_moe_type(
    arch: Arch | None, seen: SeenConfig, config: InferenceConfig
) -> tuple[Arch | None, dict[type, Any]]:
    """The model's row and the policy; what a row says of residual layers counts only where they are asked."""

    def asked(row: Any) -> Any:
        is_plain = isinstance(row, Arch) and config.moe.type != "residual"
        return replace(row, dense_branch="", coefficient="") if is_plain else row

    given = (config.injection_policy or {}).items()
    policy = {kind: asked(row.resolved(seen) if isinstance(row, Arch) else row) for kind, row in given}
    if not config.moe.enabled:
        policy = {k: replace(row, experts="") if isinstance(row, Arch) else row for k, row in policy.items()}
    return asked(arch), policy


def _former_attention(model: nn.Module, arch: Arch | None, swaps: list[Step]) -> str | None:
    """The attention implementation that trinfer's takes the place of; None if the model keeps its own."""
    former = attention_implementation(model) if arch else None
    if former is None or uses_interface(model):
        return former
    # its own code makes sense only of its own masks
    paths = {step.path for step in swaps if isinstance(step.record, records.Attention)}
    classes = {type(model.get_submodule(path)) for path in paths}
    stays = any(type(module) in classes and path not in paths for path, module in model.named_modules())
    inverted = any(row.mask_is_inverted for row in rows_of(arch))
    return None if inverted or stays or not classes else former


def _decoder(
    model: nn.Module, seen: SeenConfig, arch: Arch | None, swaps: list[Step]
) -> records.Decoder | str:
    """What a decode step of launches must know, or why there is none."""
    blocks = {step.path: step.record for step in swaps if isinstance(step.record, records.Block)}
    if arch is not None and arch.decoder is not None:
        return "its decoder attends to an encoder as well"
    if arch is None or not blocks:
        return "it has no row" if arch is None else "its layers run part by part"
    if not isinstance(model, GenerationMixin):
        return "it does not generate"
    return whole.decoder(model, seen, arch, backbone(model, arch), blocks)


def _in_pieces(model: nn.Module, swaps: list[Step], why: str, is_turned: bool = False) -> list[Step]:
    """The same swaps, with the whole layers of an encoder recorded one by one.

    `is_turned`: its layers are those that are causal, as `triangular_masking` asked.

    Raises:
        ValueError: there is none.
    """
    pieces = {
        step.path
        for step in swaps
        if isinstance(step.record, records.Block) and step.record.attention.is_causal == is_turned
    }
    if not pieces:
        raise ValueError(
            f"enable_cuda_graph=True finds nothing to record in {type(model).__name__}: no step of launches "
            f"({why}) and no whole layer of an encoder; leave enable_cuda_graph out"
        )
    return [
        replace(step, becomes=f"{step.becomes}; recorded by shape", forward="recorded_block")
        if step.path in pieces
        else step
        for step in swaps
    ]


def _launches(decoder: records.Decoder) -> str:
    each = {block.launches for block in decoder.blocks}
    return (
        f"kernels: advance, embedding, {len(decoder.blocks)} layers of {max(each)} launches, head; "
        "model.forward for beams and for calls with hooks, embeddings or positions of their own"
    )


def _whole_model(
    model: nn.Module, config: InferenceConfig, backend: Backend, is_training: bool
) -> Iterator[Step]:
    tensors = [*model.parameters(), *model.buffers()]
    dtypes = {t.dtype for t in model.parameters() if t.is_floating_point()} - {config.dtype}
    if dtypes:
        was = ", ".join(sorted(map(dtype_name, dtypes)))
        yield Step(
            "", was, dtype_name(config.dtype), "dtype; all parameters and buffers but rotary frequencies"
        )
    devices = {t.device for t in tensors if t.device.type != "meta"} - {backend.device}
    if config.keep_module_on_host:
        where = "met by definition on a CPU" if backend.device.type == "cpu" else "until engine.to(device)"
        yield Step("", "host memory", "host memory", f"keep_module_on_host; {where}")
    elif devices:
        yield Step(
            "", ", ".join(sorted(map(str, devices))), str(backend.device), "the device of this machine"
        )
    if is_training:
        yield Step("", "training mode", "eval mode", "dropout must not run")


def _nothing_found(model: nn.Module, kept: list[Kept]) -> str:
    found = "; ".join(sorted({f"{k.was} ({k.why})" for k in kept if k.path})) or "no module that computes"
    rows = ", ".join(sorted(ARCHITECTURES))
    return (
        f"replace_with_kernel_inject=True finds nothing to swap in {type(model).__name__}; looked for a row "
        f"in ARCHITECTURES (it has {rows}) for model_type {model_type(model)!r}, "
        f"and for modules that are exactly {match.PLAIN_CLASSES}; found {found}; leave the option out"
    )
