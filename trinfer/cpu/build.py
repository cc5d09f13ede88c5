"""The C compiler of the host."""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

compile_listeners: list[Callable[[str], None]] = []
"""Called with the name of a kernel when its C compilation starts; nothing is called for a cached kernel."""

_HERE = Path(__file__).parent
_FLAGS = (
    *("-O3", "-march=native", "-fPIC", "-shared", "-fopenmp-simd", "-ffp-contract=fast"),
    # a kernel may read the bytes of a tensor as another type
    "-fno-strict-aliasing",
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fno-semantic-interposition"),
    *("-Wno-psabi", "-Wno-unknown-pragmas", "-Werror=implicit-function-declaration"),
)


def find_compiler() -> str | None:
    """The C compiler: $CC, cc, gcc or clang, whichever is found first; None if there is none."""
    wanted = os.environ.get("CC")
    return next(
        (path for name in (wanted, "cc", "gcc", "clang") if name and (path := shutil.which(name))), None
    )


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
    banner = (
        subprocess.run([cc, "--version"], capture_output=True, text=True, check=False).stdout if cc else ""
    )
    digest.update("\n".join([cc or "", banner, *_flags(), platform.machine(), *features()]).encode())
    return digest.hexdigest()


def build(source: str, name: str, flags: list[str] | None = None) -> bytes:
    """Compile C to a shared object.

    Raises:
        RuntimeError: the compiler is missing or refuses the source; carries its message.
    """
    cc = find_compiler()
    if cc is None:
        raise RuntimeError(
            "no C compiler was found (looked at $CC, cc, gcc, clang); install one, e.g. apt-get install gcc"
        )
    with tempfile.TemporaryDirectory() as folder:
        text, binary = Path(folder, f"{name[:100]}.c"), Path(folder, "out.so")
        text.write_text(source)
        command = [cc, *_flags(), *(flags or []), f"-I{_HERE}", str(text), "-o", str(binary), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{cc} cannot compile kernel {name}:\n{done.stderr[:4000]}")
        return binary.read_bytes()
