"""A Triton backend for CPUs in pure Python: TTIR -> readable C -> cc -> shared object.

It knows Triton and torch's threads, nothing of trinfer. `activate()` registers it with the running
process; from then
on every `@triton.jit` kernel that is launched on CPU tensors runs compiled.

    ttir.py       the printed TTIR as objects
    plan.py       which tiles become arrays, which are computed where they are used
    affine.py     index arithmetic as polynomials: contiguity, loop bounds from masks
    scalar.py     elementwise ops as C expressions
    loop.py       C loops;  nest.py  loop nests over a tile;  fold.py  what needs no computing in them
    emit.py       the kernel: control.py, memory.py, reduce.py, dot.py write their ops
    prelude.h     what the emitted C is made of;  tiles.h, tiles.c  products of tiles
    check.py      the sanitizer (TRINFER_CPU_CHECK=1): check.c in the runtime, check.h and sites.py in
    the kernels
    build.py      the C compiler;  compiler.py  the stages
    driver.py     the launch;  record.py  launches kept and replayed by one call
    runtime.py    what kernels share: runtime.c, which runs launches on torch's threads, and tiles.c
"""

import os

from trinfer.cpu.build import NO_COMPILER, compile_listeners, features, find_compiler, version

__all__ = ["NO_COMPILER", "activate", "compile_listeners", "features", "find_compiler", "version"]


def activate() -> None:
    """Make `cpu` the active Triton backend of this process. Not for machines with a GPU driver.

    Raises:
        ImportError: Triton is not installed.
    """
    # triton 3.9 announces that the default flips; kernels here want multiply-adds contracted in every version
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    # imported here because the rest of trinfer has to import without Triton
    import triton
    from triton.backends import Backend, backends

    from trinfer.cpu.compiler import CPUBackend, parse_one_at_a_time
    from trinfer.cpu.driver import CPUDriver

    backends["cpu"] = Backend(CPUBackend, CPUDriver)
    triton.runtime.driver.set_active(CPUDriver())
    parse_one_at_a_time()
