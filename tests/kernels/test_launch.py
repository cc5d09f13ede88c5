"""What a launcher keeps of the second call of a kind: used by later calls of that kind, and by no other."""

import sys
import threading

import pytest
import torch

from tests.kernels.test_op import as_tuple, ids, random_inputs
from tests.strategies import assert_close, make, truth
from trinfer import backend
from trinfer.autotune import choose, forget, pin
from trinfer.cpu.record import record
from trinfer.kernels import (
    OPS,
    Norm,
    count_launches,
    gemv,
    gemv_ref,
    list_launches,
    relu,
    rms_norm,
    rms_norm_ref,
)
from trinfer.kernels.activation import OP as ACTIVATION
from trinfer.kernels.activation import _activation_kernel
from trinfer.kernels.gemv import OP as GEMV
from trinfer.kernels.launch import launch, launched, launcher
from trinfer.kernels.splits import split_scratch

pytestmark = pytest.mark.skipif(backend.kind() != "cpu", reason="launches on the CPU backend")

# they make memory of zeros for themselves
ALWAYS_LONG = {"gumbel", "lm_head", "router"}
FP32 = torch.float32


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """The ops that asked for a configuration: those whose launcher went the long way."""
    forget()
    names = []
    for op in OPS:
        module = sys.modules[op.launcher.__module__]
        monkeypatch.setattr(module, "choose", lambda op, key: names.append(op.name) or choose(op, key))
    return names


@pytest.mark.parametrize("op", OPS, ids=ids)
def test_the_third_call_of_a_kind_computes_with_its_own_tensors(op, asked):
    op.launcher(**random_inputs(op))
    second = as_tuple(op.launcher(**random_inputs(op)))
    arguments = random_inputs(op)
    for_truth = arguments | {name: arguments[name].clone() for name in op.writes}
    with count_launches() as launches:
        results = as_tuple(op.launcher(**arguments))
    assert asked == [op.name] * (3 if op.name in ALWAYS_LONG else 2)
    assert launches == {op.name: 1}
    for actual, earlier, expected in zip(results, second, as_tuple(truth(op.ref, **for_truth)), strict=True):
        assert (actual.shape, actual.stride()) == (earlier.shape, earlier.stride())
        assert actual is arguments.get("token") or actual.data_ptr() != earlier.data_ptr()
        if actual.is_floating_point():
            assert_close(actual, expected, FP32)
        else:
            assert actual.dtype == earlier.dtype
            assert (actual.long() - expected.long()).abs().max() <= (actual.element_size() == 1)


def with_memory(op):
    """Arguments of an op as a decode step passes them, with memory that it need not make itself."""
    arguments = random_inputs(op)
    if op.name in ("gumbel", "lm_head"):
        rows = arguments["logits" if op.name == "gumbel" else "x"].shape[0]
        arguments |= {"scratch": torch.zeros(2 * rows, dtype=torch.int64), "out": torch.empty(rows).long()}
    elif op.name == "router":
        arguments["ticket"] = torch.zeros(1, dtype=torch.int32)
    else:
        rows, heads, _, dim = arguments["q"].shape
        arguments["scratch"] = split_scratch(rows, heads, dim)
    return arguments


@pytest.mark.parametrize("name", ["decode_attention", "gumbel", "lm_head", "router"])
def test_memory_of_a_step_serves_the_short_way(name, asked, monkeypatch):
    op = next(op for op in OPS if op.name == name)
    # several programs share a head, as on a GPU
    default = op.default
    shared = {"SPLITS": 2} if name == "decode_attention" else {}
    module = sys.modules[op.launcher.__module__]
    monkeypatch.setattr(module, "choose", lambda op, key: asked.append(op.name) or default(key) | shared)
    for _ in range(4):
        arguments = with_memory(op)
        memory = {"scratch", "out", "ticket"}
        expected = truth(op.ref, **{n: v for n, v in arguments.items() if n not in memory})
        for actual, right in zip(as_tuple(op.launcher(**arguments)), as_tuple(expected), strict=True):
            if actual.is_floating_point():
                assert_close(actual, right, FP32)
            else:
                assert torch.equal(actual.long(), right.long())
    assert asked == [name] * 2


def operands(seed=0, rows=1, dtype=FP32):
    return make((rows, 40), dtype, seed), make((40, 40), dtype, seed + 1), make((rows, 40), dtype, seed + 2)


