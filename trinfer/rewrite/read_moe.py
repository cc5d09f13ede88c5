"""Reading a mixture of experts: the rule of its router from its values, the layout of its experts."""

import inspect
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from trinfer.architectures import Arch
from trinfer.config import InferenceConfig
from trinfer.layers import records
from trinfer.rewrite import match, probe
from trinfer.rewrite.match import Found
from trinfer.rewrite.read_mlp import HALVES, Shape, activation_of

# sizes of the copy that experts are tried out on: what they compute does not depend on them
EXPERTS, WIDTH, INNER, TOKENS = 4, 32, 24, 6


def experts_in(model: nn.Module) -> dict[str, int]:
    """Path and number of experts of every MoE layer: stacked in one module, or a list of modules."""
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        if is_stack(module):
            found[path] = len(next(p for p in module.parameters(recurse=False) if p.dim() == 3))
        elif isinstance(module, nn.ModuleList) and path.rpartition(".")[2] == "experts":
            found[path] = len(module)
    return found


def layers_in(model: nn.Module) -> list[str]:
    """Paths of the modules around router and experts."""
    return [path.rpartition(".")[0] or path for path in experts_in(model)]


def is_stack(module: nn.Module) -> bool:
    """True if the weights of several experts lie in one parameter of this module."""
    stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3]
    return len(stacked) >= 2 and len({len(p) for p in stacked}) == 1


def readings(model: nn.Module, probes: probe.Probes) -> Iterator[tuple[str, Found | str]]:
    """(path, what it becomes or why not) of the routers and experts of every MoE layer."""
    for path in experts_in(model):
        experts = model.get_submodule(path)
        found = read_experts(experts, probes)
        yield path, found
        owner = path.rpartition(".")[0]
        for name, child in model.get_submodule(owner).named_children() if owner else ():
            if _looks_like_router(child, experts):
                apart = "gives its choice to experts that keep their own code"
                place = f"{owner}.{name}"
                yield place, read_router(child, probes) if isinstance(found, Found) else apart


def _looks_like_router(module: nn.Module, experts: nn.Module) -> bool:
    """A matrix with a row for each expert, and no class that is swapped on its own."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or match.plain(module) is not None:
        return False
    return is_stack(experts) and len(weight) == len(next(p for p in experts.parameters() if p.dim() == 3))


def check(model: nn.Module, config: InferenceConfig, names_residual: bool) -> None:
    """Refuse what `config.moe` says of a model that is otherwise.

    Raises:
        ValueError: no MoE layers, another number of experts, or a residual layer that no row describes.
    """
    if not config.is_set("moe") or not config.moe.enabled:
        return
    counts = list(experts_in(model).values())
    if not counts:
        raise ValueError(
            f"moe={config.moe.explicit()}: {type(model).__name__} has no mixture-of-experts layers; "
            "allowed: a model that has some; leave moe out"
        )
    wanted = config.moe.moe_experts
    all_of_one = wanted * len(counts) if len(wanted) == 1 else wanted
    if config.is_set("moe.moe_experts") and all_of_one != counts:
        have = sorted(set(counts))
        raise ValueError(
            f"moe.moe_experts={wanted}: the {len(counts)} MoE layers of {type(model).__name__} have "
            f"{have if len(have) > 1 else have[0]} experts; leave moe_experts out, it is read from the model"
        )
    if config.moe.type == "residual" and not names_residual:
        raise ValueError(
            f"moe.type='residual': no row names a dense branch and a coefficient beside the experts of "
            f"{type(model).__name__}; allowed: 'standard', or a row with both; leave type out"
        )


def read_experts(module: nn.Module, probes: probe.Probes) -> Found | str:
    """Experts as transformers stacks them, whose flags say how: gate, bias, layout."""
    flags = {name: getattr(module, name, None) for name in ("has_gate", "has_bias", "is_transposed")}
    if not is_stack(module) or not all(isinstance(flag, bool) for flag in flags.values()):
        return "its experts do not lie in one module as transformers stacks them"
    refusal = match.obstacle(module) or match.strange_weights(module)
    if getattr(module, "has_post_expert_norm", False):
        refusal = refusal or "has a norm after each expert"
    if getattr(module, "_is_expert_parallel", False):
        refusal = refusal or "its experts are spread over devices"
    if refusal:
        return refusal
    record = _experts_record(module, flags, probes)
    if not record.act and not flags["has_gate"]:
        return "its activation is none of the kernels'"
    middle = f"{record.act}(gate)·up" if record.halves else record.act
    own = "" if record.act else ", its own gate in torch between"
    text = f"grouped_gemv | grouped_matmul: {middle or 'gate|up'}, then down{own}"
    layout = "in, out" if record.transposed else "out, in"
    found = Found(text, "experts", record, f"weights of all experts as [experts, {layout}]; tried out")
    key = (type(module), found, _numbers(module))
    if key not in probes.tried:
        probes.tried[key] = _experts_refusal(module, found, probes)
    return probes.tried[key] or found


def _numbers(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Numbers and flags that a module holds: with its class and shapes they say what it computes."""
    held = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | bool)}
    return tuple(sorted(held.items()))


