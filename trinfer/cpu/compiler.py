"""The Triton backend `cpu`: TTIR -> C -> shared object, in three stages that Triton caches like any other."""

import functools
import hashlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton._C.libtriton import ir, passes
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.runtime.jit import JITFunction

from trinfer.cpu import libdevice
from trinfer.cpu.build import build, compile_listeners, version
from trinfer.cpu.check import is_checking
from trinfer.cpu.emit import to_c
from trinfer.cpu.ttir import parse


@dataclass(frozen=True)
class CPUOptions:
    """Launch options; those that steer a GPU are accepted, so that one launcher serves both.

    Only `enable_fp_fusion` and `debug` change anything here; products of tiles are contracted in any case.
    """

    num_warps: int = 1
    num_ctas: int = 1
    num_stages: int = 1
    warp_size: int = 1
    maxnreg: int | None = None
    enable_fp_fusion: bool = True
    launch_cooperative_grid: bool = False
    launch_pdl: bool = False
    supported_fp8_dtypes: tuple[str, ...] = ("fp8e5", "fp8e4nv")
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"
    allowed_dot_input_precisions: tuple[str, ...] = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
    max_num_imprecise_acc_default: int = 0
    extern_libs: tuple[tuple[str, str], ...] = ()
    debug: bool = False
    backend_name: str = "cpu"
    sanitize_overflow: bool = False
    arch: str = "native"
    instrumentation_mode: str = ""
    fpsan_homomorphic_casts: bool = False
    ir_override: str | None = None

    def hash(self) -> str:
        """Part of Triton's cache key."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def _to_ttir(module: Any, metadata: dict[str, Any]) -> Any:
    """Triton's own target-independent passes."""
    manager = ir.pass_manager(module.context)
    manager.enable_debug()
    passes.common.add_inliner(manager)
    passes.ttir.add_rewrite_tensor_descriptor_to_pointer(manager)
    passes.common.add_canonicalizer(manager)
    passes.ttir.add_combine(manager)
    passes.ttir.add_reorder_broadcast(manager)
    passes.common.add_cse(manager)
    passes.common.add_symbol_dce(manager)
    passes.ttir.add_loop_unroll(manager)
    passes.common.add_licm(manager)
    manager.run(module, "make_ttir")
    return module


_recursion_lock = threading.Lock()


@contextmanager
def _deep_expressions() -> Iterator[None]:
    """An unrolled loop makes expressions of thousands of nested ops, which the emitter follows
    recursively."""
    with _recursion_lock:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, 20_000))
        try:
            yield
        finally:
            sys.setrecursionlimit(limit)


def _to_c(module: Any, metadata: dict[str, Any]) -> str:
    function = parse(str(module))
    with _deep_expressions():
        source, outputs = to_c(function, is_checking())
    metadata.update(
        name=function.name,
        outputs=outputs,
        shared=0,
        tmem_size=None,
        global_scratch_size=0,
        global_scratch_align=1,
        profile_scratch_size=0,
        profile_scratch_align=1,
    )
    return source


def _to_so(source: str, metadata: dict[str, Any]) -> bytes:
    for listener in compile_listeners:
        listener(metadata["name"])
    return build(source, metadata["name"], [] if metadata["enable_fp_fusion"] else ["-ffp-contract=off"])


_parser_lock = threading.RLock()


def parse_one_at_a_time() -> None:
    """Let Triton parse kernels in one thread at a time.

    Python 3.11 keeps the depth of the tree that it builds for all threads together, and fails in one
    ("AST constructor recursion depth mismatch") when another parses meanwhile.
    """
    if hasattr(JITFunction.parse, "__wrapped__"):
        return
    parse = JITFunction.parse

    @functools.wraps(parse)
    def locked(kernel: Any) -> Any:
        with _parser_lock:
            return parse(kernel)

    JITFunction.parse = locked


class CPUBackend(BaseBackend):
    """What Triton asks of a backend."""

    binary_ext = "so"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return f"cpu-{'checked-' if is_checking() else ''}{version()}"

    def parse_options(self, options: dict[str, Any]) -> CPUOptions:
        known = CPUOptions.__dataclass_fields__
        return CPUOptions(**{k: v for k, v in options.items() if k in known and v is not None})

    def pack_metadata(self, metadata: Any) -> tuple[()]:
        return ()

    def get_codegen_implementation(self, options: CPUOptions) -> dict[str, Any]:
        return {"min_dot_size": lambda a, b: (1, 1, 1)}

    def get_module_map(self) -> dict[str, Any]:
        return {"triton.language.extra.libdevice": libdevice}

    def load_dialects(self, context: Any) -> None:
        """All dialects of TTIR are loaded by Triton."""

    def add_stages(self, stages: dict[str, Any], options: CPUOptions, language: Any = None) -> None:
        stages["ttir"] = _to_ttir
        stages["c"] = _to_c
        stages["so"] = _to_so