def test_which_arguments_are_one_tensor_belongs_to_the_kind(asked):
    x, w, other = operands()
    for residual in (x, other) * 3:
        y = gemv(x, w, residual=residual)
        assert_close(y, truth(gemv_ref, x, w, residual=residual), FP32)
    assert asked == ["gemv"] * 4
    norm, also = Norm(other[0]), Norm(x[0])
    for weights in ((w, w), *[(w, w.clone()) for _ in range(3)], (w, w)):
        for n in (norm, also):
            assert_close(gemv(x, weights, norm=n), truth(gemv_ref, x, weights, norm=n), FP32)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w, r: {"x": make((2, 40), FP32, 3)},
        lambda x, w, r: {"x": x.bfloat16(), "weight": w.bfloat16()},
        lambda x, w, r: {"weight": w.t()},
        lambda x, w, r: {"weight": make((40, 41), FP32, 3)[:, :40]},
        lambda x, w, r: {"weight": (w,)},
        lambda x, w, r: {"weight": (w, make((40, 40), FP32, 4)), "gated": True},
        lambda x, w, r: {"weight": make((40 * 40 + 1,), FP32, 5)[1:].view(40, 40)},
        lambda x, w, r: {"bias": r[0]},
        lambda x, w, r: {"bias": (None,)},
        lambda x, w, r: {"act": "relu"},
        lambda x, w, r: {"scale": 0.5},
        lambda x, w, r: {"residual": r},
        lambda x, w, r: {"norm": Norm(r[0])},
        lambda x, w, r: {"also": (r, w.clone(), None)},
    ],
)
def test_every_difference_makes_a_kind_of_its_own(asked, change):
    x, w, r = operands()
    gemv(x=x, weight=w)
    gemv(x=x, weight=w)
    arguments = {"x": x, "weight": w} | change(x, w, r)
    dtype = arguments["x"].dtype
    for _ in range(3):
        assert_close(gemv(**arguments), truth(gemv_ref, **arguments), dtype)
    assert asked == ["gemv"] * 4
    assert_close(gemv(x=x, weight=w), truth(gemv_ref, x, w), FP32)
    assert asked == ["gemv"] * 4


def test_bad_arguments_are_refused_as_often_as_they_come():
    x, w, _ = operands()
    for _ in range(4):
        gemv(x, w)
        with pytest.raises(ValueError, match="weight has shape"):
            gemv(x, w[:, :30])
        with pytest.raises(ValueError, match="act='sinus'"):
            gemv(x, w, act="sinus")


def test_memory_for_the_result_is_checked_every_time(asked):
    x, w, residual = operands()
    expected = truth(gemv_ref, x, w, residual=residual)
    for _ in range(3):
        out = torch.empty(1, 40)
        assert gemv(x, w, residual=residual, out=out) is out
        assert_close(out, expected, FP32)
    assert asked == ["gemv"] * 2
    for _ in range(3):
        out = residual.clone()
        assert gemv(x, w, residual=out, out=out) is out
        assert_close(out, expected, FP32)
    assert asked == ["gemv"] * 4
    for _ in range(3):
        gemv(x, w, out=torch.empty(1, 40))
    assert asked == ["gemv"] * 6
    memory = make((100,), FP32, 0)
    for begin in (36, 44, 40):
        place = memory.clone()
        with pytest.raises(ValueError, match="out shares memory"):
            gemv(place[40:80].view(1, 40), w, out=place[begin : begin + 40].view(1, 40))
        assert torch.equal(place, memory)
    gemv(x, w, out=torch.empty(1, 40))
    assert asked == ["gemv"] * 6


def test_an_out_of_another_device_is_refused_as_before():
    x, w, _ = operands()
    for _ in range(3):
        gemv(x, w, out=torch.empty(1, 40))
    with pytest.raises(ValueError, match="on meta"):
        gemv(x, w, out=torch.empty(1, 40, device="meta"))


