"""Launches: grids, arguments, threads, options, what a kernel prints and what it is refused for."""

import ast
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.cpu import processes
from tests.cpu.arrays import normal, poisoned


@triton.jit
def _grid_kernel(y_ptr, BLOCK: tl.constexpr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    X, Y, Z = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    at = (z * Y + y) * X + x
    tl.store(y_ptr + at, x + 10 * y + 100 * z + 1000 * (X + 10 * Y + 100 * Z))


@pytest.mark.parametrize("grid", [(1,), (5,), (3, 4), (2, 3, 4), (1, 1, 7), (7, 1, 1)])
def test_grids(grid):
    X, Y, Z = (*grid, 1, 1)[:3]
    y = poisoned(X * Y * Z, dtype=torch.int32)
    _grid_kernel[grid](y, BLOCK=1)
    z, r, x = torch.meshgrid(torch.arange(Z), torch.arange(Y), torch.arange(X), indexing="ij")
    assert torch.equal(y, (x + 10 * r + 100 * z + 1000 * (X + 10 * Y + 100 * Z)).flatten().int())


@pytest.mark.parametrize("grid", [(0,), (4, 0), (0, 3, 2)])
def test_empty_grids_run_nothing(grid):
    y = poisoned(16, dtype=torch.int32)
    _grid_kernel[grid](y, BLOCK=1)
    assert torch.equal(y, poisoned(16, dtype=torch.int32))


@triton.jit
def _numbers_kernel(y_ptr, none_ptr, flag, small, one, wide, unsigned, real, FLAG: tl.constexpr):
    if none_ptr is None:
        tl.store(y_ptr, flag.to(tl.float64) if not FLAG else 2.0)
    tl.store(y_ptr + 1, small)
    tl.store(y_ptr + 2, one)
    tl.store(y_ptr + 3, wide.to(tl.float64))
    tl.store(y_ptr + 4, unsigned.to(tl.float64))
    tl.store(y_ptr + 5, real)


def test_numbers_as_arguments():
    y = poisoned(6, dtype=torch.float64)
    _numbers_kernel[(1,)](y, None, True, -7, 1, -(1 << 40), (1 << 64) - 1, 0.5, FLAG=False)
    assert y.tolist() == [1.0, -7.0, 1.0, -float(1 << 40), float((1 << 64) - 1), 0.5]
    _numbers_kernel[(1,)](y, None, False, 16, 1, 1 << 33, 1 << 31, -2.5, FLAG=True)
    assert y.tolist() == [2.0, 16.0, 1.0, float(1 << 33), float(1 << 31), -2.5]


@triton.jit
def _mixed_kernel(first, x_ptr, pair, last, y_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr, tl.load(x_ptr) * first + tl.load(pair[0]) * pair[1] + last)


def test_numbers_between_pointers():
    x, z, y = torch.full((1,), 3.0), torch.full((1,), 5.0), poisoned(1)
    _mixed_kernel[(1,)](7, x, (z, 11), 0.25, y, BLOCK=1)
    assert y.tolist() == [3 * 7 + 5 * 11 + 0.25]


def test_addresses_as_arguments():
    x, z, y = torch.full((1,), 3.0), torch.full((1,), 5.0), poisoned(1)
    kernel = _mixed_kernel[(1,)](7, x, (z, 11), 0.25, y, BLOCK=1)
    kernel[(1, 1, 1)](2, x.data_ptr(), (z.data_ptr(), 4), 0.5, y, 1)
    assert y.tolist() == [3 * 2 + 5 * 4 + 0.5]


@triton.jit
def _rows_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    pid_m = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + pid_m * N + offs_n, mask=offs_n < N, other=float("-inf"))
    y = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + pid_m * N + offs_n, y / tl.sum(y, 0), mask=offs_n < N)


def test_one_and_two_threads_give_the_same_bits():
    x, before = normal(67, 300), torch.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        y = poisoned(67, 300)
        _rows_kernel[(67,)](x, y, 300, BLOCK_N=512)
        results.append(y)
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_launches_from_several_python_threads():
    x = [normal(40, 100, seed=seed) for seed in range(8)]
    y = [poisoned(40, 100) for _ in range(8)]

    def work(k: int) -> None:
        for _ in range(20):
            # kernels of their own, compiled while the others run
            _rows_kernel[(40,)](x[k], y[k], 100, BLOCK_N=128 << (k % 3))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for source, result in zip(x, y, strict=True):
        torch.testing.assert_close(result, source.softmax(1))


