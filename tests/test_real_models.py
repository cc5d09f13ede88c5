"""SmolLM2-135M-Instruct and MiniLM-L6 through the kernels, against transformers' own eager code."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import trinfer
from trinfer import backend
from trinfer.__main__ import embed
from trinfer.checkpoint import load_model
from trinfer.kernels import count_launches

DATA = Path(__file__).parent / "data"
NEW_TOKENS = 64
BATCH = 5
LARGEST_LOGIT_DIFFERENCE = 1e-3
PROSE_TOKENS = 2000

pytestmark = pytest.mark.slow


def prompts() -> list[str]:
    """20 of the 40 prompts, from the shortest to the longest."""
    by_length = sorted((DATA / "prompts.txt").read_text().splitlines(), key=len)
    return [by_length[round(i * (len(by_length) - 1) / 19)] for i in range(20)]


def load(name: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        model, tokenizer = load_model(name, dtype)
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    model.set_attn_implementation("eager")
    if model.can_generate():
        # every prompt is to give all its new tokens
        model.generation_config.eos_token_id = None
    return model, tokenizer


def injected(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model, _ = load(name, dtype)
    return trinfer.init_inference(model, dtype=dtype, replace_with_kernel_inject=True, **options)


@dataclass(frozen=True)
class Reference:
    """What transformers' eager code answers to one prompt alone."""

    ids: Tensor
    tokens: Tensor
    logits: Tensor

    def gap(self, at: int) -> float:
        """How far the second choice lay behind the first one at token `at`."""
        first, second = self.logits[at].topk(2).values
        return float(first - second)


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Any:
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **kwargs)