def test_rows_that_reach_into_others_are_refused_every_time(asked):
    weight, memory = torch.ones(40), make((3, 100), FP32, 0)
    for out in (memory[:, :40], torch.empty(3, 40), torch.empty(3, 40), torch.empty(3, 40)):
        before = memory.clone()
        y = rms_norm(memory[:, :40], weight, 1e-5, out=out)
        assert_close(y, truth(rms_norm_ref, before[:, :40], weight, 1e-5), FP32)
    assert asked == ["rms_norm"] * 3
    with pytest.raises(ValueError, match="out shares memory"):
        rms_norm(memory[:, :40], weight, 1e-5, out=memory.view(-1)[16 : 16 + 120].view(3, 40))


def test_the_longer_of_two_tensors_that_begin_together_keeps_its_place():
    # the sanitizer compares what is read with the tensor in that place
    both, w = make((1, 80), FP32, 0), make((80, 40), FP32, 1)
    for _ in range(3):
        y = gemv(both[:, :40], w, residual=both)
        assert_close(y, truth(gemv_ref, both[:, :40], w, residual=both), FP32)


def test_inference_mode_and_parameters(asked):
    x, w, _ = operands()
    with torch.inference_mode():
        for _ in range(3):
            y = gemv(x, torch.nn.Parameter(w))
    assert y.is_inference() and not gemv(x, torch.nn.Parameter(w)).is_inference()
    assert asked == ["gemv"] * 2


def test_numbers_that_are_equal_and_of_other_types_are_other_kinds(asked):
    x, w, _ = operands()
    for scale in (1, 1.0, True, 1, 1.0, True):
        assert_close(gemv(x, w, scale=scale), truth(gemv_ref, x, w), FP32)
    assert asked == ["gemv"] * 6


def test_a_call_under_way_while_choices_are_dropped_leaves_nothing(asked, monkeypatch):
    x, w, _ = operands()
    gemv(x, w)
    module = sys.modules[gemv.__module__]
    monkeypatch.setattr(module, "choose", lambda op, key: (choose(op, key), asked.append("now"), forget())[0])
    gemv(x, w)
    gemv(x, w)
    assert asked == ["gemv", "now", "now"]


def test_choices_count_from_the_moment_they_change(asked):
    x, w, _ = operands()
    gemv(x, w)
    gemv(x, w)
    with pin(GEMV, {"BLOCK_N": 8}):
        gemv(x, w)
        assert asked == ["gemv"] * 3
    gemv(x, w)
    assert asked == ["gemv"] * 3
    forget()
    gemv(x, w)
    assert asked == ["gemv"] * 4


def test_launches_are_listed_with_their_tensors(asked):
    x, w, _ = operands()
    for _ in range(3):
        gemv(x, w)
    with list_launches() as launches:
        gemv(x, w)
    ((name, told),) = launches
    assert name == "gemv"
    assert {t.data_ptr() for t in told if t is not None} >= {x.data_ptr(), w.data_ptr()}


def test_a_recording_keeps_short_launches_too(asked):
    x, w, _ = operands()
    gemv(x, w)
    gemv(x, w)
    with record() as recording:
        y = gemv(x, w)
    assert asked == ["gemv"] * 2
    x.copy_(make((1, 40), FP32, 7))
    recording.replay()
    assert_close(y, truth(gemv_ref, x, w), FP32)


