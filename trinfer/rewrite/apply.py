"""Applying a plan to a model, and taking it back."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from trinfer import compat
from trinfer.graphs import Pieces
from trinfer.layers import (
    activation,
    attention,
    block,
    embedding,
    linear,
    mask,
    mlp,
    moe,
    norm,
    read,
    recorded,
    records,
)
from trinfer.rewrite.plan import Plan

# the name of a step's forward -> the function that is bound; adding a kind of layer is one line here
FORWARDS: dict[str, Callable[..., Any]] = {
    "activation": activation.activation_forward,
    "block": block.block_forward,
    "decoder_attention": attention.decoder_attention_forward,
    "dense_act": mlp.dense_act_forward,
    "dense_add_norm": mlp.dense_add_norm_forward,
    "done": read.done_forward,
    "embedding": embedding.embedding_forward,
    "encoder_attention": attention.encoder_attention_forward,
    "experts": moe.experts_forward,
    "layer_norm": norm.layer_norm_forward,
    "linear": linear.linear_forward,
    "linear_act": read.linear_act_forward,
    "mlp": mlp.mlp_forward,
    "recorded_block": recorded.recorded_block_forward,
    "patches": embedding.patches_forward,
    "read_mlp": read.read_mlp_forward,
    "read_norm": read.read_norm_forward,
    "residual_attention": attention.residual_attention_forward,
    "residual_moe": moe.residual_moe_forward,
    "residual_mlp": mlp.residual_mlp_forward,
    "rms_norm": norm.rms_norm_forward,
    "router": moe.router_forward,
}


def apply(model: nn.Module, plan: Plan) -> None:
    """Bind every forward of `plan` and choose trinfer's attention; on failure the model is as it was.

    Parameters, state_dict keys and ties stay as they are.
    """
    found = [(model.get_submodule(step.path), FORWARDS[step.forward], step.record) for step in plan.swapped]
    with ExitStack() as rollback:
        rollback.callback(undo, model, plan)
        if plan.attention is not None or plan.masking is not None:
            compat.own_config(model)
        if plan.attention is not None:
            register()
            compat.set_attention(model, compat.ATTENTION_NAME)
        if plan.masking is not None:
            is_causal = plan.masking.is_causal
            compat.set_causal(model, plan.masking.modules, is_causal, None if is_causal else False)
        for path in plan.transposed:
            _lay_out(model.get_submodule(path), is_transposed=True)
        for module, forward, record in found:
            module.__dict__["_trinfer"] = record
            # not a bound method: pickle stores one as getattr(module, name), which loses the swap
            module.__dict__["forward"] = partial(forward, module)
            if forward is recorded.recorded_block_forward:
                module.__dict__["_trinfer_pieces"] = Pieces()
        for module in _surroundings(model, plan):
            module.__dict__["forward"] = block.Surrounding(module)
        rollback.pop_all()


def undo(model: nn.Module, plan: Plan) -> None:
    """Take back what `apply` did, all of it or the part that it had done."""
    for module in _surroundings(model, plan):
        if isinstance(module.__dict__.get("forward"), block.Surrounding):
            del module.__dict__["forward"]
    for step in plan.swapped:
        attributes = model.get_submodule(step.path).__dict__
        if "_trinfer" in attributes:
            attributes.pop("forward", None)
            attributes.pop("_trinfer_pieces", None)
            del attributes["_trinfer"]
    if plan.attention is not None and compat.attention_implementation(model) == compat.ATTENTION_NAME:
        compat.set_attention(model, plan.attention)
    if plan.masking is not None:
        compat.set_causal(model, plan.masking.modules, not plan.masking.is_causal, plan.masking.configured)
    for path in plan.transposed:
        _lay_out(model.get_submodule(path), is_transposed=False)


def _lay_out(linear: Any, *, is_transposed: bool) -> None:
    """Move a weight in memory; its shape, its values and the parameter that holds it stay."""
    weight = linear.weight.data
    linear.weight.data = weight.t().contiguous().t() if is_transposed else weight.contiguous()


def _surroundings(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """All modules in whose forwards whole layers run, the model among them."""
    swapped = {step.path for step in plan.swapped}
    layers = [step.path for step in plan.swapped if isinstance(step.record, records.Block)]
    paths = {above for path in layers for above in _above(path)}
    found: list[nn.Module] = []
    for path in sorted(paths - swapped):
        module = model.get_submodule(path)
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            found.append(module)
    return found


def _above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def register() -> None:
    """Tell transformers of both attention functions; harmless for models that do not choose them."""
    compat.register_attention(attention.attention_function, mask.mask_function)
