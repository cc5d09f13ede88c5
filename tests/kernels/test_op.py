"""What holds for every op: its record, its launch count, its reference path, and how often it compiles."""

import inspect

import pytest
import torch

from tests.strategies import assert_close, make, truth
from trinfer import backend, cpu, kernels
from trinfer.autotune import choose, collect, forget, pin
from trinfer.kernels import OPS, count_launches

SIZES = {"B": 2, "H": 4, "G": 2, "M": 5, "N": 34, "K": 71, "D": 64, "R": 32, "V": 11, "E": 4}
ids = [op.name for op in OPS]


def random_inputs(op, dtype=torch.float32):
    """Arguments of an op from its own record, at the sizes that it asks for."""
    names = [name for name in inspect.signature(op.inputs).parameters if name in SIZES]
    return op.inputs(**{name: SIZES[name] for name in names}, dtype=dtype, device=backend.default_device())


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def tensors(value):
    """All tensors inside arguments."""
    if isinstance(value, dict | tuple):
        return [t for v in (value.values() if isinstance(value, dict) else value) for t in tensors(v)]
    return [value] if isinstance(value, torch.Tensor) else []


def test_every_public_launcher_has_a_record():
    assert len(set(ids)) == len(ids)
    for op in OPS:
        assert op.launcher is getattr(kernels, op.name)
        assert op.ref is getattr(kernels, f"{op.name}_ref")


@pytest.mark.parametrize("op", OPS, ids=ids)
def test_reference_takes_the_same_arguments(op):
    launcher, ref = inspect.signature(op.launcher), inspect.signature(op.ref)
    assert list(launcher.parameters.values()) == list(ref.parameters.values())


@pytest.mark.parametrize("op", OPS, ids=ids)
def test_record_feeds_and_prices_its_op(op):
    arguments = random_inputs(op)
    for_truth = arguments | {name: arguments[name].clone() for name in op.writes}
    with count_launches() as launches:
        results = op.launcher(**arguments)
    assert launches == {op.name: 1}
    for actual, expected in zip(as_tuple(results), as_tuple(truth(op.ref, **for_truth)), strict=True):
        if actual.is_floating_point():
            assert_close(actual, expected, torch.float32)
        else:
            # a number between two 8-bit codes may become either
            limit = 1 if actual.element_size() == 1 else 0
            assert actual.dtype == expected.dtype and (actual.int() - expected.int()).abs().max() <= limit
    moved, operations = op.cost(**arguments)
    written = sum(t.numel() * t.element_size() for t in as_tuple(results))
    assert moved >= written
    assert operations > 0


@pytest.mark.parametrize("op", OPS, ids=ids)
def test_u029_inputs_are_never_modified(op):
    arguments = random_inputs(op)
    # a cache is there to be written
    read = {name: value for name, value in arguments.items() if name not in op.writes}
    before = [t.clone() for t in tensors(read)]
    results = as_tuple(op.launcher(**arguments))
    assert all(map(torch.equal, tensors(read), before))
    memories = {t.untyped_storage().data_ptr() for t in tensors(read)}
    assert not memories & {result.untyped_storage().data_ptr() for result in results}


@pytest.mark.parametrize("op", OPS, ids=ids)
def test_space_overrides_parts_of_the_default(op):
    with collect() as calls:
        op.launcher(**random_inputs(op))
    ((_, key),) = calls
    assert all(set(config) <= set(op.default(key)) for config in op.space)
    assert len({tuple(sorted(config.items())) for config in op.space}) == len(op.space) > 1


@pytest.mark.parametrize("op", OPS, ids=ids)
def test_reference_runs_where_triton_cannot(op, monkeypatch):
    monkeypatch.setattr(backend, "runs_triton", lambda x: False)
    # where kernels run does not change in a process: launches of before would be made again
    forget()
    arguments = random_inputs(op)
    for_ref = arguments | {name: arguments[name].clone() for name in op.writes}
    with count_launches() as launches:
        results = op.launcher(**arguments)
    assert not launches
    for actual, expected in zip(as_tuple(results), as_tuple(op.ref(**for_ref)), strict=True):
        assert torch.equal(actual, expected)


def test_launches_are_counted_by_every_open_counter():
    x = make((2, 7), torch.float32, 0)
    with count_launches() as outer:
        kernels.relu(x)
        with count_launches() as inner:
            kernels.relu(x)
            kernels.silu_mul(x, x)
    kernels.relu(x)
    assert outer == {"activation": 2, "gated_activation": 1}
    assert inner == {"activation": 1, "gated_activation": 1}


def test_pin_overrides_the_default_and_ends():
    op = next(op for op in OPS if op.name == "activation")
    x = make((3000,), torch.float32, 0)
    with pytest.raises(RuntimeError, match="stop"), pin(op, {"BLOCK_N": 64}):
        assert_close(op.launcher(x, "relu"), x.double().relu(), torch.float32)
        raise RuntimeError("stop")
    assert choose(op, (torch.float32,))["BLOCK_N"] != 64


