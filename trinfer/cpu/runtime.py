"""The compiled `runtime.c`, which runs launches on torch's threads."""

import ctypes
import functools
from pathlib import Path

import torch

from trinfer.cpu.build import build, version


@functools.cache
def runtime() -> ctypes.CDLL:
    """The compiled `runtime.c`; its OpenMP calls bind to the library that torch has loaded: one pool of
    threads."""
    from triton.runtime.cache import get_cache_manager

    cache = get_cache_manager(version())
    path = cache.get_file("runtime.so")
    if path is None:
        source = Path(__file__).with_name("runtime.c").read_text()
        path = cache.put(build(source, "runtime"), "runtime.so", binary=True)
    _load_openmp()
    library = ctypes.CDLL(path)
    library.launch.argtypes = [ctypes.c_char_p]
    library.launch.restype = None
    library.replay.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    library.replay.restype = None
    return library


def _load_openmp() -> None:
    """Make the OpenMP runtime of torch (in its wheel, or the system's) visible to libraries loaded later."""
    torch_folder = Path(torch.__file__).parent
    bundled = [*torch_folder.glob("lib/libgomp*"), *torch_folder.parent.glob("torch.libs/libgomp*")]
    for path in sorted(map(str, bundled)) or ["libgomp.so.1"]:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
