"""The compiled C that kernels share: runtime.c runs launches on torch's threads, tiles.c multiplies tiles."""

import ctypes
import functools
from pathlib import Path

import torch

from trinfer.cpu.build import build, version


@functools.cache
def runtime() -> ctypes.CDLL:
    """The compiled `runtime.c`, and `tiles.c` for the kernels.

    Its OpenMP calls bind to the library that torch has loaded: one pool of threads.
    """
    _load_openmp()
    shared_library("tiles", ctypes.RTLD_GLOBAL)
    library = shared_library("runtime")
    library.launch.argtypes = [ctypes.c_char_p]
    library.launch.restype = None
    library.replay.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    library.replay.restype = None
    return library


def shared_library(name: str, mode: int = ctypes.RTLD_LOCAL) -> ctypes.CDLL:
    """A source file of this folder, compiled once; RTLD_GLOBAL lets the kernels loaded after it call it."""
    from triton.runtime.cache import get_cache_manager

    cache = get_cache_manager(version())
    path = cache.get_file(f"{name}.so")
    if path is None:
        source = Path(__file__).with_name(f"{name}.c").read_text()
        path = cache.put(build(source, name), f"{name}.so", binary=True)
    return ctypes.CDLL(path, mode=mode)


def _load_openmp() -> None:
    """Make the OpenMP runtime of torch (in its wheel, or the system's) visible to libraries loaded later."""
    torch_folder = Path(torch.__file__).parent
    bundled = [*torch_folder.glob("lib/libgomp*"), *torch_folder.parent.glob("torch.libs/libgomp*")]
    for path in sorted(map(str, bundled)) or ["libgomp.so.1"]:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
