"""The command line: `trinfer generate`, `trinfer plan`, `trinfer warmup`, `trinfer cache`, `trinfer demo`."""

import argparse
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.utils import logging

import trinfer
from trinfer import backend, checkpoint, cpu, survey, warmup
from trinfer.autotune import lookup, table

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = {
    "gpu": "kernels compiled by Triton for the GPU",
    "cpu": "kernels compiled for this CPU",
    "interpreter": "kernels in Triton's interpreter",
    "reference": "PyTorch references, no kernel",
}
# what a user's mistake raises while a command is being prepared; the same from the run itself is a defect
REFUSALS = (ValueError, TypeError, OSError, ImportError, NotImplementedError)

Run = Callable[[], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 2 and one line on stderr for what it was asked wrongly."""
    logging.disable_progress_bar()
    args = _parser().parse_args(arguments)
    try:
        run: Run = args.prepare(args)
    except REFUSALS as refusal:
        print(f"trinfer: {' '.join(str(refusal).split())}", file=sys.stderr)
        return 2
    try:
        code = run()
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader, `head` for one, has seen enough; what Python still flushes at exit must go somewhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trinfer", description=trinfer.__doc__)
    parser.add_argument("--version", action="version", version=trinfer.__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    generate = commands.add_parser("generate", help="let a model answer a prompt")
    generate.set_defaults(prepare=prepare_generate)
    generate.add_argument("prompt", help="what to say to the model; its chat template is applied")
    _add_model(generate)
    generate.add_argument("--max-new-tokens", type=_positive, default=128, metavar="N", help="default: 128")
    generate.add_argument("--no-kernels", action="store_true", help="plain transformers, to compare with")
    plan = commands.add_parser("plan", help="show what would be swapped, without reading a weight")
    plan.set_defaults(prepare=prepare_plan)
    which = plan.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="a table of every architecture that has a row")
    _add_model(plan, which)
    tuned = commands.add_parser("warmup", help="tune every launch of a model, and keep what was found")
    tuned.set_defaults(prepare=warmup.prepare)
    warmup.add_arguments(tuned)
    cache = commands.add_parser("cache", help="join tables of launch configurations")
    cache.set_defaults(prepare=prepare_cache)
    cache.add_argument("action", choices=["merge"], help="merge: put the rows of FOLDERs into the cache")
    cache.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a cache of another process")
    cache.add_argument("--into", type=Path, metavar="FOLDER", help="default: the cache of this user")
    demo = commands.add_parser(
        "demo", help="two small models through the kernels, compared with transformers"
    )
    demo.set_defaults(prepare=prepare_demo)
    return parser


def _add_model(command: argparse.ArgumentParser, group: Any = None) -> None:
    """Arguments that name a model; one of `group` where a command needs none."""
    names = ", ".join(checkpoint.NAMED_MODELS)
    (group or command).add_argument(
        "--model", required=group is None, metavar="M", help=f"{names}, a Hugging Face folder or a .gguf file"
    )
    command.add_argument("--dtype", choices=DTYPES, default="fp32", help="default: fp32")


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of tokens; allowed: 1, 2, 3, ...")
    return number


def prepare_generate(args: argparse.Namespace) -> Run:
    """Load, refuse what cannot be done, and return the run."""
    model, tokenizer = checkpoint.load_model(args.model, DTYPES[args.dtype])
    if not model.can_generate():
        raise ValueError(
            f"model {args.model!r} is a {type(model).__name__}, which generates no text; "
            "allowed: a model with a language-model head; try --model smollm2"
        )
    ids = _prompt_ids(tokenizer, args.prompt)
    _check_length(model, ids.shape[1], args.max_new_tokens)
    engine = _engine(model, DTYPES[args.dtype], ids.shape[1] + args.max_new_tokens, not args.no_kernels)
    return lambda: run_generate(engine, tokenizer, ids.to(engine.device), args.max_new_tokens)


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> torch.Tensor:
    if not prompt.strip():
        raise ValueError("the prompt is empty; allowed: any text; put it in quotes at the end of the command")
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": prompt}]
        prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        return tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    return tokenizer(prompt, return_tensors="pt").input_ids


def _check_length(model: PreTrainedModel, prompt_tokens: int, new_tokens: int) -> None:
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and prompt_tokens + new_tokens > longest:
        raise ValueError(
            f"{prompt_tokens} prompt tokens + {new_tokens} new ones are {prompt_tokens + new_tokens}; "
            f"allowed for this model: {longest}; shorten the prompt or lower --max-new-tokens"
        )


def _engine(model: PreTrainedModel, dtype: torch.dtype, tokens: int, kernels: bool = True) -> Any:
    return trinfer.init_inference(
        model, dtype=dtype, replace_with_kernel_inject=kernels, max_out_tokens=tokens
    )


def run_generate(engine: Any, tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor, new_tokens: int) -> int:
    """Stream the answer to stdout, then say on stderr how fast it came and what ran where."""
    with compile_progress():
        greedy(engine, ids, 2)
    streamer = TimedStreamer(tokenizer)
    with counted_launches() as launches:
        greedy(engine, ids, new_tokens, streamer=streamer)
    print(f"\n{streamer.report(ids.shape[1])}\n{ran_where(engine, launches)}", file=sys.stderr)
    return 0


def greedy(model: Any, ids: torch.Tensor, new_tokens: int, **kwargs: Any) -> torch.Tensor:
    """Greedy continuation of one prompt, without the prompt."""
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, **kwargs
    )
    return generated[0, ids.shape[1] :]


@contextlib.contextmanager
def compile_progress() -> Iterator[None]:
    """Show a bar from the first kernel that has to be compiled; cached kernels show nothing."""
    bar: tqdm | None = None

    def compiling(kernel: str) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(
                bar_format="{desc}: {n_fmt} [{elapsed}]{postfix}", desc="compiling kernels", leave=False
            )
        bar.set_postfix_str(kernel, refresh=False)
        bar.update()
        bar.refresh()

    cpu.compile_listeners.append(compiling)
    try:
        yield
    finally:
        cpu.compile_listeners.remove(compiling)
        if bar is not None:
            bar.close()


@contextlib.contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Launches by op inside the `with` block; none where there is no Triton to launch with."""
    if not backend.has_triton():
        yield Counter()
        return
    # the kernels import triton, which plain transformers and a plan do without
    from trinfer.kernels import count_launches

    with count_launches() as launches:
        yield launches


class TimedStreamer(TextStreamer):
    """Prints the answer while it grows and notes when each token came."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Called by generate: once with the prompt, before it is computed, then with every token."""
        self.times_s.append(time.perf_counter())
        super().put(value)

    def report(self, prompt_tokens: int) -> str:
        """`prefill 40 ms (38 tokens), decode 51.3 tokens/s (64 tokens)`."""
        start, first, *_, last = self.times_s if len(self.times_s) > 2 else [*self.times_s, self.times_s[-1]]
        steps = len(self.times_s) - 2
        prefill = f"prefill {(first - start) * 1e3:.0f} ms ({prompt_tokens} tokens)"
        return (
            f"{prefill}, decode {steps / (last - first):.1f} tokens/s ({steps + 1} tokens)"
            if steps
            else prefill
        )


def ran_where(engine: Any, launches: Counter[str]) -> str:
    """Which backend ran, what the plan swapped, and how often each kernel was launched."""
    counts = ", ".join(f"{op} {count}" for op, count in launches.most_common()) or "none"
    dtype = str(engine.dtype).removeprefix("torch.")
    return (
        f"ran on {engine.device} in {dtype}, {KINDS[backend.kind()]}\n"
        f"plan: {engine.plan.summary()}\n"
        f"kernel launches: {counts}"
    )


def prepare_plan(args: argparse.Namespace) -> Run:
    """Make the plan on the meta device and return its printing."""
    if args.all:
        return lambda: run_survey(DTYPES[args.dtype])
    model = checkpoint.meta_model(args.model, DTYPES[args.dtype])
    plan = trinfer.make_plan(model, dtype=DTYPES[args.dtype], replace_with_kernel_inject=True)

    def run() -> int:
        print(plan)
        return 0

    return run


def run_survey(dtype: torch.dtype) -> int:
    """Print the table of architectures."""
    rows = tqdm(survey.survey(dtype), total=len(trinfer.ARCHITECTURES), leave=False)
    print(survey.table(list(rows)))
    return 0


def prepare_cache(args: argparse.Namespace) -> Run:
    """Check that the tables can be read, and return the merge."""
    missing = [str(folder) for folder in args.folders if not folder.is_dir()]
    if missing:
        raise FileNotFoundError(
            f"no such folder: {', '.join(missing)}; allowed: folders of <device>/<op>.json"
        )
    target = args.into or lookup.user_folder()

    def run() -> int:
        for path, rows in table.merge_folders(args.folders, target):
            print(f"{rows:5} rows in {path}")
        return 0

    return run


QUESTION = "Why does bread rise? Answer in two sentences."
DEMO_TOKENS = 64
SENTENCES = (
    "The cat is asleep on the warm windowsill.",
    "A kitten naps in a patch of sunlight.",
    "Heavy rain flooded the lower streets.",
    "A downpour left the road under deep water.",
)
LOWEST_COSINE = 0.9999


def prepare_demo(_: argparse.Namespace) -> Run:
    """Load both models and return the demo."""
    language, sentence = checkpoint.load_model("smollm2"), checkpoint.load_model("minilm")

    def run() -> int:
        same_text = demo_generate(*language)
        same_vectors = demo_embed(*sentence)
        return 0 if same_text and same_vectors else 1

    return run


def demo_generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Let SmolLM2 answer through the kernels; True if the tokens are those of plain transformers."""
    ids = _prompt_ids(tokenizer, QUESTION)
    expected = greedy(model, ids, DEMO_TOKENS)
    engine = _engine(model, torch.float32, ids.shape[1] + DEMO_TOKENS)
    with compile_progress():
        greedy(engine, ids.to(engine.device), 2)
    print(f"SmolLM2-135M-Instruct is asked: {QUESTION}\n")
    streamer = TimedStreamer(tokenizer)
    with counted_launches() as launches:
        tokens = greedy(engine, ids.to(engine.device), DEMO_TOKENS, streamer=streamer)
    print(f"\n{streamer.report(ids.shape[1])}\n{ran_where(engine, launches)}")
    same = torch.equal(tokens.cpu(), expected)
    print(f"tokens equal to plain transformers: {f'yes, all {len(expected)}' if same else 'NO'}\n")
    return same and bool(launches)


def demo_embed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Compare sentences by MiniLM through the kernels; True if the vectors are as of transformers."""
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    expected = embed(model, batch)
    engine = _engine(model, torch.float32, batch["input_ids"].shape[1])
    batch = batch.to(engine.device)
    with compile_progress():
        embed(engine, batch)
    with counted_launches() as launches:
        vectors = embed(engine, batch)
    print("MiniLM-L6 compares sentences (1 = same meaning):\n")
    for sentence, row in zip(SENTENCES, (vectors @ vectors.T).tolist(), strict=True):
        print("  ".join(f"{similarity:5.2f}" for similarity in row), f"  {sentence}")
    cosine = float((vectors.cpu() * expected).sum(-1).min())
    print(f"\n{ran_where(engine, launches)}")
    print(f"smallest cosine to the vectors of plain transformers: {cosine:.6f}")
    return cosine >= LOWEST_COSINE and bool(launches)


@torch.inference_mode()
def embed(model: Any, batch: Any) -> torch.Tensor:
    """Sentence vectors: the mean over the tokens of each sentence, of length one."""
    hidden_states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden_states * mask).sum(1) / mask.sum(1), dim=-1)


if __name__ == "__main__":
    sys.exit(main())