def test_kernels_are_parsed_in_one_thread_at_a_time(monkeypatch):
    parsing, most = [], []

    def parse(text):
        parsing.append(text)
        most.append(len(parsing))
        time.sleep(0.01)
        parsing.pop()
        return ast.parse(text)

    monkeypatch.setattr(triton.runtime.jit, "ast", SimpleNamespace(**(vars(ast) | {"parse": parse})))
    threads = [threading.Thread(target=_rows_kernel.parse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


@triton.jit
def _fused_kernel(a_ptr, b_ptr, c_ptr, y_ptr, N: tl.constexpr):
    offs_n = tl.arange(0, N)
    a, b, c = tl.load(a_ptr + offs_n), tl.load(b_ptr + offs_n), tl.load(c_ptr + offs_n)
    tl.store(y_ptr + offs_n, a * b + c)
    tl.store(y_ptr + N + offs_n, tl.fma(a, b, c))


def test_enable_fp_fusion():
    a, b = normal(256), normal(256, seed=1)
    # what the product loses by rounding
    c = -(a * b)
    rest = (a.double() * b.double() + c.double()).float()
    y = poisoned(2, 256)
    _fused_kernel[(1,)](a, b, c, y, N=256, enable_fp_fusion=False)
    assert torch.equal(y[0], torch.zeros(256)) and torch.equal(y[1], rest)
    _fused_kernel[(1,)](a, b, c, y, N=256, enable_fp_fusion=True)
    assert torch.equal(y[1], rest)


@triton.jit
def _print_kernel(x_ptr, N: tl.constexpr):
    pid = tl.program_id(0)
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.device_print('100% "sure"', pid)
    tl.device_print("x", x, x.to(tl.int32) - 3)
    tl.device_print("none")
    tl.device_print("unsigned", (x.to(tl.int32) - 3).to(tl.uint32))
    tl.device_print("bits", x.to(tl.int32) + 254, hex=True)


def test_device_print(capfd):
    _print_kernel[(1,)](torch.tensor([1.5, 2.0]), N=2)
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == 'pid (0, 0, 0) 100% "sure": 0'
    assert lines[1:5] == [f"pid (0, 0, 0) x: {value}" for value in ("1.5", "2", "-2", "-1")]
    assert lines[5].rstrip() == "pid (0, 0, 0) none"
    assert [line.split(": ")[1] for line in lines[6:8]] == ["4294967294", "4294967295"]
    assert [line.split(": ")[1] for line in lines[8:]] == ["0x000000ff", "0x00000100"]


ASSERTS = """
import torch, triton, triton.language as tl
from trinfer import backend
backend.kind()

@triton.jit
def _assert_kernel(x_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.device_assert(x < 3, 'not "below" 3%')

_assert_kernel[(1,)](torch.zeros(4), N=4, debug=True)
_assert_kernel[(1,)](torch.full((4,), 7.0), N=4)
print("passed", flush=True)
_assert_kernel[(1,)](torch.full((4,), 7.0), N=4, debug=True)
"""


def test_device_assert(tmp_path):
    path = tmp_path / "asserts.py"
    path.write_text(processes.ROOMS + ASSERTS)
    line = 1 + path.read_text().splitlines().index(
        next(s for s in ASSERTS.splitlines() if "device_assert" in s)
    )
    process = processes.start(path)
    out, err = process.communicate()
    assert out == "passed\n" and process.returncode != 0
    assert "kernel _assert_kernel" in err and f"asserts.py:{line}" in err and 'not "below" 3%' in err


@triton.jit
def _inline_assembly_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs_n = tl.arange(0, N)
    x = tl.load(x_ptr + offs_n)
    y = tl.inline_asm_elementwise("add.f32 $0, $1, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y_ptr + offs_n, y)


@triton.jit
def _scaled(x):
    return tl.inline_asm_elementwise("neg.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _outer_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs_n = tl.arange(0, N)
    for n in range(3):
        tl.store(y_ptr + offs_n + n, _scaled(tl.load(x_ptr + offs_n)))


def line_of(function: triton.JITFunction, text: str) -> int:
    lines, first = function.raw_src, function.starting_line_number
    return first + next(k for k, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("kernel", "where", "text"),
    [
        (_inline_assembly_kernel, _inline_assembly_kernel, "inline_asm"),
        (_outer_kernel, _scaled, "inline_asm"),
    ],
)
def test_unsupported_ops_are_named_with_kernel_and_line(kernel, where, text):
    from trinfer.cpu.emit import UnsupportedOpError

    with pytest.raises(UnsupportedOpError) as error:
        kernel[(1,)](normal(16), poisoned(16), N=16)
    message = str(error.value)
    assert "tt.elementwise_inline_asm" in message and kernel.__name__ in message
    assert f"test_launch.py:{line_of(where, text)}:" in message
    assert isinstance(error.value, NotImplementedError)


@triton.jit
def _host_descriptor_kernel(x, y_ptr, N: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, N), tl.reshape(x.load([0, 0]), (N,)))


def test_descriptors_made_on_the_host_are_refused():
    x = TensorDescriptor(normal(16, 16), [16, 16], [16, 1], [1, 16])
    with pytest.raises(
        NotImplementedError, match=r"tensordesc<.*> is not supported .*make_tensor_descriptor"
    ):
        _host_descriptor_kernel[(1,)](x, poisoned(16), N=16)


@triton.jit
def _large_kernel(x_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offs).to(tl.float64)
    tl.store(y_ptr + offs, x - tl.sum(x, 1)[:, None])


def test_tiles_that_do_not_fit_on_the_stack():
    with pytest.raises(ValueError, match=r"kernel _large_kernel: .* stack .* smaller block sizes"):
        _large_kernel[(1,)](normal(4), normal(4), M=1024, N=1024)


@triton.jit
def _readable_kernel(logits_ptr, weights_ptr, stride_row, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_N)
    inside = columns < N
    logits = tl.load(logits_ptr + row * stride_row + columns, mask=inside, other=float("-inf"))
    largest = tl.max(logits, 0)
    numerator = tl.exp(logits - largest)
    denominator = tl.sum(numerator, 0)
    tl.store(weights_ptr + row * stride_row + columns, numerator / denominator, mask=inside)


def test_the_emitted_code_has_the_names_of_the_source():
    x, y = normal(4, 50), poisoned(4, 50)
    compiled = _readable_kernel[(4,)](x, y, 50, 50, BLOCK_N=64)
    code = compiled.asm["c"]
    names = ["logits_ptr", "weights_ptr", "stride_row", "N", "logits", "largest", "numerator", "denominator"]
    assert [name for name in names if name not in code] == []
    assert code.startswith("/* _readable_kernel, ") and "test_launch.py:" in code.splitlines()[0]
    assert len(code.splitlines()) < 80
