"""The C compiler of the host."""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

compile_listeners: list[Callable[[str], None]] = []
"""Called with the name of a kernel when its C compilation starts; nothing is called for a cached kernel."""

NO_COMPILER = (
    "no C compiler works here (tried $CC, cc, gcc, clang); install one with its headers, e.g. "
    "apt-get install gcc libc6-dev, or set CC=/path/to/cc"
)

_HERE = Path(__file__).parent
_FLAGS = (
    *("-O3", "-march=native", "-fPIC", "-shared", "-fopenmp-simd", "-ffp-contract=fast"),
    # a kernel may read the bytes of a tensor as another type
    "-fno-strict-aliasing",
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fno-semantic-interposition"),
    *("-Wno-psabi", "-Wno-unknown-pragmas", "-Werror=implicit-function-declaration"),
)


@functools.cache
def find_compiler() -> str | None:
    """The C compiler: the first of $CC, cc, gcc and clang that makes a library; None if none does."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    present = (name for name in names if name and shutil.which(shlex.split(name)[0]))
    # a compiler without headers or linker is as good as none
    return next((name for name in present if _compile(name, '#include "prelude.h"', "probe")[0]), None)


@functools.cache
def features() -> tuple[str, ...]:
    """The vector extensions of this CPU that change what a kernel compiles to."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "sve")
    found = [f for f in known if re.search(rf"\b{f}\b", text)]
    return tuple(f for f in found if f != "amx_bf16" or _may_use_tiles())


def _may_use_tiles() -> bool:
    """Ask Linux for the tile registers of AMX, which a process has to do once before it uses them."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def _flags() -> list[str]:
    # gcc halves its vectors on Intel CPUs for the sake of old ones that lowered their clock
    wide = ["-mprefer-vector-width=512"] if "avx512f" in features() else []
    no_tiles = ["-mno-amx-bf16"] if platform.machine() == "x86_64" and "amx_bf16" not in features() else []
    return [*_FLAGS, *wide, *no_tiles]


@functools.cache
def version() -> str:
    """Changes with everything that changes the machine code: this folder, the compiler, the CPU."""
    digest = hashlib.sha256()
    for path in sorted(_HERE.glob("*.*")):
        digest.update(path.read_bytes())
    cc = find_compiler()
    banner = _run(cc, "--version").stdout if cc else ""
    digest.update("\n".join([cc or "", banner, *_flags(), platform.machine(), *features()]).encode())
    return digest.hexdigest()


def build(source: str, name: str, flags: Sequence[str] = ()) -> bytes:
    """Compile C to a shared object.

    Raises:
        RuntimeError: the compiler is missing or refuses the source; carries its message.
    """
    cc = find_compiler()
    if cc is None:
        raise RuntimeError(NO_COMPILER)
    binary, message = _compile(cc, source, name, flags)
    if not binary:
        raise RuntimeError(f"{cc} cannot compile kernel {name}:\n{message[:4000]}")
    return binary


def _compile(cc: str, source: str, name: str, flags: Sequence[str] = ()) -> tuple[bytes, str]:
    """The shared object (empty if there is none), and what the compiler says."""
    with tempfile.TemporaryDirectory() as folder:
        text, binary = Path(folder, f"{name[:100]}.c"), Path(folder, "out.so")
        text.write_text(source)
        files = [f"-I{_HERE}", str(text), "-o", str(binary), "-lm"]
        try:
            done = _run(cc, *_flags(), *flags, *files)
        except OSError as error:
            return b"", str(error)
        is_made = done.returncode == 0 and binary.exists()
        return binary.read_bytes() if is_made else b"", done.stderr or f"exit status {done.returncode}"


def _run(cc: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*shlex.split(cc), *arguments], capture_output=True, text=True, check=False)
