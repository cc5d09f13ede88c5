"""Checked launches (TRINFER_CPU_CHECK=1): what a sanitizer finds on a GPU, found on every launch on a CPU.

Reported with the kernel, the argument and the source line: an access outside of an argument or between its
elements, one program reading what another writes, two programs writing different values to one element,
atomic updates mixed with other accesses, and elements of an output that no program wrote.
An output is an argument that the kernel only stores to; arguments named `*cache*` may be written in part.
"""

import ctypes
import functools
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from trinfer.cpu.runtime import shared_library

_KINDS = ("OUTSIDE", "BETWEEN", "RACE")
_DID = ("reads", "writes", "updates")
_MOST, _MOST_DIMS = 8, 8
_SHADOW = 36
"""Bytes of the shadow of one element: `struct element` in check.c."""
_one_at_a_time = threading.Lock()


def is_checking() -> bool:
    """True if kernels of this process are compiled with checks."""
    return os.environ.get("TRINFER_CPU_CHECK") == "1"


class CheckError(RuntimeError):
    """A kernel did what is not allowed on some GPU; the message says what, where, and between which
    programs."""


class _Site(ctypes.Structure):
    _fields_ = [
        ("argument", ctypes.c_char_p),
        ("line", ctypes.c_char_p),
        ("args", ctypes.c_uint64),
        ("bytes", ctypes.c_int),
        ("site", ctypes.c_int),
        ("is_anywhere", ctypes.c_int),
    ]


