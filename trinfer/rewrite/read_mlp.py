"""Reading an MLP that no row names: its linears from the traced graph, its activation from its values."""

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers.pytorch_utils import Conv1D

from trinfer.layers import records
from trinfer.rewrite import match, probe
from trinfer.rewrite.match import Found

LINEARS = (nn.Linear, Conv1D)
SCALES = (1.0, 0.1, 3.0)
ADDITIONS = (operator.add, torch.add, "add")
HALVES = ("gate_up", "up_gate", "gate_up_rows", "up_gate_rows")
STRANGE = "its activation is none of the kernels' and stays in torch between its products"


@dataclass(frozen=True)
class Shape:
    """Names of the linears and the code between them, a function of what the first ones give.

    `adds_residual`: a second argument is added to what the linears give.
    """

    ups: tuple[str, ...]
    down: str
    between: Callable[..., Any]
    adds_residual: bool


def read_mlp(module: nn.Module, probes: probe.Probes) -> Found | str | None:
    """down(act(gate(x)) · up(x)) and its variants; None for a linear with nothing around it."""
    graph = probe.trace(module)
    shape = graph if isinstance(graph, str) else _shape(module, graph)
    if isinstance(shape, str):
        return shape
    linears = [module.get_submodule(name) for name in (*shape.ups, shape.down) if name]
    kinds = {type(linear) for linear in linears}
    if len(kinds) > 1:
        return "mixes Linear and Conv1D"
    is_transposed = kinds == {Conv1D}
    widths = [_sizes(linear)[0] for linear in linears[: len(shape.ups)]]
    act, order = activation_of(shape, widths, probes.device)
    if not act:
        return STRANGE
    if act == "none" and not shape.down and not shape.adds_residual:
        return None
    ups = tuple(reversed(shape.ups)) if order == "swapped" else shape.ups
    halves = order if order in HALVES else ""
    x, *others = (p.name for p in probe.parameters_of(type(module).forward))
    residual = others[0] if shape.adds_residual else ""
    record = records.ReadMlp(x, ups, shape.down, act, halves, is_transposed, residual)
    middle = f"{act}(gate)·up" if halves or len(ups) == 2 else act
    fused = f", gate and up in {ups[0]}" if halves else ""
    then = ", then down" * bool(shape.down) + " with residual" * bool(residual)
    found = Found(
        f"gemv | matmul: {middle}{then}", "read_mlp", record, f"read from its code{fused}; tried out"
    )
    inputs = (_sizes(linears[0])[1], *([_sizes(linears[-1])[0]] if residual else []))
    return probes.refusal(module, found, inputs, SCALES) or found


