"""What the compile gate compiles: every op, in the sizes of two models, in its default or its whole space."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from bench.run import MODELS
from trinfer.autotune import Config
from trinfer.autotune.compiled import compile_op
from trinfer.backend.targets import TARGETS, Facts
from trinfer.kernels import OPS, Norm, Prologue, Table
from trinfer.kernels.op import Op

# one token, a small batch, a prompt
ROWS = (1, 8, 512)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Arguments = dict[str, Any]
Variant = Callable[[Arguments], Arguments]


@dataclass(frozen=True)
class Job:
    """One launch to compile, in values that can be sent to another process."""

    op: str
    target: str
    model: str
    rows: int
    dtype: str
    variant: str = "plain"
    config: Config | None = None

    def __str__(self) -> str:
        name = f"{self.op} {self.variant}" if self.variant != "plain" else self.op
        text = f"{name}, {self.model}, {self.rows} rows, {self.dtype}, {self.target}"
        return text if self.config is None else f"{text}, {self.config}"


def _gated(arguments: Arguments) -> Arguments:
    pairs = {name: (arguments[name],) * 2 for name in ("weight", "scale") if name in arguments}
    return arguments | pairs | {"gated": True, "act": "silu"}


def _segments(arguments: Arguments) -> Arguments:
    x, weight = arguments["x"], arguments["weight"]
    parts = {name: (arguments[name],) * 3 for name in ("weight", "scale") if name in arguments}
    bias = x.new_empty(weight.shape[0])
    residual = x.new_empty(*x.shape[:-1], 3 * weight.shape[0])
    return arguments | parts | {"bias": (bias, None, bias), "residual": residual}


def _columns(arguments: Arguments) -> Arguments:
    weight = arguments["weight"]
    return arguments | {"weight": weight.new_empty(weight.shape[::-1]).T, "act": "gelu_tanh"}


def _normed(arguments: Arguments) -> Arguments:
    weight = arguments["x"].new_empty(arguments["x"].shape[-1])
    return arguments | {"norm": Norm(weight, weight, 1e-5, "layer")}


def _two_inputs(arguments: Arguments) -> Arguments:
    """What closes a layer whose halves are added at once, with a factor."""
    x, weight = arguments["x"], arguments["weight"]
    second, other = x.new_empty(len(x), 4 * x.shape[1]), weight.new_empty(len(weight), 4 * x.shape[1])
    residual = x.new_empty(len(x), len(weight))
    return arguments | {"also": (second, other, weight[:, 0]), "residual": residual, "scale": 0.22}


def _behind(arguments: Arguments) -> Arguments:
    """A norm of what half a layer gives, added to its states in place."""
    return {**arguments, "residual": None, "add": arguments["x"], "out": arguments["x"], "weight_offset": 1.0}


def _codes(symmetric: bool, group: int = 64) -> Variant:
    """Weights of 4 bits."""

    def four_bits(arguments: Arguments) -> Arguments:
        N, K = arguments["weight"].shape
        weight = arguments["weight"].new_empty(N, K // 2, dtype=torch.uint8)
        shape = (N, K // group) if symmetric else (N, 2, K // group)
        return arguments | {"weight": weight, "scale": arguments["scale"].new_empty(shape), "group": group}

    return four_bits


def _integers(arguments: Arguments) -> Arguments:
    x = arguments["x"]
    codes, x_scale = x.new_empty(x.shape, dtype=torch.int8), x.new_empty(len(x), 1, dtype=torch.float32)
    return arguments | {"x": codes, "x_scale": x_scale, "dtype": x.dtype}


def _masked(arguments: Arguments) -> Arguments:
    q, k = arguments["q"], arguments["k"]
    kv_range = torch.empty(q.shape[0], 2, dtype=torch.int32, device=q.device)
    return arguments | {"kv_range": kv_range, "window": min(64, k.shape[2])}


def _biased(arguments: Arguments) -> Arguments:
    q, k = arguments["q"], arguments["k"]
    return arguments | {"bias": q.new_empty(1, 1, q.shape[2], k.shape[2])}


def _scored(arguments: Arguments) -> Arguments:
    heads = arguments["q"].new_empty(arguments["q"].shape[1], dtype=torch.float32)
    return arguments | {"alibi": heads, "softcap": 30.0, "sinks": heads}


def _packed(arguments: Arguments) -> Arguments:
    """Queries of all sequences without padding."""
    q = arguments["q"]
    q_range = torch.empty(len(arguments["k"]), 2, dtype=torch.int32, device=q.device)
    return arguments | {"q_range": q_range, "kv_range": q_range, "max_queries": q.shape[2]}


def _in_rows(arguments: Arguments) -> Arguments:
    """Tokens of all sequences without padding, on their way to the cache."""
    q, k_cache = arguments["q"], arguments["k_cache"]
    places = torch.empty(q.shape[2] + 2 * len(k_cache), dtype=torch.int32, device=q.device)
    return arguments | {"rows": places[: q.shape[2]], "kv_range": places[q.shape[2] :].view(-1, 2)}


def _step(arguments: Arguments) -> Arguments:
    """What a whole decode step asks of attention."""
    k, D = arguments["k"], arguments["k"].shape[3]
    table, weight, new = k.new_empty(k.shape[2], D), k.new_empty(D), k[:, :, :1]
    prologue = Prologue(weight, weight, cos=table, sin=table)
    return _masked(arguments) | {"new": (new, new), "prologue": prologue}


def _runs(arguments: Arguments) -> Arguments:
    """A decode step of Falcon: the queries of a key/value head lie side by side in the projection."""
    q, k = arguments["q"].unflatten(1, (arguments["k"].shape[1], -1)), arguments["k"]
    heads, table = q.new_empty(len(q), k.shape[1], q.shape[2] + 2, *q.shape[3:]), k[0, 0].contiguous()
    kv_range = torch.empty(len(q), 2, dtype=torch.int32, device=q.device)
    options = {"kv_range": kv_range, "prologue": Prologue(cos=table, sin=table)}
    return arguments | options | {"q": heads[:, :, :-2], "new": (heads[:, :, -2], heads[:, :, -1])}


def _added(arguments: Arguments) -> Arguments:
    """What BERT's tables and norm make of a token, at a position that is counted on the device."""
    ids, weight = arguments["ids"], arguments["weight"]
    kv_range = ids.new_empty(len(ids), 2, dtype=torch.int32)
    tables = {"types": Table(weight, ids), "positions": Table(weight, kv_range=kv_range)}
    return arguments | tables | {"norm": Norm(weight[0], weight[0], 1e-5, "layer")}