def _experts_record(module: Any, flags: dict[str, Any], probes: probe.Probes) -> records.Experts:
    up = "gate_up_proj" if flags["has_gate"] else "up_proj"
    between = module._apply_gate if flags["has_gate"] else module.act_fn
    act, order = activation_of(Shape((up,), "", between, False), [2 * INNER], probes.device, is_grouped=True)
    return records.Experts(
        up,
        "down_proj",
        f"{up}_bias" if flags["has_bias"] else "",
        "down_proj_bias" if flags["has_bias"] else "",
        act,
        order if order in HALVES else "",
        flags["is_transposed"],
    )


def _experts_refusal(module: nn.Module, found: Found, probes: probe.Probes) -> str:
    """Compare on a small copy: few tokens, then many, which take different kernels."""
    # the forwards need triton, which a plan without kernels does without
    from trinfer.layers.moe import experts_forward

    names = found.record
    assert isinstance(names, records.Experts)
    outputs = {names.up: (2 if names.halves or not names.act else 1) * INNER, names.down: WIDTH}
    inputs = {names.up: WIDTH, names.down: INNER}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in (names.up, names.down):
        sizes = outputs[name], inputs[name]
        shapes[name] = (EXPERTS, *(reversed(sizes) if names.transposed else sizes))
        shapes[f"{name}_bias"] = (EXPERTS, outputs[name])
    copied = probe.twin(module, probes.dtype, probes.device, shapes)
    copied.__dict__["num_experts"] = EXPERTS
    own = inspect.unwrap(type(module).forward)
    generator = torch.Generator(probes.device).manual_seed(3)
    for tokens in (TOKENS, 12 * TOKENS):
        x = probe.rows(WIDTH, probes.dtype, probes.device, (1.0,) * (tokens // 2)).flatten(0, 1)
        scores = torch.rand(tokens, EXPERTS, generator=generator, device=probes.device)
        weights, ids = scores.topk(2)
        try:
            with torch.no_grad():
                expected = own(copied, x, ids, weights.to(x.dtype))
        except probe.STRANGE as error:
            return f"its code fails on random numbers ({type(error).__name__})"
        copied.__dict__["_trinfer"] = names
        with torch.no_grad():
            error_size = probe.error_of(experts_forward(copied, x, ids, weights.to(x.dtype)), expected)
        # the model rounds each expert's share before it adds them up
        if error_size > 2 * probe.TOLERANCE[probes.dtype]:
            return f"looks like {found.text}, which gives something else: {error_size:.1e} off"
    return ""


def read_router(module: nn.Module, probes: probe.Probes) -> Found | str:
    """The rule by which a router chooses, found among those of the kernel by what it gives."""
    refusal = "" if "forward" not in module.__dict__ else "has a forward of its own on the instance"
    if refusal := refusal or match.strange_weights(module):
        return refusal
    shapes = tuple(p.shape for p in [*module.parameters(), *module.buffers()])
    key = (type(module), shapes, _numbers(module))
    if key not in probes.rules:
        probes.rules[key] = _rule(module, probes)
    return probes.rules[key]


def _rule(module: nn.Module, probes: probe.Probes) -> Found | str:
    copied = _with_buffers(module, torch.float32, probes.device)
    width = copied.get_parameter("weight").shape[1]
    x = probe.rows(width, torch.float32, probes.device, (1.0, 2.0, 4.0) * 8).flatten(0, 1)
    given = _answer(copied, x)
    if isinstance(given, str):
        return given
    logits, weights, ids = given
    for record in _rules(copied, _is_wide(module, width, probes.device)):
        if _same_choice(*_routed(copied, record, logits), weights, ids):
            groups = f", {record.kept_groups} of {record.num_groups} groups" if record.num_groups > 1 else ""
            rule = f"{record.top_k} of {len(copied.get_parameter('weight'))} by {record.scoring}{groups}"
            return Found("router | matmul, routing", "router", record, f"{rule}; tried out")
    return "chooses by a rule that the kernel does not have"


def _with_buffers(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy of a router in which the correction of its scores is random as well."""
    copied = probe.twin(module, dtype, device)
    generator = torch.Generator(device).manual_seed(4)
    for name, buffer in module.named_buffers(recurse=False):
        values = 0.1 * torch.randn(buffer.shape, generator=generator, device=device)
        copied._buffers[name] = values.to(dtype)
    return copied


def _answer(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor] | str:
    try:
        with torch.no_grad():
            given = type(module).forward(module, x.clone())
    except probe.STRANGE as error:
        return f"its code fails on random numbers ({type(error).__name__})"
    is_choice = isinstance(given, tuple) and len(given) == 3 and all(isinstance(g, Tensor) for g in given)
    if (
        not is_choice
        or given[2].is_floating_point()
        or given[0].shape[-1] != len(module.get_parameter("weight"))
    ):
        return "does not give logits, weights and experts"
    return given


def _is_wide(module: nn.Module, width: int, device: torch.device) -> bool:
    """True if a router multiplies in float32 where the model has 16 bits."""
    copied = _with_buffers(module, torch.bfloat16, device)
    given = _answer(copied, torch.ones(1, width, dtype=torch.bfloat16, device=device))
    return not isinstance(given, str) and given[0].dtype == torch.float32


def _rules(module: nn.Module, is_wide: bool) -> Iterator[records.Router]:
    """Every rule that could be meant, with the numbers that the module holds."""
    E = len(module.get_parameter("weight"))
    held = vars(module)
    top_ks = [held["top_k"]] if isinstance(held.get("top_k"), int) else range(1, min(E, 32) + 1)
    scales = {1.0, *(v for v in held.values() if isinstance(v, float))}
    counts = [v for v in held.values() if isinstance(v, int) and not isinstance(v, bool) and 1 <= v <= E]
    groups = [(g, k) for g in counts for k in counts if g > 1 and E % g == 0 and k <= g]
    bias = "bias" if isinstance(getattr(module, "bias", None), Tensor) else ""
    biases = [name for name, b in module.named_buffers(recurse=False) if b.shape == (E,)]
    argument = probe.parameters_of(type(module).forward)[0].name
    for top_k, (num, kept), best in product(top_ks, dict.fromkeys([(1, 1), *groups]), (2, 1)):
        if top_k > E // num * kept or (num == 1 and best == 1):
            continue
        for scoring, again, scale, choice in product(
            ("softmax", "softmax_topk", "sigmoid"), (False, True), sorted(scales), ("", *biases)
        ):
            yield records.Router(
                argument, bias, choice, top_k, scoring, again, scale, num, kept, best, is_wide
            )


def _routed(module: nn.Module, names: records.Router, logits: Tensor) -> tuple[Tensor, Tensor]:
    # the kernels need triton, which a plan without kernels does without
    from trinfer.kernels.routing import routing_ref

    return routing_ref(
        logits,
        names.top_k,
        getattr(module, names.choice_bias) if names.choice_bias else None,
        scoring=names.scoring,
        renormalize=names.renormalize,
        scale=names.scale,
        num_groups=names.num_groups,
        kept_groups=names.kept_groups,
        group_best=names.group_best,
    )


def _same_choice(ids: Tensor, weights: Tensor, own_weights: Tensor, own_ids: Tensor) -> bool:
    """True if both give every expert the same weight, in whatever order."""
    if ids.shape != own_ids.shape:
        return False
    width = int(max(ids.max(), own_ids.max())) + 1
    spread = [
        torch.zeros(len(ids), width, device=ids.device).scatter_(1, i.long(), w.float())
        for i, w in ((ids, weights), (own_ids, own_weights))
    ]
    chosen = [s.scatter(1, i.long(), 1.0) for s, i in zip(spread, (ids, own_ids), strict=True)]
    ours, theirs = spread
    return torch.equal(chosen[0] == 1, chosen[1] == 1) and torch.allclose(ours, theirs, 1e-4, 1e-6)


def read_residual(block: nn.Module, arch: Arch, probes: probe.Probes) -> Found | str:
    """A residual layer: a dense branch beside the experts, and a linear that gives each its share."""
    inside = f"{arch.mlp}."
    paths = (arch.router, arch.experts, arch.dense_branch, arch.coefficient)
    names = [path.removeprefix(inside) for path in paths]
    held = dict(block.named_modules())
    missing = [path for path, name in zip(paths, names, strict=True) if name not in held]
    if missing:
        return f"has no {', '.join(missing)}, which the row names"
    refusal = "has a forward of its own on the instance" if "forward" in block.__dict__ else ""
    shares = held[names[3]]
    if type(shares) is not nn.Linear or shares.out_features != 2:
        refusal = refusal or f"{names[3]} is no plain Linear with two outputs"
    text = "gemv | matmul, softmax, combine_experts around both branches"
    for dense_first in () if refusal else (True, False):
        record = records.ResidualMoe(names[0], names[1], names[2], names[3], dense_first)
        found = Found(text, "residual_moe", record, "a residual layer of the row; tried out")
        width = block.get_parameter(f"{names[3]}.weight").shape[1]
        refusal = probes.refusal(block, found, (width,), (1.0, 0.1, 3.0))
        if not refusal:
            return found
    return refusal
