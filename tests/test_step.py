"""The decode step of launches: how many, nothing between them, and the tokens of transformers."""

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import ZOO, engine_of, left_padded, make, reference, token_ids
from tests.test_layers import HARMLESS
from trinfer import ARCHITECTURES, backend
from trinfer.compat import cache_key
from trinfer.kernels import count_launches

pytestmark = pytest.mark.skipif(backend.kind() == "reference", reason="a step is made of launches")

# launches of one layer in a decode step: five; four where both halves read the same states. A larger number
# needs a reason beside it
LAUNCHES = {
    "llama": 5,
    "llama_tied": 5,
    "llama_biased": 5,
    "llama80": 5,
    "mistral": 5,
    "mistral_sw": 5,
    "qwen2": 5,
    "qwen2_sw": 5,
    "qwen3": 5,
    "smollm3": 5,
    "granite": 5,
    "gemma": 5,
    "phi3": 5,
    "phi3_sw": 5,
    "starcoder2": 5,
    "stablelm": 5,
    "nemotron": 5,
    "internlm3": 5,
    "gpt2": 5,
    "gptneo": 5,
    "bigcode": 5,
    "bigcode_mha": 5,
    "opt_pre": 5,
    "bloom": 5,
    "mpt": 5,
    "neox_sequential": 5,
    "falcon_mha": 5,
    "falcon_alibi": 5,
    "neox": 4,
    "gptj": 4,
    "codegen": 4,
    "phi": 4,
    "cohere": 4,
    "stablelm_parallel": 4,
    "falcon": 4,
    "falcon_old": 4,
    "falcon_one_norm": 4,
    # a norm of what each half gives, before it is added
    "gemma2": 7,
    "gemma3_text": 7,
    "glm4": 7,
    # the same, and norms over all queries and all keys at once, which no program of attention sees
    "olmo2": 9,
}
# decoders whose step the model's own forward runs, and why
PARTS = "its layers run part by part"
STAYS = {
    "opt": "OPTDecoder has project_out, project_in, unknown to the row",
    "phi_normed": "the norms of its queries and keys are layer norms",
    "persimmon": "the norms of its queries and keys are layer norms",
    "cohere_normed": PARTS,
    "stablelm_normed": PARTS,
    "bloom_post": PARTS,
    "bert_decoder": "BertLMHeadModel has cls, unknown to the row",
    # experts, and latents in the cache, are parts of their own
    "mixtral": PARTS,
    "olmoe": PARTS,
    "olmoe_clipped": PARTS,
    "qwen2_moe": PARTS,
    "qwen2_moe_sw": PARTS,
    "qwen2_moe_dense": "model.layers.1 runs part by part",
    "qwen3_moe": PARTS,
    "qwen3_moe_normed": PARTS,
    "gpt_oss": PARTS,
    "deepseek_v2": PARTS,
    "deepseek_v2_groups": PARTS,
    "deepseek_v3": PARTS,
    "megatron_bert_decoder": "MegatronBertForCausalLM has cls, unknown to the row",
}
if cache_key() != "cache":
    # up to 5.17 their rotary table is a buffer of each attention module
    for without_module in ("gptj", "codegen"):
        del LAUNCHES[without_module]
        STAYS[without_module] = "its rotary table is no module of its own"
    # and these models are not in the zoo
    LAUNCHES = {name: count for name, count in LAUNCHES.items() if name in ZOO}
    STAYS = {name: why for name, why in STAYS.items() if name in ZOO}
# around the layers: what passes from step to step, the embedding, the head with final norm and choice
AROUND = 3
# models of the zoo whose step is launches, and configurations that change what those do
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "tied": ("llama_tied", {}),
    "biased": ("llama_biased", {}),
    "heads of 80": ("llama80", {}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "no groups": ("llama", {"num_key_value_heads": 9}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
            "max_position_embeddings": 32,
        },
    ),
    "yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "rope_theta": 10000.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "longrope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
                "original_max_position_embeddings": 32,
            },
        },
    ),
}


