"""The warm-up: tune every launch that a model will make, before it has to answer.

    python -m trinfer.warmup --model M         (= trinfer warmup --model M)

What is found is kept in the autotune cache; a second run finds it there and measures nothing.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trinfer import backend, checkpoint, tune
from trinfer.autotune import lookup
from trinfer.config import InferenceConfig
from trinfer.engine import init_inference, make_plan, swap

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Run = Callable[[], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a warm-up has to be told."""
    names = ", ".join(checkpoint.NAMED_MODELS)
    parser.add_argument(
        "--model", required=True, metavar="M", help=f"{names}, a Hugging Face folder or a .gguf file"
    )
    parser.add_argument("--config", metavar="FILE", help="a JSON file of options, as for init_inference")
    parser.add_argument("--dtype", choices=DTYPES, help="default: that of --config, else fp32")
    parser.add_argument(
        "--max-out-tokens", type=positive, metavar="N", help="prompt and new tokens to tune for"
    )
    parser.add_argument("--budget", type=positive, metavar="S", default=int(tune.BUDGET_S), help="seconds")
    parser.add_argument(
        "--target",
        metavar="ARCH",
        help="sm_80, sm_90, sm_100 or gfx942: compile for it, even if it is not here",
    )


def positive(text: str) -> int:
    """A number of tokens or seconds."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number; allowed: 1, 2, 3, ...")
    return number


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says, for init_inference to merge with the file."""
    given: dict[str, Any] = {}
    if args.dtype or not args.config:
        given["dtype"] = DTYPES[args.dtype or "fp32"]
    if args.max_out_tokens:
        given["max_out_tokens"] = args.max_out_tokens
    merged = InferenceConfig.merge(args.config, given)
    if merged.injection_policy is None and not merged.is_set("replace_with_kernel_inject"):
        given["replace_with_kernel_inject"] = True
    return given


def prepare(args: argparse.Namespace) -> Run:
    """Load the model, refuse what cannot be done, and return the run."""
    options = options_of(args)
    if args.target is not None and args.target != _arch_here():
        return prepare_target(args, options)
    merged = InferenceConfig.merge(args.config, options)
    model = checkpoint.load_weights(args.model, merged.dtype)
    tune.refuse_to_tune(model)
    engine = init_inference(model, args.config, **options)
    if not engine.plan.swapped:
        raise ValueError(
            "the options swap no kernel in, there is none to tune; allowed: replace_with_kernel_inject=true "
            "or an injection policy; add one to --config"
        )
    return lambda: run(engine.module, merged.max_out_tokens, args.budget)


def run(model: nn.Module, max_out_tokens: int, budget_s: float) -> int:
    """Search, print what was found, say where it is kept."""
    # kernels need triton
    from trinfer.autotune.search import describe

    start = time.monotonic()
    findings = tune.tune(model, max_out_tokens, budget_s)
    print("\n".join(describe(findings)))
    counts = {status: sum(f.status == status for f in findings) for status in {f.status for f in findings}}
    words = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    print(
        f"{len(findings)} keys: {words or 'none'}; {time.monotonic() - start:.1f} s on "
        f"{backend.device_slug(lookup.device())}, kept in {lookup.user_folder()}"
    )
    return 0


def _arch_here() -> str:
    return backend.arch(backend.default_device())


def prepare_target(args: argparse.Namespace, options: dict[str, Any]) -> Run:
    """Make the plan for a device that is not here."""
    if not backend.has_triton():
        raise ValueError(f"--target {args.target} needs Triton and {backend.why_reference()}")
    # these need triton
    from trinfer.autotune.ranking import describe, launches_on
    from trinfer.backend.targets import TARGETS

    if args.target not in TARGETS:
        raise ValueError(
            f"--target {args.target} is unknown; allowed: {', '.join(TARGETS)}; name one of them"
        )
    merged = InferenceConfig.merge(args.config, options)
    model = checkpoint.meta_model(args.model, merged.dtype)
    plan = make_plan(model, args.config, **options)
    swap(model, plan)

    def run() -> int:
        print(
            f"no {args.target} is here: nothing is measured and nothing is kept. Defaults are compiled for "
            "it into Triton's cache; the times are predicted by the cost model"
        )
        with launches_on(args.target):
            calls = tune.dry_run(model, merged.max_out_tokens)
        print("\n".join(describe(tune.bar(calls), args.target)))
        return 0

    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the warm-up; returns its exit code, 2 and one line on stderr for what it was asked wrongly."""
    parser = argparse.ArgumentParser(prog="python -m trinfer.warmup", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(arguments)
    try:
        run = prepare(args)
    except (ValueError, TypeError, OSError, ImportError, NotImplementedError) as refusal:
        print(f"trinfer: {' '.join(str(refusal).split())}", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