def test_threads_launch_at_once():
    x, w, _ = operands()
    expected, results = truth(gemv_ref, x, w), []
    threads = [
        threading.Thread(target=lambda: results.extend(gemv(x, w) for _ in range(50))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 200
    for y in results:
        assert_close(y, expected, FP32)


class TestWhatIsDoneOnceMore:
    """Launchers that do more than launch are called every time."""

    @pytest.fixture
    def calls(self):
        return []

    def relu_with(self, calls, before=lambda x: None, after=lambda y: None):
        """A launcher of relu that does this before and after its launch."""

        @launcher
        def op(x, *options):
            calls.append(x)
            before(x)
            y = torch.empty_like(x)
            launched("activation")
            config = choose(ACTIVATION, (x.dtype,))
            launch(_activation_kernel, (1,))(x, y, x.numel(), "relu", **config)
            after(y)
            return y

        return op

    @pytest.mark.parametrize(
        "before",
        [
            lambda x: x.sum(),
            lambda x: x[0].item(),
            lambda x: float(x[0]),
            lambda x: x.add_(1),
            lambda x: torch._foreach_add_([x], 1),
            lambda x: bool((x > 0).any()),
            lambda x: relu(x),
            lambda x: torch.zeros(3),
            lambda x: x[::2].contiguous(),
        ],
    )
    def test_what_reads_or_computes(self, calls, before):
        op = self.relu_with(calls, before)
        for seed in range(4):
            x = make((50,), FP32, seed)
            expected = x.clone()
            before(expected)
            assert_close(op(x), expected.relu(), FP32)
        assert len(calls) == 4

    def test_a_copy_that_inference_mode_calls_a_view(self, calls):
        @launcher
        def op(x):
            calls.append(x)
            y = x.contiguous()
            launched("activation")
            launch(_activation_kernel, (1,))(y, y, y.numel(), "relu", **choose(ACTIVATION, (x.dtype,)))
            return y

        with torch.inference_mode():
            for seed in range(4):
                x = make((5, 10), FP32, seed).t()
                assert_close(op(x), x.relu(), FP32)
        assert len(calls) == 4

    def test_what_changes_the_result(self, calls):
        op = self.relu_with(calls, after=lambda y: y.mul_(2))
        for seed in range(4):
            x = make((50,), FP32, seed)
            assert_close(op(x), x.relu() * 2, FP32)
        assert len(calls) == 4

    def test_what_launches_twice_or_never(self, calls):
        for times in (0, 2):

            @launcher
            def op(x, times=times):
                calls.append(x)
                y = x.new_zeros(x.shape) if not times else torch.empty_like(x)
                for _ in range(times):
                    launch(_activation_kernel, (1,))(
                        x, y, x.numel(), "relu", **choose(ACTIVATION, (x.dtype,))
                    )
                return y

            for seed in range(4):
                x = make((50,), FP32, seed)
                assert_close(op(x), x.relu() * min(1, times), FP32)
        assert len(calls) == 8

    def test_memory_that_the_launcher_owns(self, calls):
        own = make((50,), FP32, 9)

        @launcher
        def op(x):
            calls.append(x)
            y = torch.empty_like(x)
            launch(_activation_kernel, (1,))(own, y, x.numel(), "relu", **choose(ACTIVATION, (x.dtype,)))
            return y

        for seed in range(4):
            own = make((50,), FP32, 10 + seed)
            assert_close(op(make((50,), FP32, 0)), own.relu(), FP32)
        assert len(calls) == 4

    def test_options_of_other_kinds(self, calls):
        op = self.relu_with(calls)
        x = make((50,), FP32, 0)
        for option in ([1], {"a": 1}, object(), torch.nn.Linear(1, 1)):
            for _ in range(3):
                assert_close(op(x, option), x.relu(), FP32)
        assert len(calls) == 12

    def test_the_rest_is_not(self, calls):
        op = self.relu_with(calls, before=lambda x: x.view(-1)[None].transpose(0, 1).expand(-1, 3))
        for seed in range(4):
            x = make((50,), FP32, seed)
            assert_close(op(x, 1, "a", None, (1.5, torch.float16)), x.relu(), FP32)
        assert len(calls) == 2

    def test_what_tells_of_no_launch(self, calls):
        @launcher
        def op(x):
            calls.append(x)
            y = torch.empty_like(x)
            launch(_activation_kernel, (1,))(x, y, x.numel(), "relu", **choose(ACTIVATION, (x.dtype,)))
            return y

        for seed in range(3):
            with count_launches() as launches:
                x = make((50,), FP32, seed)
                assert_close(op(x), x.relu(), FP32)
            assert not launches
        assert len(calls) == 2

    def test_a_call_that_fails_leaves_nothing_behind(self, calls):
        def fail(x):
            if x[0] > 0:
                raise RuntimeError("positive")

        op = self.relu_with(calls, before=fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="positive"):
                op(torch.ones(50))
            assert_close(op(-torch.ones(50)), torch.zeros(50), FP32)
        x, w, _ = operands()
        for _ in range(3):
            with count_launches() as launches:
                gemv(x, w)
            assert launches == {"gemv": 1}


def test_kinds_beyond_the_most_that_are_kept_start_anew(asked, monkeypatch):
    monkeypatch.setattr(sys.modules[launcher.__module__], "_MOST_KINDS", 3)
    for n in (1, 2, 3, 3, 3, 4, 3, 3, 3):
        x = make((n,), FP32, n)
        assert_close(relu(x), x.relu(), FP32)
    # with the fourth kind the others are gone, so the third goes the long way twice more
    assert asked == ["activation"] * 7
