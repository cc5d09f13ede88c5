"""What becomes of a model of every architecture: the table that `trinfer plan --all` prints."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, GenerationMixin
from transformers.models.auto import modeling_auto as auto

from trinfer.architectures import ARCHITECTURES, Arch
from trinfer.engine import make_plan
from trinfer.layers import records
from trinfer.rewrite import Plan
from trinfer.rewrite.plan import aligned

# enough for every kind of layer that a default configuration mixes
LAYERS = 4
EXPERTS = 16
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
SIZES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
HEADER = ("architecture", "model", "layers run", "launches a layer", "step", "attention", "kept, and why")
# kept by every model of its kind: its reasons say nothing of the architecture
USUAL = ("cos and sin are made once per forward", "adds its tables in torch")


@dataclass(frozen=True)
class Surveyed:
    """One architecture: the model it was tried on, and what its plan says.

    `launches`: of a whole layer, for one token. `step`: a decode step is launches, or why the model's forward
    runs it. `attention`: a whole module with its projections is swapped, or kernels come in through
    transformers' attention interface.
    """

    architecture: str
    model: str
    layers: str
    launches: str
    step: str
    attention: str
    kept: str

    def cells(self) -> tuple[str, ...]:
        """The row of a table under `HEADER`."""
        return tuple(vars(self).values())


def survey(dtype: torch.dtype = torch.float16) -> Iterator[Surveyed]:
    """Plan a model of each row in `ARCHITECTURES`, built without weights from its default configuration."""
    for name, row in ARCHITECTURES.items():
        if name not in CONFIG_MAPPING:
            yield Surveyed(name, "", "", "", "", "", "its code comes with its checkpoints")
            continue
        model = default_model(name, row)
        plan = make_plan(model, dtype=dtype, replace_with_kernel_inject=True)
        yield _surveyed(name, model, plan)


def default_model(model_type: str, row: Arch) -> nn.Module:
    """A model of an architecture on the meta device, with a few layers."""
    default = AutoConfig.for_model(model_type)
    given = default.to_dict()
    sizes = {name: LAYERS for name in SIZES if name in given}
    sizes |= {name: min(EXPERTS, given[name]) for name in EXPERT_COUNTS if given.get(name)}
    if hasattr(default, "attention_types"):
        # it lists its layers one by one
        sizes = {}
    if getattr(default, "num_key_value_heads", 0) is None:
        sizes["num_key_value_heads"] = default.num_attention_heads
    config = AutoConfig.for_model(model_type, **sizes)
    with torch.device("meta"):
        return _model_class(model_type, row)._from_config(config).eval()


def _model_class(model_type: str, row: Arch) -> Any:
    """The class with the head that the architecture is used with."""
    kinds: tuple[Any, ...] = (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if row.decoder is not None:
        kinds = (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,)
    names: list[Any] = [kind[model_type] for kind in (*kinds, auto.MODEL_MAPPING_NAMES) if model_type in kind]
    return getattr(transformers, names[0])


def _surveyed(name: str, model: nn.Module, plan: Plan) -> Surveyed:
    blocks = [step.record for step in plan.swapped if isinstance(step.record, records.Block)]
    parts = [step for step in plan.swapped if isinstance(step.record, records.Attention)]
    launches = " or ".join(map(str, sorted({block.launches for block in blocks})))
    step = "launches" if plan.decoder is not None else plan.step.partition(", as ")[2].partition(";")[0]
    step = step if isinstance(model, GenerationMixin) else ""
    attention = "whole module" if parts else "by the interface" if plan.attention else "its own"
    return Surveyed(name, type(model).__name__, _level(plan, blocks), launches, step, attention, _kept(plan))


def _level(plan: Plan, blocks: list[records.Block]) -> str:
    """How layers run: whole, part by part, or some of them whole."""
    if not blocks:
        return "part by part"
    apart = any(kept.path.rpartition(".")[2].isdecimal() for kept in plan.kept)
    return "some whole" if apart else "whole"


def _kept(plan: Plan) -> str:
    """What stays in torch and is not so in every model, with the reason."""
    found: dict[str, str] = {}
    for kept in plan.kept:
        why = kept.why
        if kept.path and not any(usual in why for usual in USUAL):
            found.setdefault(kept.was, why)
    return "; ".join(f"{was}: {why}" for was, why in found.items())


def table(rows: list[Surveyed]) -> str:
    """The survey in plain text."""
    note = f"transformers {transformers.__version__}; small models of the default configurations"
    return f"{note}\n\n{aligned(HEADER, [row.cells() for row in rows])}"