def generate_logits(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    out = generate(model, ids, output_logits=True, return_dict_in_generate=True)
    return out.sequences[0, ids.shape[1] :], torch.cat(out.logits)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load("smollm2")[1]


@pytest.fixture(scope="module")
def engine() -> Any:
    return injected("smollm2", enable_cuda_graph=True)


def assert_same_tokens(references: list[Reference], answers: list[Tensor]) -> None:
    assert len(references) == len(answers)
    for number, (reference, tokens) in enumerate(zip(references, answers, strict=True)):
        different = (tokens != reference.tokens).nonzero()
        if len(different):
            at = int(different[0])
            pytest.fail(
                f"prompt {number}, {reference.ids.shape[1]} tokens: token {at} is {int(tokens[at])}, not "
                f"{int(reference.tokens[at])}, whose logit is {reference.gap(at):.2e} above the second choice"
            )


@pytest.fixture(scope="module")
def answers(engine: Any, tokenizer: PreTrainedTokenizerBase) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each prompt alone, through the kernels: its ids, the new tokens and the logits that chose them."""
    ids = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in prompts()]
    return [(prompt, *generate_logits(engine, prompt)) for prompt in ids]


@pytest.fixture(scope="module")
def references(answers: list[tuple[Tensor, Tensor, Tensor]]) -> list[Reference]:
    """What transformers chooses after the tokens of each answer, all in one forward.

    As long as an answer has chosen the same, these are the tokens that transformers generates.
    """
    model, _ = load("smollm2")
    found = []
    for ids, tokens, _ in answers:
        with torch.inference_mode():
            logits = model(torch.cat([ids, tokens[None, :-1]], -1)).logits[0, ids.shape[1] - 1 :]
        found.append(Reference(ids, logits.argmax(-1), logits))
    return found


def test_greedy_tokens_of_each_prompt_alone_equal_eager(
    answers: list[tuple[Tensor, Tensor, Tensor]], references: list[Reference]
) -> None:
    assert_same_tokens(references, [tokens for _, tokens, _ in answers])


def test_references_are_what_transformers_generates(references: list[Reference]) -> None:
    model, _ = load("smollm2")
    for reference in (references[0], references[-1]):
        tokens, logits = generate_logits(model, reference.ids)
        assert torch.equal(tokens, reference.tokens)
        assert torch.allclose(logits, reference.logits, atol=1e-3)


def test_logits_of_every_step_are_close_to_eager(
    answers: list[tuple[Tensor, Tensor, Tensor]],
    references: list[Reference],
    record_property: Callable[[str, object], None],
) -> None:
    pairs = [(logits, r.logits) for (*_, logits), r in zip(answers, references, strict=True)]
    largest = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    record_property(
        "measured", f"largest logit difference over {len(pairs)} x {NEW_TOKENS} steps: {largest:.2e}"
    )
    assert largest <= LARGEST_LOGIT_DIFFERENCE


def test_greedy_tokens_of_left_padded_batches_equal_eager(
    engine: Any, references: list[Reference], tokenizer: PreTrainedTokenizerBase
) -> None:
    answers: list[Tensor] = []
    # every batch mixes short and long prompts
    order = [i for start in range(len(references) // BATCH) for i in range(start, len(references), 4)]
    for start in range(0, len(order), BATCH):
        ids = [references[i].ids[0].tolist() for i in order[start : start + BATCH]]
        batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        assert int(batch["attention_mask"].sum(1).min()) < batch["input_ids"].shape[1], "nothing was padded"
        out = generate(engine, batch["input_ids"], batch["attention_mask"])
        answers += list(out[:, batch["input_ids"].shape[1] :])
    assert_same_tokens([references[i] for i in order], answers)


@torch.inference_mode()
def test_logits_of_one_forward_are_close_to_eager(
    engine: Any, references: list[Reference], record_property: Callable[[str, object], None]
) -> None:
    largest = 0.0
    for reference in references:
        ids = torch.cat([reference.ids[0], reference.tokens])[None]
        logits = engine(ids).logits[0, reference.ids.shape[1] - 1 : -1]
        largest = max(largest, float((logits - reference.logits).abs().max()))
    record_property("measured", f"largest logit difference in one forward of all tokens: {largest:.2e}")
    assert largest <= LARGEST_LOGIT_DIFFERENCE


@torch.inference_mode()
def perplexity(model: Any, ids: Tensor) -> float:
    logits = model(ids).logits[0, :-1].float()
    return math.exp(nn.functional.cross_entropy(logits, ids[0, 1:]))


def test_perplexity_in_bfloat16_is_that_of_transformers(
    tokenizer: PreTrainedTokenizerBase, record_property: Callable[[str, object], None]
) -> None:
    ids = tokenizer((DATA / "prose.txt").read_text(), return_tensors="pt").input_ids[:, :PROSE_TOKENS]
    assert ids.shape[1] == PROSE_TOKENS
    expected = perplexity(load("smollm2", torch.bfloat16)[0], ids)
    found = perplexity(injected("smollm2", torch.bfloat16, max_out_tokens=PROSE_TOKENS), ids)
    record_property(
        "measured",
        f"bfloat16 perplexity over {PROSE_TOKENS} tokens: {found:.4f}, transformers {expected:.4f}",
    )
    assert abs(found / expected - 1) <= 0.005


def test_minilm_embeddings_point_where_those_of_transformers_point(
    record_property: Callable[[str, object], None],
) -> None:
    model, tokenizer = load("minilm")
    batch = tokenizer((DATA / "sentences.txt").read_text().splitlines(), padding=True, return_tensors="pt")
    assert int(batch["attention_mask"].min()) == 0, "nothing was padded"
    cosines = (embed(model, batch) * embed(injected("minilm"), batch)).sum(-1)
    record_property("measured", f"smallest cosine over {len(cosines)} sentences: {float(cosines.min()):.8f}")
    assert float(cosines.min()) >= 0.9999


# inside a swapped module torch may allocate, view and write to the cache, but not compute
ALLOWED_INSIDE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "new_zeros"),
    *("contiguous", "flatten", "reshape", "unflatten", "view_as"),
    *("view", "_unsafe_view", "_reshape_alias", "alias", "detach", "as_strided", "expand", "permute", "t"),
    *("transpose", "select", "slice", "split", "split_with_sizes", "squeeze", "unsqueeze", "unbind"),
    *("copy_", "clone", "_to_copy", "index_copy_", "lift_fresh"),
    # ids are compared with the size of the table before the kernel reads it
    *("aminmax", "item", "_local_scalar_dense"),
}


class InsideSwapped(TorchDispatchMode):
    """Counts the aten ops that run inside the modules at `paths`."""

    def __init__(self, model: nn.Module, paths: list[str]) -> None:
        super().__init__()
        self.modules, self.depth = {model.get_submodule(path) for path in paths}, 0
        self.ops: Counter[str] = Counter()
        self.entered: set[nn.Module] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth:
            self.ops[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def enter(self, module: nn.Module, _: Any) -> None:
        if module in self.modules:
            self.entered.add(module)
            self.depth += 1

    def leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if module in self.modules:
            self.depth -= 1

    def run(self, call: Any) -> None:
        # hooks for all modules: a hook on one module would make the plan keep its layer
        before = nn.modules.module.register_module_forward_pre_hook(self.enter)
        after = nn.modules.module.register_module_forward_hook(self.leave)
        try:
            with self:
                call()
        finally:
            before.remove()
            after.remove()


@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_swapped_modules_run_kernels_and_no_arithmetic_of_torch(name: str) -> None:
    if backend.kind() == "reference":
        pytest.skip(f"no kernel can run: {backend.why_reference()}")
    engine = injected(name)
    ids = torch.randint(1000, 2000, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    # what watches the parts of a whole layer makes it run part by part
    parts = [step.path for step in engine.plan.swapped if step.forward != "block"]
    watch = InsideSwapped(engine.module, parts)

    def call() -> None:
        if name == "smollm2":
            # a step of launches calls no module, beams run the model's own forward
            engine.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, num_beams=2)
        else:
            embed(engine, {"input_ids": ids, "attention_mask": mask})

    with count_launches() as launches:
        watch.run(call)
    assert watch.entered, "no swapped module was called"
    assert watch.ops.keys() <= ALLOWED_INSIDE, f"torch computed inside: {watch.ops.keys() - ALLOWED_INSIDE}"
    expected = {
        "smollm2": {"rms_norm", "rotary", "attention", "decode_attention", "matmul", "gemv"},
        "minilm": {"layer_norm", "attention", "matmul"},
    }
    assert expected[name] <= launches.keys(), f"only {dict(launches)} were launched"
