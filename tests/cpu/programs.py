"""Random kernels compiled against the same source on NumPy, bit by bit, with arrays that are passed twice.

More of them than the tests run: `python -m tests.cpu.programs FIRST LAST`.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from tests.cpu import oracle, sources
from tests.cpu.writer import KIND, POINTERS, ROW, Writer
from trinfer import backend

_CAST = """
@triton.jit
def cast(x, kind: tl.constexpr):
    return x.to(kind)

"""


def arguments(seed: int) -> tuple[list[torch.Tensor], list[int], int]:
    """Arrays (some passed twice), numbers and the size of the grid of a program."""
    draw = np.random.default_rng(seed)
    grid = int(draw.integers(1, 4))
    memories = []
    for pointer in POINTERS:
        kind = {"h_ptr": torch.bfloat16 if seed % 2 else torch.float16}.get(pointer)
        kind = kind or (torch.float32 if KIND[pointer] == "f" else torch.int32)
        memories.append(torch.from_numpy(draw.integers(-8, 9, grid * ROW).astype(np.int32)).to(kind))
    if draw.random() < 0.5:
        memories[1] = memories[0]
    if draw.random() < 0.3:
        memories[2] = memories[1]
    if draw.random() < 0.5:
        memories[5] = memories[4]
    return memories, [int(draw.integers(0, high)) for high in (4, 5, 9)] + [int(draw.integers(64, 70))], grid


def check(seed: int, folder: Path) -> None:
    """Run the program of a seed compiled and on NumPy; they have to agree in every byte of every array."""
    source = Writer(seed).text()
    memories, numbers, grid = arguments(seed)
    wide = {id(x): x.float().numpy() if x.is_floating_point() else x.clone().numpy() for x in memories}
    wide = {key: x.copy() for key, x in wide.items()}
    oracle.run(source, grid, [wide[id(x)] for x in memories], numbers)
    kernel = sources.module(folder, _CAST + source).program
    kernel[(grid,)](*memories, *numbers)
    for pointer, memory in zip(POINTERS, memories, strict=True):
        expected = torch.from_numpy(wide[id(memory)])
        wrong = (memory.to(expected.dtype) != expected).nonzero().flatten().tolist()
        assert not wrong, (
            f"program {seed}: {pointer}[{wrong[0]}] is {memory[wrong[0]]}, not {expected[wrong[0]]}, and "
            f"{len(wrong) - 1} more differ; numbers {numbers}, grid {grid}\n{source}"
        )


def main(first: int, last: int) -> None:
    assert backend.kind() == "cpu"
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, last):
            # the last number before a crash
            print(f"\r{seed}", end="", file=sys.stderr, flush=True)
            try:
                check(seed, Path(folder))
            except (AssertionError, RuntimeError, ValueError, KeyError, TypeError) as error:
                failures.append(seed)
                print(f"{type(error).__name__}: {error}", flush=True)
    print(f"{last - first - len(failures)} programs agree; these do not: {failures}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
