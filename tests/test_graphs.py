"""Recordings by key: replay, capture on a GPU (rehearsed with one that mimics it), pieces of an encoder."""

import copy
import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import engine_of, left_padded, make, reference, token_ids
from trinfer import backend, graphs
from trinfer.graphs import DispatchGuard, Graphs, NotRecordable, Pieces
from trinfer.kernels import activation, count_launches, gemv

needs_kernels = pytest.mark.skipif(backend.kind() == "reference", reason="nothing to record on this machine")
needs_cpu = pytest.mark.skipif(backend.kind() != "cpu", reason="looks at the launch list of the CPU")


class FakeGraph:
    """Captures as torch.cuda.CUDAGraph does: what runs in the capture has no effect until it is replayed."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.recording: Any = None

    def replay(self) -> None:
        self.recording.replay()


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> Iterator[type[FakeGraph]]:
    """The CUDA recorder of `graphs`, over launch lists of the CPU."""
    from trinfer.cpu.record import record

    pools: list[Any] = []

    @contextmanager
    def capture(graph: FakeGraph, pool: Any = None) -> Iterator[None]:
        pools.append(pool)
        with record() as recording:
            yield
        graph.recording = recording

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    FakeGraph.made = 0
    monkeypatch.setattr(graphs, "backend", SimpleNamespace(kind=lambda: "gpu"))
    caplog.set_level(logging.WARNING)
    for name, value in {
        "CUDAGraph": FakeGraph,
        "graph": capture,
        "graph_pool_handle": lambda: "pool",
        "Stream": Stream,
        "stream": stream,
        "current_stream": Stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    yield FakeGraph
    assert set(pools) == {"pool"}
    # nothing fell back
    assert not caplog.records


def adding(x: Tensor, step: Tensor) -> Any:
    """A launch that changes x in place: x += step."""
    eye = torch.eye(x.shape[-1])
    return lambda: gemv(step, eye, residual=x, out=x)


@needs_cpu
def test_first_run_and_replays_each_happen_once() -> None:
    x, step = torch.zeros(2, 16), torch.ones(2, 16)
    recordings = Graphs()
    for count in (1, 2, 3):
        recordings.run("key", adding(x, step))
        assert torch.equal(x, torch.full_like(x, count))
    step.fill_(5.0)
    recordings.run("key", adding(x, step))
    assert torch.equal(x, torch.full_like(x, 8.0))


@needs_cpu
def test_capture_on_a_gpu_restores_what_its_warm_up_changed(fake_gpu: type[FakeGraph]) -> None:
    x, step = torch.zeros(2, 16), torch.ones(2, 16)
    recordings = Graphs()
    for count in (1, 2, 3):
        recordings.run("key", adding(x, step), state=(x,))
        assert torch.equal(x, torch.full_like(x, count))
    assert fake_gpu.made == 1


@needs_cpu
def test_u091_recordings_are_capped_and_the_least_recently_used_goes(fake_gpu: type[FakeGraph]) -> None:
    recordings = Graphs(most=3)
    x, step = torch.zeros(2, 16), torch.ones(2, 16)
    for key in ("a", "b", "c", "a", "d", "a"):
        recordings.run(key, adding(x, step), state=(x,))
    assert tuple(recordings) == ("c", "d", "a")
    assert fake_gpu.made == 4
    assert torch.equal(x, torch.full_like(x, 6.0))


@needs_kernels
def test_torch_operations_cannot_be_recorded_and_run_with_one_warning(caplog: Any) -> None:
    x = torch.zeros(2, 16)

    def launch() -> None:
        x.add_(1)

    recordings = Graphs()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            recordings.run("key", launch)
    assert torch.equal(x, torch.full_like(x, 3.0))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "aten.add_" in caplog.text and "would be missing from every replay" in caplog.text


def test_guard_lets_views_and_allocations_pass() -> None:
    x = torch.ones(2, 6)
    with DispatchGuard():
        y = x.view(3, 4).t()[1:].unsqueeze(0)
        torch.empty(3)
        x.new_empty(2)
    assert y.shape == (1, 3, 3)
    with DispatchGuard(), pytest.raises(NotRecordable, match="allowed: kernels of trinfer"):
        x.sum()
    # inference mode shows them whole, and says that they are views
    with torch.inference_mode(), DispatchGuard():
        assert x.contiguous().flatten().data_ptr() == x.data_ptr()
        for copy in (lambda: x.t().contiguous(), lambda: x.t().reshape(-1), lambda: x.to(torch.float16)):
            with pytest.raises(NotRecordable, match="allowed: kernels of trinfer"):
                copy()


@needs_kernels
def test_pieces_return_copies_and_see_new_arguments() -> None:
    pieces = Pieces()

    def run(inputs: Any) -> Tensor:
        return activation(inputs[0], inputs[1]["act"])

    x, other = torch.randn(3, 8), torch.randn(3, 8)
    first = pieces.run(run, (x, {"act": "relu"}), 0)
    kept = first.clone()
    second = pieces.run(run, (other, {"act": "relu"}), 0)
    assert torch.equal(first, kept)
    assert torch.equal(second, other.relu())
    assert len(pieces) == 1
    assert torch.equal(pieces.run(run, (x[:2], {"act": "relu"}), 0), x[:2].relu())
    torch.testing.assert_close(pieces.run(run, (x, {"act": "silu"}), 0), torch.nn.functional.silu(x))
    assert len(pieces) == 3
    for twin in (copy.deepcopy(pieces), pickle.loads(pickle.dumps(pieces))):
        assert len(twin) == 0


def test_pieces_refuse_what_they_cannot_look_into() -> None:
    with pytest.raises(NotRecordable, match="argument of type object"):
        graphs.signature((torch.ones(1), object()))


@needs_kernels
@pytest.mark.parametrize("name", ["bert"])
def test_u086_an_encoder_is_recorded_by_shape(name: str) -> None:
    model = make(name)
    expected = reference(model)
    engine = engine_of(model, enable_cuda_graph=True)
    assert "recorded by shape" in str(engine.plan)
    ids, mask = left_padded([9, 4])
    calls = [(ids, mask), (ids, None), (token_ids(1, 5), None), (ids, mask), (token_ids(4, 5), None)]
    outputs = []
    with torch.no_grad():
        for given, padding in calls:
            ours, theirs = (m(given, attention_mask=padding).logits for m in (engine, expected))
            rows = slice(None) if padding is None else padding.bool()
            torch.testing.assert_close(ours[rows], theirs[rows], atol=1e-4, rtol=0)
            outputs.append((ours, ours.clone()))
    for ours, kept in outputs:
        assert torch.equal(ours, kept)
    states = engine(ids, attention_mask=mask, output_hidden_states=True, output_attentions=True)
    truth = expected(ids, attention_mask=mask, output_hidden_states=True, output_attentions=True)
    for mine, theirs in zip(states.hidden_states, truth.hidden_states, strict=True):
        torch.testing.assert_close(mine[mask.bool()], theirs[mask.bool()], atol=1e-4, rtol=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        for parameter in expected.parameters():
            parameter.mul_(0.5)
        torch.testing.assert_close(engine(ids).logits, expected(ids).logits, atol=1e-4, rtol=0)
    engine.destroy()
    assert not any("_trinfer_pieces" in module.__dict__ for module in model.modules())


@needs_cpu
def test_a_replay_launches_nothing_from_python() -> None:
    engine = engine_of(make("bert"), enable_cuda_graph=True)
    ids = token_ids(2, 5)
    engine(ids)
    with count_launches() as launches:
        engine(ids)
    # embeddings and head around the layers
    assert set(launches) <= {"embedding", "layer_norm", "gemv", "activation"}
    assert launches["attention"] == 0


@needs_kernels
def test_graph_where_nothing_can_be_recorded_is_refused() -> None:
    model = make("t5")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="enable_cuda_graph=True finds nothing to record in T5"):
        engine_of(model, enable_cuda_graph=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.gpu
def test_a_real_graph_replays_what_its_capture_saw() -> None:
    x, step = torch.zeros(2, 16, device="cuda"), torch.ones(2, 16, device="cuda")
    eye = torch.eye(16, device="cuda")
    recordings = Graphs()
    for count in (1, 2, 3):
        recordings.run("key", lambda: gemv(step, eye, residual=x, out=x), state=(x,))
        assert torch.equal(x, torch.full_like(x, count))
    step.fill_(5.0)
    recordings.run("key", lambda: None)
    assert torch.equal(x, torch.full_like(x, 8.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_steps_on_a_gpu_equal_launches_one_by_one(dtype: torch.dtype) -> None:
    recorded, eager = (engine_of(make("llama"), dtype, enable_cuda_graph=graph) for graph in (True, False))
    for rows, tokens in ((1, 5), (3, 40), (1, 200), (3, 5)):
        ids = token_ids(rows, tokens, seed=rows)
        both = [m.generate(ids, max_new_tokens=20, do_sample=False) for m in (recorded, eager)]
        assert torch.equal(*both)
    decoder = recorded.module._trinfer_decoder
    assert len(decoder.graphs) == 2


@pytest.mark.gpu
def test_u091_a_second_pass_over_all_batches_takes_no_more_memory() -> None:
    engine = engine_of(make("llama"), enable_cuda_graph=True)
    used = []
    for _ in range(2):
        for rows in range(12, 0, -1):
            engine.generate(token_ids(rows, 5), max_new_tokens=4, do_sample=False)
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_reserved())
    assert used[1] == used[0]
