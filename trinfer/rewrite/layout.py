"""`transposed_mode`: weights of replaced linears that lie in memory as [in, out]."""

from collections import Counter
from dataclasses import replace

from torch import nn
from transformers.pytorch_utils import Conv1D

from trinfer.rewrite import match
from trinfer.rewrite.plan import Kept, Plan, Step


def transposed(model: nn.Module, plan: Plan) -> Plan:
    """The plan with weights that change their place in memory: of the linears that kernels read.

    A weight that is shared with another module keeps it, for the sake of the other; that of a Conv1D lies as
    [in, out] already.

    Raises:
        ValueError: no weight can change its place, or one of several that are read together cannot.
    """
    inside = [step.path for step in plan.swapped]
    users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    steps, kept = [], []
    for path, module in model.named_modules():
        is_read = any(_holds(outer, path) for outer in inside) and not match.strange_weights(module)
        if not is_read or not (type(module) is Conv1D or match.is_linear(module)):
            continue
        if type(module) is Conv1D:
            kept.append(Kept(f"{path}.weight", "[in, out]", "transposed_mode: a Conv1D lies so already"))
        elif users[id(module.weight)] > 1 and path not in inside:
            raise ValueError(
                f"transposed_mode=True: another module has the weight of {path} too, which has to lie as "
                "those that are read beside it; leave transposed_mode out"
            )
        elif users[id(module.weight)] > 1:
            kept.append(Kept(f"{path}.weight", "[out, in]", "transposed_mode: another module has it too"))
        else:
            steps.append(Step(path, "weight [out, in]", "stored as [in, out]", "transposed_mode"))
    if not steps:
        raise ValueError(
            f"transposed_mode=True finds no linear in {type(model).__name__} to lay out as [in, out]; "
            "leave transposed_mode out"
        )
    moved = tuple(step.path for step in steps)
    return replace(plan, steps=(*plan.steps, *steps), kept=(*plan.kept, *kept), transposed=moved)


def _holds(outer: str, path: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")