@pytest.mark.skipif(backend.kind() != "cpu", reason="counts what the CPU backend compiles")
class TestCompilesOnce:
    """Values that change from call to call must not specialise a kernel."""

    @pytest.fixture
    def compiled(self, monkeypatch, tmp_path):
        """Names of the kernels that the test compiles, not of those compiled before in this process."""
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        names = []
        cpu.compile_listeners.append(names.append)
        yield names
        cpu.compile_listeners.remove(names.append)

    def test_decoding(self, compiled):
        cache = torch.zeros(2, 2, 64, 72)
        for N in range(1, 64):
            q, view = torch.zeros(2, 4, 1, 72), cache[:, :, :N]
            kernels.decode_attention(q, view, view, sm_scale=0.2)
        assert len(compiled) <= 1

    def test_decoding_in_place(self, compiled):
        k = torch.zeros(2, 2, 64, 72)
        tables = torch.zeros(64, 72)
        prologue = kernels.Prologue(cos=tables, sin=tables)
        for N in range(1, 64):
            q, new = torch.zeros(2, 4, 1, 72), torch.zeros(2, 2, 1, 72)
            kv_range = torch.tensor([[0, N], [N // 2, N]], dtype=torch.int32)
            options = {"sm_scale": 0.2, "kv_range": kv_range, "prologue": prologue}
            kernels.decode_attention(q, k, k.clone(), new=(new, new), **options)
            places = kv_range[:, 1:] - 1
            kernels.qkv_post(q, new, new, k, k.clone(), places, prologue, kv_range=kv_range)
        assert len(compiled) <= 2

    def test_prefill_of_any_length(self, compiled):
        for M in (1, 2, 7, 15, 16):
            q, k = torch.zeros(2, 4, M, 176), torch.zeros(2, 2, M + 5, 176)
            kernels.attention(q, k, k, sm_scale=0.2, is_causal=True)
        assert len(compiled) <= 1

    def test_packed_prefill_of_any_lengths(self, compiled):
        prologue = kernels.Prologue(cos=torch.zeros(64, 176), sin=torch.zeros(64, 176))
        for lengths in ([1], [7, 1], [0, 16, 5], [3] * 7):
            T, ends = sum(lengths), torch.tensor(lengths).cumsum(0)
            q, new = torch.zeros(1, 4, T, 176), torch.zeros(1, 2, T, 176)
            k = torch.zeros(len(lengths), 2, T + 3, 176)
            q_range = torch.stack((ends - torch.tensor(lengths), ends), 1).int()
            kv_range = torch.tensor([[0, n] for n in lengths], dtype=torch.int32)
            rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).int()
            places = torch.cat([torch.arange(n) for n in lengths])[None]
            kernels.qkv_post(q, new, new, k, k.clone(), places, prologue, rows=rows, kv_range=kv_range)
            options = {"sm_scale": 0.2, "is_causal": True, "kv_range": kv_range}
            kernels.attention(q, k, k, q_range=q_range, max_queries=max(lengths), **options)
        assert len(compiled) <= 2

    def test_any_number_of_rows(self, compiled):
        x, w = torch.zeros(16, 88), torch.zeros(24, 88)
        known = 0
        # configurations may differ between powers of two, never between the numbers they stand for
        for M in (1, 2, 4, 8, 3, 5, 6, 7):
            if M == 3:
                known = len(compiled)
            kernels.gemv(x[:M], w)
            kernels.rms_norm(x[:M], w[0], 1e-6)
            kernels.layer_norm(x[:M], w[0], w[0], 1e-6)
            kernels.matmul(x[: 2 * M], w)
            q, scale = kernels.quantize(x[:M])
            kernels.quant_gemv(x[:M], w.to(torch.int8), w[:, :1].contiguous())
            kernels.quant_matmul(q, w.to(torch.int8), w[:, :1].contiguous(), x_scale=scale, dtype=x.dtype)
            kernels.gemv(x[:M], w, norm=kernels.Norm(w[0]), out=torch.empty(M, 24))
            kernels.lm_head(x[:M], w)
            kernels.softmax(x[:M])
            kernels.gumbel(x[:M], 1.0, torch.tensor([M]), torch.tensor([M]))
        assert compiled[known:] == []

    def test_any_slice_of_ids(self, compiled):
        ids, w = torch.zeros(1, 9, dtype=torch.int64), torch.zeros(5, 88)
        for start in range(9):
            kernels.embedding(ids[:, start:], w)
        assert len(compiled) <= 1

    def test_any_positions(self, compiled):
        ids, at = torch.zeros(20, dtype=torch.int64), torch.zeros(20, dtype=torch.int32)
        kv_range, w = torch.tensor([[0, 1]], dtype=torch.int32).repeat(20, 1), torch.zeros(40, 88)
        for B in (1, 2, 7, 8, 16):
            for where in ({"ids": at[1 : B + 1]}, {"kv_range": kv_range[1 : B + 1]}):
                table = kernels.Table(w[:16], **where, offset=B)
                kernels.embedding(ids[1 : B + 1], w, types=table, positions=table)
        assert len(compiled) <= 2

    def test_advancing_any_batch(self, compiled):
        memory = {"token": torch.zeros(16, dtype=torch.int64), "finished": torch.zeros(16, dtype=torch.bool)}
        memory["length"] = torch.zeros(16, dtype=torch.int64)
        kv_range = torch.zeros(16, 2, dtype=torch.int32)
        for B in (1, 2, 3, 7, 8):
            for S in (1, 16, 17, 4096):
                slices = {name: x[B : 2 * B] for name, x in memory.items()}
                sequences = torch.zeros(B, S, dtype=torch.int64)
                options = {"kv_range": kv_range[B : 2 * B], "sequences": sequences, "eos": torch.arange(B)}
                kernels.advance(**slices, **options, pad=S)
        assert len(compiled) <= 1