class Ops(TorchDispatchMode):
    """Counts the aten ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def greedy(model: Any, ids: torch.Tensor, new: int = 8, **options: Any) -> Any:
    return model.generate(ids, max_new_tokens=new, do_sample=False, **options)


def trace(engine: Any, ids: torch.Tensor, new: int) -> tuple[Counter[str], Counter[str]]:
    """Launches and aten ops of a call."""
    with count_launches() as launches, Ops() as ops:
        greedy(engine, ids, new)
    return launches, ops.counts


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_step(name: str) -> None:
    engine = engine_of(make(name))
    ids = token_ids(2, 5)
    short, long = (trace(engine, ids, new)[0] for new in (3, 7))
    layers = engine.config.num_hidden_layers
    assert sum((long - short).values()) == 4 * (AROUND + layers * LAUNCHES[name])
    assert f"{layers} layers of {LAUNCHES[name]} launches" in engine.plan.step


@pytest.mark.parametrize("name", STAYS)
def test_the_plan_says_why_the_models_own_forward_runs_the_step(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model)
    assert engine.plan.step.startswith(f"model.forward, as {STAYS[name]}")
    ids = token_ids(1, 5)
    assert torch.equal(greedy(engine, ids), greedy(expected, ids))


def test_every_decoder_has_its_launches_or_its_reason() -> None:
    rows = {name for name, (kind, what, _) in ZOO.items() if what == "CausalLM" and kind in ARCHITECTURES}
    assert rows == {*LAUNCHES, *STAYS}


@pytest.mark.parametrize("name", [name for name in LAUNCHES if not name.startswith("llama")])
def test_tokens_of_every_architecture_equal_transformers(name: str, caplog: Any) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model, enable_cuda_graph=True)
    for tokens in (1, 9, 40):
        ids = token_ids(1, tokens, seed=tokens)
        assert torch.equal(greedy(engine, ids), greedy(expected, ids))
    check_padded(engine, expected)
    assert "could not be recorded" not in caplog.text


def test_a_position_table_ends_where_it_ends_in_transformers() -> None:
    model = make("gpt2")
    expected = reference(model)
    engine = engine_of(model)
    ids = token_ids(1, 60)
    with count_launches() as launches:
        assert torch.equal(greedy(engine, ids, 5), greedy(expected, ids, 5))
    assert launches["lm_head"] == 5
    for generate in (engine, expected):
        with pytest.raises(IndexError):
            greedy(generate, ids, 6)


@pytest.mark.parametrize("name", [name for name in ("gpt2", "olmo2", "codegen", "bloom") if name in LAUNCHES])
def test_prompts_of_more_rows_than_a_gemv_takes(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model, enable_cuda_graph=True)
    ids = token_ids(17, 9)
    assert torch.equal(greedy(engine, ids), greedy(expected, ids))


@pytest.mark.parametrize("name", [name for name in ("llama", "gpt2", "codegen", "olmo2") if name in LAUNCHES])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_no_torch_operation_and_no_host_read_in_a_step(is_recorded: bool, name: str) -> None:
    engine = engine_of(make(name), enable_cuda_graph=is_recorded)
    ids = token_ids(2, 5)
    greedy(engine, ids, 12)
    short, long = (trace(engine, ids, new)[1] for new in (3, 12))
    # views and allocations make no launch; a recording leaves not even those
    assert set(long - short) <= (set() if is_recorded else HARMLESS - {"_local_scalar_dense"})


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_equal_transformers(variant: str) -> None:
    name, changes = VARIANTS[variant]
    engine = engine_of(make(name, **changes), enable_cuda_graph=True)
    assert engine.plan.step.startswith("kernels")
    for tokens in (1, 2, 40, 31):
        ids = token_ids(1, tokens, seed=tokens)
        # a fresh model each time: a dynamic rotary embedding keeps the frequencies of its longest call
        truth = greedy(reference(make(name, **changes)), ids, 12)
        assert torch.equal(greedy(engine, ids, 12), truth)
    check_padded(engine, reference(make(name, **changes)))


def check_padded(engine: Any, expected: Any) -> None:
    """Tokens and logits of padded rows, and beams, which run through the model's own forward."""
    ids, mask = left_padded([9, 4, 1])
    options = {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
    ours, theirs = (greedy(m, ids, 12, **options) for m in (engine, expected))
    assert torch.equal(ours.sequences, theirs.sequences)
    for mine, truth in zip(ours.logits, theirs.logits, strict=True):
        assert torch.allclose(mine, truth, atol=1e-4)
    beams = {"attention_mask": mask, "num_beams": 2}
    assert torch.equal(greedy(engine, ids, **beams), greedy(expected, ids, **beams))


def test_prompts_of_every_length() -> None:
    model = make("llama", max_position_embeddings=512)
    expected = reference(model)
    engine = engine_of(model, enable_cuda_graph=True)
    for tokens in (3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 300):
        ids = token_ids(1, tokens, seed=tokens)
        assert torch.equal(greedy(engine, ids, 4), greedy(expected, ids, 4))


def test_more_rows_than_a_gemv_takes() -> None:
    model = make("llama")
    expected = reference(model)
    engine = engine_of(model, enable_cuda_graph=True)
    for rows in (16, 17, 40, 3):
        ids = token_ids(rows, 5, seed=rows)
        assert torch.equal(greedy(engine, ids), greedy(expected, ids))


def test_u038_u040_u086_calls_of_any_batch_and_length_equal_a_fresh_engine() -> None:
    model = make("llama")
    expected = reference(model)
    engine = engine_of(model, enable_cuda_graph=True)
    for rows, tokens in ((1, 5), (3, 9), (1, 5), (5, 2), (2, 17), (1, 30), (4, 5), (1, 3), (1, 30)):
        ids = token_ids(rows, tokens, seed=rows)
        for given in (ids, ids.int()):
            assert torch.equal(greedy(engine, given).long(), greedy(expected, ids))
    ids, mask = left_padded([9, 4])
    options = {"attention_mask": mask}
    assert torch.equal(greedy(engine, ids, **options), greedy(expected, ids, **options))
    assert torch.equal(greedy(engine, ids), greedy(expected, ids))
    whole = torch.ones_like(ids)
    ours, theirs = (greedy(m, ids, attention_mask=whole) for m in (engine, expected))
    assert torch.equal(ours, theirs)


def test_u087_a_recording_made_at_one_length_serves_all() -> None:
    model = make("llama")
    expected = reference(model)
    engine = engine_of(model, enable_cuda_graph=True)
    greedy(engine, token_ids(1, 5))
    graphs = engine.module._trinfer_decoder.graphs
    assert len(graphs) == 1
    ids = token_ids(1, 40)
    assert torch.equal(greedy(engine, ids), greedy(expected, ids))
    assert len(graphs) == 1


def test_a_prompt_of_a_shape_that_came_before_is_replayed() -> None:
    model = make("llama")
    expected = reference(model)
    engine = engine_of(model, enable_cuda_graph=True)
    prefills = []
    for seed in range(4):
        ids = token_ids(2, 12, seed=seed)
        with count_launches() as launches:
            tokens = greedy(engine, ids, 3)
        assert torch.equal(tokens, greedy(expected, ids, 3))
        prefills.append(launches["attention"])
    # launched, recorded, replayed
    assert prefills == [2, 2, 0, 0]
    longer = token_ids(2, 13)
    assert torch.equal(greedy(engine, longer, 3), greedy(expected, longer, 3))


def test_u088_what_a_call_returned_stays_as_it_was() -> None:
    engine = engine_of(make("llama"), enable_cuda_graph=True)
    options = {"return_dict_in_generate": True, "output_logits": True}
    first = greedy(engine, token_ids(2, 5), **options)
    cache = getattr(first, "cache", None) or first.past_key_values
    kept = copy.deepcopy((first.sequences, first.logits, [layer.keys for layer in cache.layers]))
    greedy(engine, token_ids(2, 5, seed=1), **options)
    now = (first.sequences, first.logits, [layer.keys for layer in cache.layers])
    assert torch.equal(now[0], kept[0])
    for mine, before in zip((*now[1], *now[2]), (*kept[1], *kept[2]), strict=True):
        assert torch.equal(mine, before)


def test_a_cache_that_came_back_continues_by_launches() -> None:
    model = make("llama")
    expected = reference(model)
    engine = engine_of(model, enable_cuda_graph=True)
    ids = token_ids(2, 5)
    first = greedy(engine, ids, return_dict_in_generate=True)
    key = "cache" if hasattr(first, "cache") else "past_key_values"
    other = greedy(engine, token_ids(2, 7, seed=4))
    longer = torch.cat([first.sequences, token_ids(2, 3, seed=3)], -1)
    # without it, a token that equals the padding would count as such
    options = {"attention_mask": torch.ones_like(longer)}
    with count_launches() as launches:
        again = greedy(engine, longer, **options, **{key: getattr(first, key)})
    assert launches["qkv_post"] == 2
    assert torch.equal(again, greedy(expected, longer, **options))
    assert torch.equal(greedy(engine, token_ids(2, 7, seed=4)), other)


def test_sampling_draws_what_transformers_draws() -> None:
    model = make("llama")
    expected = reference(model)
    engine = engine_of(model, enable_cuda_graph=True)
    ids, mask = left_padded([9, 4])
    options = {
        "do_sample": True,
        "top_k": 20,
        "temperature": 0.8,
        "max_new_tokens": 20,
        "attention_mask": mask,
    }
    drawn = []
    for model in (engine, expected):
        torch.manual_seed(3)
        drawn.append(model.generate(ids, **options))
    assert torch.equal(*drawn)


def test_ends_are_found_on_the_device() -> None:
    model = make("llama")
    expected = reference(model)
    engine = engine_of(model, enable_cuda_graph=True)
    ids = token_ids(3, 5)
    free = greedy(expected, ids, 20)
    for eos in ([int(free[1, 7])], [int(free[0, 6]), int(free[1, 9]), int(free[2, 20])]):
        options = {"eos_token_id": eos, "pad_token_id": 0, "return_dict_in_generate": True}
        ours, theirs = (greedy(m, ids, 20, **options) for m in (engine, expected))
        assert torch.equal(ours.sequences, theirs.sequences)
        held, truth = (getattr(o, "cache", None) or o.past_key_values for o in (ours, theirs))
        assert held.get_seq_length() == truth.get_seq_length()


def test_new_weights_are_seen_and_recordings_dropped() -> None:
    model = make("llama")
    engine = engine_of(model, enable_cuda_graph=True)
    ids = token_ids(1, 5)
    before = greedy(engine, ids)
    other = make("llama", seed=9)
    truth = greedy(reference(other), ids)
    engine.load_state_dict(other.state_dict(), assign=True)
    after = greedy(engine, ids)
    assert torch.equal(after, truth)
    assert not torch.equal(after, before)
    with torch.no_grad():
        for mine, theirs in zip(engine.parameters(), make("llama").parameters(), strict=True):
            mine.data = theirs.data
    assert torch.equal(greedy(engine, ids), before)


def test_copies_share_nothing() -> None:
    engine = engine_of(make("llama"), enable_cuda_graph=True)
    ids = token_ids(2, 5)
    before = greedy(engine, ids)
    twin, loaded = copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not torch.equal(greedy(twin, ids), before)
    assert torch.equal(greedy(loaded, ids), before)
    assert torch.equal(greedy(engine, ids), before)


def test_hooks_make_the_models_own_forward_run() -> None:
    engine = engine_of(make("llama"))
    seen: list[int] = []
    engine.module.model.layers[0].self_attn.register_forward_hook(lambda *_: seen.append(1))
    greedy(engine, token_ids(1, 5), 4)
    assert len(seen) == 4


def test_ids_outside_of_the_vocabulary_are_refused() -> None:
    engine = engine_of(make("llama"))
    with pytest.raises(IndexError, match="ids from 4 to 99 in a table of 99 rows"):
        greedy(engine, torch.tensor([[4, 99, 5]]))
    assert greedy(engine, token_ids(1, 3)).shape == (1, 11)
