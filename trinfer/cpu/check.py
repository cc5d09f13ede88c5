"""Checked launches (TRINFER_CPU_CHECK=1): what a sanitizer finds on a GPU, found on every launch on a CPU.

Reported with the kernel, the argument and the source line: an access outside of an argument, one program
reading what
another writes, two programs writing different values to one element, and elements of an output that no
program wrote.
An output is an argument that the kernel only stores to; arguments named `*cache*` may be written in part.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trinfer.cpu.build import build, version

_KINDS = ("OUTSIDE", "READ_OF_WRITTEN", "WRITE_OF_READ", "WRITE_OF_WRITTEN")
_MOST = 8


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
    ]


class _Range(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_void_p), ("end", ctypes.c_void_p)]


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
        ("program", ctypes.c_int64),
        ("other", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("site", ctypes.POINTER(_Site)),
        ("other_site", ctypes.POINTER(_Site)),
    ]


@functools.cache
def check_library() -> ctypes.CDLL:
    """The compiled check.c, visible to the kernels loaded after it."""
    from triton.runtime.cache import get_cache_manager

    cache = get_cache_manager(version())
    path = cache.get_file("check.so")
    if path is None:
        source = Path(__file__).with_name("check.c").read_text()
        path = cache.put(build(source, "check"), "check.so", binary=True)
    loaded = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    loaded.t_check_end.restype = ctypes.c_int64
    return loaded


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last of the elements of a view."""
    begin, size = tensor.data_ptr(), tensor.element_size()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * size


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


def checked_launch(
    launch: Any, function: int, metadata: Any, packed: bytes, programs: int, pointers: Sequence[Any]
) -> None:
    """Run a grid program by program and raise what the checks found.

    `pointers` has an entry for each argument of the emitted kernel: the tensor of a pointer, else None.

    Raises:
        CheckError: the kernel broke a rule.
    """
    lib = check_library()
    tensors = [p for p in pointers if isinstance(p, torch.Tensor)]
    extents = [
        _extent(p) if isinstance(p, torch.Tensor) else (0, (1 << 64) - 1) if p else (0, 0) for p in pointers
    ]
    ranges = (_Range * len(extents))(*(_Range(*e) for e in extents))
    regions = [_Region(*r) for r in _regions(tensors)]
    lib.t_check_begin(
        ranges,
        len(extents),
        (_Region * max(len(regions), 1))(*regions),
        len(regions),
        ctypes.c_int64(programs),
    )
    faults = (_Fault * _MOST)()
    try:
        launch(function, packed, programs, 1)
        unwritten = [
            _unwritten(lib, metadata.name, name, line, pointers[k]) for k, name, line in metadata.outputs
        ]
    finally:
        count = lib.t_check_end(faults, _MOST)
    found = [_describe(metadata.name, f, pointers) for f in faults[: min(count, _MOST)]]
    found += [text for text in unwritten if text]
    if found:
        raise CheckError("\n".join(found))


def _unwritten(lib: ctypes.CDLL, kernel: str, name: str, line: str, tensor: Any) -> str | None:
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
        return None
    begin, end = _extent(tensor)
    size = tensor.element_size()
    written = torch.zeros((end - begin) // size, dtype=torch.uint8)
    lib.t_check_written(
        ctypes.c_void_p(begin),
        ctypes.c_int64(len(written)),
        ctypes.c_int64(size),
        ctypes.c_void_p(written.data_ptr()),
    )
    missing = (written.as_strided(tensor.shape, tensor.stride()) == 0).nonzero()
    if not len(missing):
        return None
    first = missing[0].tolist()
    return (
        f"kernel {kernel}, {line}: no program writes {len(missing)} elements of {name}, the first at {first}"
    )


def _describe(kernel: str, fault: _Fault, pointers: Sequence[Any]) -> str:
    site = fault.site.contents
    name = site.argument.decode()
    start = f"kernel {kernel}, {site.line.decode()}: program {fault.program}"
    tensor = pointers[fault.argument] if fault.argument >= 0 else None
    size = tensor.element_size() if isinstance(tensor, torch.Tensor) else site.bytes
    element = fault.offset // size
    if _KINDS[fault.kind] == "OUTSIDE":
        begin, end = _extent(tensor) if isinstance(tensor, torch.Tensor) else (0, 0)
        last = (end - begin) // size - 1
        return f"{start} accesses element {element} of {name}, which has elements 0 to {last}"
    other = f"program {fault.other}" if fault.other >= 0 else "several programs"
    where = f" at {fault.other_site.contents.line.decode()}" if fault.other_site else ""
    what = {
        "READ_OF_WRITTEN": f"reads element {element} of {name}, which {other} writes{where}",
        "WRITE_OF_READ": f"writes element {element} of {name}, which {other} reads{where}",
        "WRITE_OF_WRITTEN": f"writes element {element} of {name}, which {other} sets to another value{where}",
    }
    return f"{start} {what[_KINDS[fault.kind]]}; no acquire-release atomic orders them"
