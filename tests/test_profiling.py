"""engine.profile: what it counts, prints and draws, and that it leaves the engine as it was."""

from pathlib import Path

import pytest
import torch

from tests.models import engine_of, make, reference, token_ids
from trinfer import backend

pytestmark = pytest.mark.skipif(backend.kind() == "reference", reason="there are no launches to time")


def test_profile_counts_launches_and_bytes(tmp_path: Path) -> None:
    engine = engine_of(make("llama"), enable_cuda_graph=True, max_out_tokens=64)
    profile = engine.profile(rows=2, tokens=20)
    found = {kernel.op: kernel for kernel in profile.kernels}
    assert {op: kernel.launches for op, kernel in found.items()} == {
        "advance": 1,
        "embedding": 1,
        "gemv": 8,
        "decode_attention": 2,
        "lm_head": 1,
    }
    layers = engine.module.model.layers
    weights = sum(p.numel() for name, p in layers.named_parameters() if "norm" not in name) * 4
    # beside its weights a product reads and writes a few rows of hidden states
    assert weights < found["gemv"].nbytes < 1.15 * weights
    cache = 2 * 2 * 2 * 3 * 20 * 8 * 4
    assert cache < found["decode_attention"].nbytes < 1.5 * cache
    assert all(kernel.us > 0 for kernel in profile.kernels)
    assert list(profile.kernels) == sorted(profile.kernels, key=lambda kernel: -kernel.us)
    assert profile.us == pytest.approx(sum(kernel.us for kernel in profile.kernels))
    lines = str(profile).splitlines()
    assert lines[0].startswith("LlamaForCausalLM, one step of 2 x 20 tokens on ")
    assert len(lines) == 2 + 2 + len(found) + 1
    assert profile._repr_html_().count("<tr>") == 1 + len(found) + 1
    pytest.importorskip("matplotlib", reason="pip install 'trinfer[bench]'")
    profile.draw(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").stat().st_size > 1000


@pytest.mark.parametrize("enable_cuda_graph", [False, True])
def test_profile_leaves_generation_as_it_was(enable_cuda_graph: bool) -> None:
    model = make("llama")
    expected = reference(model)
    engine = engine_of(model, enable_cuda_graph=enable_cuda_graph)
    ids = token_ids(1, 5)
    options = {"max_new_tokens": 6, "do_sample": False}
    truth = expected.generate(ids, **options)
    assert torch.equal(engine.generate(ids, **options), truth)
    profiles = [engine.profile() for _ in range(2)]
    assert torch.equal(engine.generate(ids, **options), truth)
    # also where the step has been recorded before
    counts = [{kernel.op: kernel.launches for kernel in profile.kernels} for profile in profiles]
    assert counts[0] == counts[1] and counts[0]["lm_head"] == 1


@pytest.mark.parametrize(("rows", "tokens"), [(0, 5), (1, 0), (1, 1017)])
def test_profile_refuses_impossible_sizes(rows: int, tokens: int) -> None:
    with pytest.raises(
        ValueError, match=f"rows={rows}, tokens={tokens}; allowed: rows from 1, tokens from 1 to 1016"
    ):
        engine_of(make("llama")).profile(rows, tokens)


def test_profile_needs_a_step_of_launches() -> None:
    with pytest.raises(ValueError, match="but here the step is model.forward"):
        engine_of(make("bert")).profile()


def test_model_times_tell_of_every_prefill_and_step() -> None:
    engine = engine_of(make("llama"), enable_cuda_graph=True)
    engine.profile_model_time()
    engine.generate(token_ids(1, 5), max_new_tokens=6, do_sample=False)
    assert len(engine.model_times()) == 6
    engine(token_ids(1, 5))
    times = engine.model_times()
    assert len(times) == 1 and times[0] > 0
