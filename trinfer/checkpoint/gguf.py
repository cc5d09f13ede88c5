"""The GGUF file format: metadata, an index of tensors, and their blocks expanded to float32."""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}
SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}


def _expand_f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").copy()


def _expand_f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _expand_bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _expand_q8_0(blocks: Bytes) -> Floats:
    scale = blocks[:, :2].view("<f2").astype(np.float32)
    return np.multiply(blocks[:, 2:].view(np.int8), scale, dtype=np.float32)


def _expand_q4_0(blocks: Bytes) -> Floats:
    scale = blocks[:, :2].view("<f2").astype(np.float32)
    return (_nibbles(blocks[:, 2:]).astype(np.float32) - 8) * scale


def _expand_q4_1(blocks: Bytes) -> Floats:
    scale = blocks[:, :2].view("<f2").astype(np.float32)
    minimum = blocks[:, 2:4].view("<f2").astype(np.float32)
    return np.multiply(_nibbles(blocks[:, 4:]), scale, dtype=np.float32) + minimum


def _nibbles(packed: Bytes) -> Bytes:
    # the low halves of the 16 bytes are values 0..15 of the block, the high halves values 16..31
    return np.concatenate([packed & 15, packed >> 4], axis=1)


@dataclass(frozen=True)
class BlockType:
    """How one kind of tensor is stored: `size_bytes` bytes hold `elements` consecutive values of a row."""

    name: str
    elements: int
    size_bytes: int
    expand: Callable[[Bytes], Floats]


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, _expand_f32),
    1: BlockType("F16", 1, 2, _expand_f16),
    2: BlockType("Q4_0", 32, 18, _expand_q4_0),
    3: BlockType("Q4_1", 32, 20, _expand_q4_1),
    8: BlockType("Q8_0", 32, 34, _expand_q8_0),
    30: BlockType("BF16", 1, 2, _expand_bf16),
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file: its shape (rows first, as torch counts), its block type and its mapped bytes."""

    name: str
    shape: tuple[int, ...]
    block_type: BlockType
    data: Bytes

    def blocks(self) -> Bytes:
        """The stored blocks, [number of blocks, bytes per block], still mapped from the file."""
        return self.data.reshape(-1, self.block_type.size_bytes)

    def expand(self) -> Floats:
        """The values in float32, in the tensor's shape, in memory of their own."""
        return self.block_type.expand(self.blocks()).reshape(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """An open GGUF file: what it says about the model, and its tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def require(self, key: str, kind: type) -> Any:
        """The metadata value of `key`, which has to be a `kind`.

        Raises:
            ValueError: the file does not say, or says something else.
        """
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            was = "missing" if value is None else f"a {type(value).__name__}"
            raise ValueError(
                f"metadata {key!r} of {self.path} is {was}; allowed: a {kind.__name__}; "
                "load the model's Hugging Face folder instead"
            )
        return value


class _Cursor:
    """Reads one value after the other and refuses to pass the end of the file."""

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path, self.data, self.position = path, data, 0

    def take(self, count: int) -> Bytes:
        end = self.position + count
        if end > len(self.data):
            raise broken(self.path, f"it ends at byte {len(self.data)}, inside a value that ends at {end}")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def number(self, layout: str) -> int:
        return int(struct.unpack(layout, self.take(struct.calcsize(layout)).tobytes())[0])

    def text(self) -> str:
        return self.take(self.number("<Q")).tobytes().decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array()
        return self.scalars(kind, 1)[0]

    def array(self) -> list[Any]:
        kind, count = self.number("<I"), self.number("<Q")
        if kind == STRING:
            return [self.text() for _ in range(count)]
        return self.scalars(kind, count)

    def scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise broken(self.path, f"metadata of kind {kind} stands before byte {self.position}")
        dtype = np.dtype(SCALARS[kind])
        return self.take(count * dtype.itemsize).view(dtype).tolist()


def broken(path: Path, what: str) -> ValueError:
    """The error for a file that is not, or not wholly, what the format says."""
    return ValueError(
        f"{path} is no readable GGUF file: {what}; allowed: a whole file of version 2 or 3; download it again"
    )


def read_gguf(path: str | Path) -> GgufFile:
    """Map a GGUF file and read its metadata and index; no tensor is expanded yet.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a GGUF file, a broken one, or one with block types that cannot be expanded.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; allowed: a .gguf file; check the path for a typing mistake")
    if path.stat().st_size == 0:
        raise broken(path, "it is empty")
    cursor = _Cursor(path, np.memmap(path, dtype=np.uint8, mode="r"))
    if cursor.take(4).tobytes() != MAGIC:
        raise broken(path, "it does not start with the letters GGUF")
    version = cursor.number("<I")
    if version not in VERSIONS:
        raise broken(path, f"it is of version {version}")
    tensor_count, metadata_count = cursor.number("<Q"), cursor.number("<Q")
    metadata = {cursor.text(): cursor.value(cursor.number("<I")) for _ in range(metadata_count)}
    return GgufFile(path, metadata, _tensors(cursor, tensor_count, metadata))


def _tensors(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> dict[str, GgufTensor]:
    entries = [_index_entry(cursor) for _ in range(count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise broken(cursor.path, f"general.alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, block_type, offset in entries:
        if name in tensors:
            raise broken(cursor.path, f"two tensors are called {name!r}")
        cursor.position = start + offset
        data = cursor.take(math.prod(shape) // block_type.elements * block_type.size_bytes)
        tensors[name] = GgufTensor(name, shape, block_type, data)
    return tensors


def _index_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], BlockType, int]:
    name, dimensions = cursor.text(), cursor.number("<I")
    if dimensions > MAX_DIMENSIONS:
        raise broken(cursor.path, f"tensor {name!r} has {dimensions} dimensions of at most {MAX_DIMENSIONS}")
    # the file counts dimensions from the fastest one, torch from the slowest
    shape = tuple(cursor.number("<Q") for _ in range(dimensions))[::-1]
    kind, offset = cursor.number("<I"), cursor.number("<Q")
    if kind not in BLOCK_TYPES:
        allowed = ", ".join(sorted(known.name for known in BLOCK_TYPES.values()))
        raise ValueError(
            f"tensor {name!r} of {cursor.path} has block type {kind}; allowed: {allowed}; "
            "take a Q8_0 or F16 file of the same model, or load its Hugging Face folder"
        )
    block_type = BLOCK_TYPES[kind]
    if shape and shape[-1] % block_type.elements or not shape and block_type.elements > 1:
        raise broken(cursor.path, f"rows of {name!r}, shape {shape}, are no whole {block_type.name} blocks")
    return name, shape, block_type, offset