class _Range(ctypes.Structure):
    _fields_ = [
        ("begin", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("dims", ctypes.c_int64),
        ("run", ctypes.c_int64),
        ("size", ctypes.c_int64 * _MOST_DIMS),
        ("stride", ctypes.c_int64 * _MOST_DIMS),
    ]


class _Region(ctypes.Structure):
    _fields_ = [
        ("begin", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("granule", ctypes.c_int64),
        ("elements", ctypes.c_void_p),
    ]


class _Fault(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("argument", ctypes.c_int32),
        ("did", ctypes.c_int32),
        ("other_did", ctypes.c_int32),
        ("program", ctypes.c_int64),
        ("other", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("site", ctypes.POINTER(_Site)),
        ("other_site", ctypes.POINTER(_Site)),
    ]


@functools.cache
def check_library() -> ctypes.CDLL:
    """The compiled check.c."""
    loaded = shared_library("check", ctypes.RTLD_GLOBAL)
    loaded.t_check_end.restype = loaded.t_check_unwritten.restype = ctypes.c_int64
    return loaded


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last of the elements of a view."""
    begin, size = tensor.data_ptr(), tensor.element_size()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * size


def _range(pointer: Any) -> _Range:
    """Where the elements behind an argument lie: a tensor's, anywhere for an address, nowhere for None."""
    if not isinstance(pointer, torch.Tensor):
        return _Range(0, (1 << 64) - 1) if pointer else _Range(0, 0)
    made, run = _Range(*_extent(pointer)), pointer.element_size()
    rows: list[tuple[int, int]] = []
    for stride, size in sorted(zip(pointer.stride(), pointer.shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        step = stride * pointer.element_size()
        if step < (rows[-1][0] * rows[-1][1] if rows else run):
            # elements lie over each other, or rows inside each other: nothing is certain to be a gap
            return made
        if rows or step > run:
            rows.append((step, size))
        else:
            run *= size
    if len(rows) <= _MOST_DIMS:
        made.dims, made.run = len(rows), run
        for d, (step, size) in enumerate(reversed(rows)):
            made.stride[d], made.size[d] = step, size
    return made


def _regions(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Memory of the arguments as separate (begin, end, bytes of the smallest element)."""
    merged: list[tuple[int, int, int]] = []
    for begin, end, size in sorted((*_extent(t), t.element_size()) for t in tensors if t.numel()):
        if merged and begin < merged[-1][1]:
            first, last, granule = merged.pop()
            merged.append((first, max(last, end), min(granule, size)))
        else:
            merged.append((begin, end, size))
    return merged


def checked_launch(launch: Any, metadata: Any, task: bytes, programs: int, pointers: Sequence[Any]) -> None:
    """Run a grid program by program (a `task` for one thread) and raise what the checks found.

    `pointers` has an entry for each argument of the emitted kernel: the tensor of a pointer, else None.

    Raises:
        CheckError: the kernel broke a rule.
    """
    lib = check_library()
    ranges = (_Range * len(pointers))(*map(_range, pointers))
    regions = [_Region(*r) for r in _regions([p for p in pointers if isinstance(p, torch.Tensor)])]
    memory = (_Region * max(len(regions), 1))(*regions)
    faults = (_Fault * _MOST)()
    # check.c knows one launch at a time
    with _one_at_a_time:
        try:
            if not lib.t_check_begin(ranges, len(ranges), memory, len(regions), ctypes.c_int64(programs)):
                raise MemoryError(
                    f"kernel {metadata.name}: TRINFER_CPU_CHECK=1 needs {_SHADOW} bytes of addresses for "
                    "each element of its arguments; raise the limit (ulimit -v), or unset the variable here"
                )
            launch(task)
            outputs = [(name, line, pointers[k]) for k, name, line in metadata.outputs]
            unwritten = [_unwritten(lib, metadata.name, *output) for output in outputs]
        finally:
            count = lib.t_check_end(faults, _MOST)
    found = [_describe(metadata.name, f, pointers) for f in faults[: min(count, _MOST)]]
    found += [text for text in unwritten if text]
    if found:
        raise CheckError("\n".join(found))


def _unwritten(lib: ctypes.CDLL, kernel: str, name: str, line: str, tensor: Any) -> str | None:
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
        return None
    # no tensors: a check is not to be seen by what watches the ops of a model
    shape = ctypes.c_int64 * tensor.dim()
    first = shape()
    missing = lib.t_check_unwritten(
        ctypes.c_void_p(tensor.data_ptr()),
        ctypes.c_int64(tensor.dim()),
        shape(*tensor.shape),
        shape(*(stride * tensor.element_size() for stride in tensor.stride())),
        first,
    )
    if not missing:
        return None
    return (
        f"kernel {kernel}, {line}: no program writes {missing} elements of {name}, the first at {list(first)}"
    )


def _describe(kernel: str, fault: _Fault, pointers: Sequence[Any]) -> str:
    site = fault.site.contents
    # one name for each argument that the site may reach
    names, before = site.argument.decode().split(" or "), site.args & ((1 << max(0, fault.argument)) - 1)
    name = names[before.bit_count()] if fault.argument >= 0 else " or ".join(names)
    start = f"kernel {kernel}, {site.line.decode()}: program {fault.program}"
    tensor = pointers[fault.argument] if fault.argument >= 0 else None
    size = tensor.element_size() if isinstance(tensor, torch.Tensor) else site.bytes
    element = fault.offset // size
    did = f"{start} {_DID[fault.did]} element {element} of {name}"
    if _KINDS[fault.kind] == "OUTSIDE":
        begin, end = _extent(tensor) if isinstance(tensor, torch.Tensor) else (0, 0)
        return f"{did}, which has elements 0 to {(end - begin) // size - 1}"
    if _KINDS[fault.kind] == "BETWEEN":
        assert tensor is not None
        return f"{did}, a gap in its shape {tuple(tensor.shape)} with strides {tensor.stride()}"
    other = f"program {fault.other}" if fault.other >= 0 else "several programs"
    where = f" at {fault.other_site.contents.line.decode()}" if fault.other_site else ""
    verb = _DID[fault.other_did] if fault.other >= 0 else _DID[fault.other_did][:-1]
    if fault.did == fault.other_did:
        verb = "sets to another value"
    return f"{did}, which {other} {verb}{where}; no acquire-release atomic orders them"