def _sizes(linear: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a linear."""
    weight = linear.get_parameter("weight")
    out, width = weight.shape if type(linear) is nn.Linear else reversed(weight.shape)
    return out, width


def _shape(module: nn.Module, graph: fx.Graph) -> Shape | str:
    """Which linears the graph starts and ends with, and what is between."""
    calls = [n for n in graph.nodes if n.op == "call_module" and _linear_at(module, n)]
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    if len({n.target for n in calls}) < len(calls):
        return "calls a linear more than once"
    (last,) = next(n for n in graph.nodes if n.op == "output").args
    end, adds_residual = _behind(module, last), False
    if len(inputs) == 2 and isinstance(end, fx.Node) and end.target in ADDITIONS:
        terms = [n for n in end.args if n is not inputs[1]]
        end, adds_residual = _behind(module, terms[0]), len(terms) == 1 and not end.kwargs
    if len(inputs) != 1 + adds_residual:
        return f"takes {len(inputs)} inputs"
    down = end if end in calls and len(calls) > 1 else None
    ups = [n for n in calls if n is not down]
    if down is not None:
        end = _behind(module, down.args[0])
    if not 1 <= len(ups) <= 2 or any(_behind(module, n.args[0]) is not inputs[0] for n in ups):
        return "its linears do not follow one another as in an MLP"
    between = _cut(module, ups, end)
    if between is None:
        return "more than an activation lies between its linears"
    names = tuple(str(n.target) for n in ups)
    return Shape(names, "" if down is None else str(down.target), between, adds_residual)


def _linear_at(module: nn.Module, node: fx.Node) -> bool:
    return type(module.get_submodule(str(node.target))) in LINEARS


def _behind(module: nn.Module, node: Any) -> Any:
    """The node whose value this one hands on: dropout and identity do nothing in eval mode."""
    while isinstance(node, fx.Node):
        is_idle = node.op == "call_module" and not match.computes(module.get_submodule(str(node.target)))
        if not is_idle and node.target is not nn.functional.dropout:
            break
        node = node.args[0]
    return node


def _cut(module: nn.Module, ups: list[fx.Node], end: Any) -> Callable[..., Any] | None:
    """The part of a graph from `ups` to `end` as a function; None if it reads anything else."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for index, node in enumerate(ups):
        made[node] = graph.placeholder(f"h{index}")

    def copied(node: fx.Node) -> bool:
        """Copy a node and what it reads; False if that goes back beyond `ups`."""
        if node in made:
            return True
        reads = node.all_input_nodes
        if node.op == "placeholder" or not all(map(copied, reads)):
            return False
        made[node] = graph.node_copy(node, made.__getitem__)
        return True

    if not isinstance(end, fx.Node) or not copied(end):
        return None
    graph.output(made[end])
    return fx.GraphModule(module, graph)


def activation_of(
    shape: Shape, widths: list[int], device: torch.device, is_grouped: bool = False
) -> tuple[str, str]:
    """The kernel's activation between the products, and which of their outputs it is of; empty for none.

    `is_grouped`: those of the products of experts count as well.
    """
    generator = torch.Generator(device).manual_seed(2)
    # wide enough for gates that clamp
    h = [5 * torch.randn(64, width, generator=generator, device=device) for width in widths]
    try:
        with torch.no_grad():
            y = shape.between(*(part.clone() for part in h))
    except probe.STRANGE:
        return "", ""
    if not isinstance(y, Tensor):
        return "", ""
    # the kernels need triton, which a plan without kernels does without
    from trinfer.kernels.elements import ACTIVATIONS, GATED_ACTIVATIONS, activate_ref, gate_up_ref

    for order, gate, up in _orders(h):
        for act in ACTIVATIONS if up is None or not is_grouped else GATED_ACTIVATIONS:
            z = activate_ref(gate, act) if up is None else gate_up_ref(gate, up, act)
            if probe.error_of(z, y) <= probe.TOLERANCE[torch.float32]:
                return act, order
    return "", ""


def _orders(h: list[Tensor]) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Every way in which the outputs of the first products can be gate and up."""
    if len(h) == 2:
        yield "given", h[0], h[1]
        yield "swapped", h[1], h[0]
        return
    yield "plain", h[0], None
    if h[0].shape[-1] % 2 == 0:
        halves, others = h[0].chunk(2, -1), (h[0][..., 0::2], h[0][..., 1::2])
        for order in HALVES:
            first, second = others if order.endswith("rows") else halves
            yield order, *((first, second) if order.startswith("gate") else (second, first))


def loose_activations(module: nn.Module, probes: probe.Probes) -> Iterator[tuple[str, Found]]:
    """Pairs of a linear and an activation of the same layer, the one called with what the other gives."""
    acts = {name: act for name, child in module.named_children() if (act := match.activation_name(child))}
    linears = {name for name, child in module.named_children() if type(child) in LINEARS}
    if not acts or not linears:
        return
    graph = probe.trace(module)
    if isinstance(graph, str):
        return
    calls = Counter(n.target for n in graph.nodes if n.op == "call_module")
    for node in graph.nodes:
        before = node.args[0] if node.op == "call_module" and node.target in acts else None
        if not isinstance(before, fx.Node) or before.target not in linears or len(before.users) > 1:
            continue
        names = str(before.target), str(node.target)
        pair = [module.get_submodule(name) for name in names]
        if any(calls[name] > 1 for name in names) or any(map(_is_watched, pair)):
            continue
        if probes.shared & set(map(id, pair)):
            continue
        yield from _pair(module, *names, acts[node.target], probes)


def _is_watched(module: nn.Module) -> bool:
    """True if hooks or a forward of the instance would see other values after a swap."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _pair(
    module: nn.Module, linear: str, activation: str, act: str, probes: probe.Probes
) -> Iterator[tuple[str, Found]]:
    layer, child = module.get_submodule(linear), module.get_submodule(activation)
    if match.strange_weights(layer) or getattr(child, "inplace", False):
        return
    together = nn.Sequential(layer, child)
    record = records.LinearAct(act, type(layer) is Conv1D)
    whole = records.ReadMlp("input", ("0",), "", act, transposed=record.transposed)
    found = Found(f"gemv | matmul with {act}", "read_mlp", whole)
    if probes.refusal(together, found, (_sizes(layer)[1],), SCALES):
        return
    yield linear, Found(found.text, "linear_act", record, f"{activation} follows it in its layer; tried out")
    yield activation, Found("nothing", "done", records.Done(), f"{linear} computes it")


def read_linear(module: nn.Module, probes: probe.Probes) -> Found | str:
    """x · weightᵀ + bias of a class that is no plain Linear, in either layout of its weight."""
    weight = module.get_parameter("weight")
    refusal = ""
    for is_transposed in (False, True):
        record = records.Linear(is_transposed)
        found = Found("gemv | matmul", "linear", record, "read from its values; tried out")
        refusal = probes.refusal(module, found, (weight.shape[0 if is_transposed else 1],), SCALES)
        if not refusal:
            return found
    return refusal