_PRODUCT = {"gated": _gated, "segments": _segments}
_CODES = {"int4": _codes(True), "int4 with zeros": _codes(False)}
VARIANTS: dict[str, dict[str, Variant]] = {
    "gemv": {**_PRODUCT, "columns": _columns, "normed": _normed, "two inputs": _two_inputs},
    "matmul": {**_PRODUCT, "columns": _columns, "normed": _normed},
    "quant_gemv": {**_PRODUCT, **_CODES},
    "quant_matmul": {**_PRODUCT, **_CODES, "integers": _integers},
    "grouped_gemv": {"gated": _gated},
    "grouped_matmul": {"gated": _gated},
    "embedding": {"added": _added},
    "rms_norm": {"behind": _behind},
    "layer_norm": {"behind": _behind},
    "qkv_post": {"packed": _in_rows},
    "attention": {"masked": _masked, "biased": _biased, "scored": _scored, "packed": _packed},
    "decode_attention": {
        "masked": _masked,
        "biased": _biased,
        "scored": _scored,
        "step": _step,
        "runs": _runs,
    },
}


def arguments(op: Op, job: Job) -> Arguments:
    """Random-free meta tensors for the launch of a job."""
    sizes = MODELS[job.model] | {"M": job.rows}
    names = [name for name in inspect.signature(op.inputs).parameters if name in sizes]
    plain = op.inputs(
        **{name: sizes[name] for name in names}, dtype=DTYPES[job.dtype], device=torch.device("meta")
    )
    return plain if job.variant == "plain" else VARIANTS[op.name][job.variant](plain)


def compile_job(job: Job) -> list[dict[str, Any]]:
    """The facts of every kernel that the launch of a job starts."""
    op = next(op for op in OPS if op.name == job.op)
    return [asdict(facts) for facts in compile_op(op, arguments(op, job), job.config, TARGETS[job.target])]


def rows_of(op: Op) -> tuple[int, ...]:
    """The row counts that an op is compiled for."""
    if "M" not in inspect.signature(op.inputs).parameters:
        return (1,)
    return ROWS[:2] if op.name.endswith("gemv") or op.name in ("lm_head", "router") else ROWS


def defaults(targets: tuple[str, ...], dtypes: tuple[str, ...] = tuple(DTYPES)) -> Iterator[Job]:
    """Every op and variant in the configuration that is shipped."""
    for op in OPS:
        variants = ("plain", *VARIANTS.get(op.name, ()))
        questions = itertools.product(variants, MODELS, rows_of(op), dtypes, targets)
        for variant, model, rows, dtype, target in questions:
            yield Job(op.name, target, model, rows, dtype, variant)


def space(targets: tuple[str, ...]) -> Iterator[Job]:
    """Every op in every configuration that may be tuned, for the larger model in 16 bits."""
    for op in OPS:
        for config in op.space:
            for target in targets:
                yield Job(op.name, target, "llama3", rows_of(op)[-1], "bf16", config=config)


@functools.cache
def is_pinned() -> bool:
    """True for the version of Triton in constraints.txt."""
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    return f"triton=={triton.__version__}" in pins


def faults(job: Job, facts: Facts) -> list[str]:
    """What a shipped default must not do."""
    found = []
    limit = TARGETS[job.target].shared_bytes
    if facts.shared_bytes > limit:
        found.append(f"needs {facts.shared_bytes} bytes of shared memory, the target has {limit}")
    # the defaults are made for the pinned Triton; another one's assembler may place a few bytes otherwise
    if facts.spilled_bytes and (facts.inner_spills or is_pinned()):
        found.append(f"spills {facts.spilled_bytes} bytes")
    # float32 products are not shortened to tf32, so they may run on the ordinary units
    if facts.has_dot and job.dtype != "fp32" and not facts.uses_matrix_units:
        found.append("multiplies tiles without matrix instructions")
    return found
