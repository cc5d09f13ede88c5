"""A NumPy stand-in for `triton.language`: the source of a kernel runs on it as plain Python.

Tiles are arrays, pointers are a flat array with positions in it. Types of 16 bits are float32 here, which is
the same for numbers that are exact in both.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


class Pointer:
    """A position, or a tile of positions, in a flat array."""

    def __init__(self, memory: np.ndarray, at: Any = 0) -> None:
        self.memory = memory
        self.at = np.asarray(at, np.int64)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.at + offset)

    def inside(self, mask: Any) -> np.ndarray:
        """Which lanes are active; active ones have to lie in the array."""
        active = np.broadcast_to(True if mask is None else mask, self.at.shape)
        assert ((self.at >= 0) & (self.at < len(self.memory)))[active].all(), "access outside its array"
        return active


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> np.ndarray:
    active = pointer.inside(mask)
    values = pointer.memory[np.where(active, pointer.at, 0)]
    return np.where(active, values, np.asarray(other, values.dtype)).astype(values.dtype)[()]


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    active = pointer.inside(mask)
    values = np.broadcast_to(np.asarray(value, pointer.memory.dtype), pointer.at.shape)
    pointer.memory[pointer.at[active]] = values[active]


def atomic_add(pointer: Pointer, value: Any, mask: Any = None) -> None:
    active = pointer.inside(mask)
    values = np.broadcast_to(np.asarray(value, pointer.memory.dtype), pointer.at.shape)
    np.add.at(pointer.memory, pointer.at[active], values[active])


def _fold(function: np.ufunc) -> Callable[..., Any]:
    def reduce(x: np.ndarray, axis: int | None = None, keep_dims: bool = False) -> Any:
        # a sum of int32 stays int32
        kept = {"dtype": x.dtype} if function is np.add else {}
        return function.reduce(x, axis=axis, keepdims=keep_dims, **kept)

    return reduce


class Language:
    """What `tl` is for a kernel that runs here."""

    constexpr = int
    float32, bfloat16, float16, int32, int64 = np.float32, np.float32, np.float32, np.int32, np.int64
    load, store, atomic_add = staticmethod(load), staticmethod(store), staticmethod(atomic_add)
    sum, max, min = (staticmethod(_fold(f)) for f in (np.add, np.maximum, np.minimum))
    xor_sum = staticmethod(_fold(np.bitwise_xor))
    maximum, minimum, abs = staticmethod(np.maximum), staticmethod(np.minimum), staticmethod(np.abs)
    where, trans, reshape = staticmethod(np.where), staticmethod(np.transpose), staticmethod(np.reshape)
    flip, broadcast_to, static_range = staticmethod(np.flip), staticmethod(np.broadcast_to), range
    pid = 0

    def program_id(self, axis: int) -> int:
        return self.pid

    @staticmethod
    def arange(start: int, end: int) -> np.ndarray:
        return np.arange(start, end, dtype=np.int32)

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    @staticmethod
    def cumsum(x: np.ndarray, axis: int, reverse: bool = False) -> np.ndarray:
        turned = np.flip(x, axis) if reverse else x
        total = np.cumsum(turned, axis, dtype=x.dtype)
        return np.flip(total, axis) if reverse else total

    @staticmethod
    def dot(a: np.ndarray, b: np.ndarray, acc: Any = 0, input_precision: str = "") -> np.ndarray:
        return a @ b + acc

    @staticmethod
    def join(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.stack([a, b], -1)

    @staticmethod
    def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return x[..., 0], x[..., 1]

    @staticmethod
    def debug_barrier() -> None:
        """One program runs at a time."""


class Triton:
    """What `triton` is for a kernel that runs here."""

    @staticmethod
    def jit(function: Any = None, **options: Any) -> Any:
        return function if function is not None else lambda f: f


def run(source: str, grid: int, memories: list[np.ndarray], numbers: list[int]) -> None:
    """Run the function `program` of `source` on arrays, which it changes."""
    language = Language()
    names: dict[str, Any] = {
        "tl": language,
        "triton": Triton,
        "cast": lambda x, kind: np.asarray(x, kind)[()],
    }
    exec(source, names)
    with np.errstate(over="ignore"):
        for language.pid in range(grid):
            names["program"](*(Pointer(memory) for memory in memories), *numbers)
