"""The container format of GGUF: metadata and the list of tensors, parsed from a memory-mapped file.

A vocabulary is hundreds of thousands of strings; parsing them here, in one loop over a buffer, takes a fraction of a
second. Layout: magic, version, number of tensors, number of fields; the fields; the tensors' names, shapes, types and
offsets; then, aligned, their data. All numbers are little-endian.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 had other integer widths, and is long gone
DEFAULT_ALIGNMENT = 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class StoredTensor:
    kind: str  # "F32", "Q4_1", ...
    shape: tuple[int, ...]  # rows first, as in PyTorch
    data: NDArray[np.uint8]  # the stored bytes, read-only
    start: int  # where they begin in the file


class Header:
    """Raises ValueError where the file is not what it says it is."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}; versions {VERSIONS} are known")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            self.fields[name] = self._value(self._number("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.fields.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r}")
        self._data_start = -(-self._at // alignment) * alignment
        self.tensors = {info[0]: self._stored(*info) for info in infos}
        if len(self.tensors) != num_tensors:
            raise ValueError("two of its tensors have the same name")

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._buffer):
            raise ValueError(f"it ends at byte {len(self._buffer)}, in the middle of its header")
        taken = self._buffer[self._at : end]
        self._at = end
        return taken

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        # Tokenizers may hold pieces that are no text on their own; they keep their place in the list.
        return self._take(self._number("Q")).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            item, count = self._number("I"), self._number("Q")
            if item in SCALARS:
                return list(struct.unpack(f"<{count}{SCALARS[item]}", self._take(self._array_size(item, count))))
            return [self._value(item) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"it has a field of the unknown type {kind}")
        return self._number(SCALARS[kind])

    def _array_size(self, item: int, count: int) -> int:
        return int(count * struct.calcsize("<" + SCALARS[item]))

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._string(), self._number("I")
        sizes = struct.unpack(f"<{num_dimensions}Q", self._take(8 * num_dimensions))
        return name, sizes[::-1], self._number("I"), self._number("Q")

    def _stored(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # not needed to load a model folder

        quantization = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[quantization]
        if not shape or shape[-1] % block:
            raise ValueError(f"{name} has shape {shape}, which does not divide into blocks of {block}")
        num_bytes = int(np.prod(shape, dtype=object)) // block * block_bytes
        start = self._data_start + offset
        if start + num_bytes > len(self._buffer):
            raise ValueError(f"it ends at byte {len(self._buffer)}, but {name} reaches to {start + num_bytes}")
        data = np.frombuffer(self._buffer, np.uint8, num_bytes, start)
        return StoredTensor(quantization.name, shape, data, start)

    def release(self, tensor: StoredTensor) -> None:
        """Give the tensor's pages back to the system: it has been copied. Reading it again reads the file again."""
        start = -(-tensor.start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.start + len(tensor.data)) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start and hasattr(mmap, "MADV_DONTNEED"):
            self._buffer.madvise(mmap.MADV_DONTNEED, start, end - start)
