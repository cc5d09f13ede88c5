"""What the compile gate compiles: every op, in the sizes of two models, in its default or its whole space."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.run import MODELS
from tests.aot.targets import TARGETS, Facts, compile_op
from trinfer.autotune import Config
from trinfer.kernels import OPS
from trinfer.kernels.op import Op

# one token, a small batch, a prompt
ROWS = (1, 8, 512)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Arguments = dict[str, Any]


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
    weight = arguments["weight"]
    return arguments | {"weight": (weight, weight), "gated": True, "act": "silu"}


def _segments(arguments: Arguments) -> Arguments:
    x, weight = arguments["x"], arguments["weight"]
    bias = weight.new_empty(weight.shape[0])
    residual = x.new_empty(*x.shape[:-1], 3 * weight.shape[0])
    return arguments | {"weight": (weight,) * 3, "bias": (bias, None, bias), "residual": residual}


def _columns(arguments: Arguments) -> Arguments:
    weight = arguments["weight"]
    return arguments | {"weight": weight.new_empty(weight.shape[::-1]).T, "act": "gelu_tanh"}


def _masked(arguments: Arguments) -> Arguments:
    q, k = arguments["q"], arguments["k"]
    kv_range = torch.empty(q.shape[0], 2, dtype=torch.int32, device=q.device)
    return arguments | {"kv_range": kv_range, "window": min(64, k.shape[2])}


def _biased(arguments: Arguments) -> Arguments:
    q, k = arguments["q"], arguments["k"]
    return arguments | {"bias": q.new_empty(1, 1, q.shape[2], k.shape[2])}


VARIANTS: dict[str, dict[str, Callable[[Arguments], Arguments]]] = {
    "gemv": {"gated": _gated, "segments": _segments, "columns": _columns},
    "matmul": {"gated": _gated, "segments": _segments, "columns": _columns},
    "attention": {"masked": _masked, "biased": _biased},
    "decode_attention": {"masked": _masked, "biased": _biased},
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
    return ROWS[:2] if op.name.endswith("gemv") or op.name == "lm_head" else ROWS


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


def faults(job: Job, facts: Facts) -> list[str]:
    """What a shipped default must not do."""
    found = []
    limit = TARGETS[job.target].shared_bytes
    if facts.shared_bytes > limit:
        found.append(f"needs {facts.shared_bytes} bytes of shared memory, the target has {limit}")
    if facts.spilled_bytes:
        found.append(f"spills {facts.spilled_bytes} bytes")
    # float32 products are not shortened to tf32, so they may run on the ordinary units
    if facts.has_dot and job.dtype != "fp32" and not facts.uses_matrix_units:
        found.append("multiplies tiles without matrix instructions")
    return found
