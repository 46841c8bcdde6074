"""Packed weights in a file: written once, then mapped into memory and read where they lie.

A folder holds `weights.bin`, matrices and biases at multiples of a page, and `index.json`, which says what lies where
and what `weights.bin` was when it was written. The index is written last, so a folder without it is not whole.
"""

import ctypes
import hashlib
import json
import mmap
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from paceline.models.checksums import sha256_of

PAGE = 4096
DATA_FILE, INDEX_FILE = "weights.bin", "index.json"
VERSION = 1  # of these two files; what the bytes of a matrix mean is the kernels' business (packed_cache.py)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    part: str
    layer: int
    format: int  # `Format` of ops/native/src/kernels.h
    rows: int
    columns: int
    num_bytes: int
    offset: int  # in weights.bin
    bias_offset: int | None


class PackedWeights:
    """The folder's weights, mapped. Raises ValueError or OSError where the folder is not what it was."""

    def __init__(self, folder: Path) -> None:
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        if not isinstance(index, dict) or index.get("version") != VERSION:
            raise ValueError(f"{INDEX_FILE} is of another version")
        _check_data(folder, index["data"])
        self.matrices = [PackedMatrix(**entry) for entry in index["matrices"]]
        self.vectors: dict[tuple[str, int], list[float]] = {
            (entry["part"], entry["layer"]): entry["values"] for entry in index["vectors"]
        }
        with open(folder / DATA_FILE, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(self._map, np.uint8)
        if any(matrix.offset + matrix.num_bytes > len(self._bytes) for matrix in self.matrices):
            raise ValueError(f"{INDEX_FILE} names bytes that {DATA_FILE} does not have")

    def address(self, offset: int) -> int:
        return int(self._bytes.ctypes.data) + offset


def write_packed(
    folder: Path,
    matrices: Iterable[tuple[PackedMatrix, int, int | None]],  # with the addresses of bytes and bias
    vectors: dict[tuple[str, int], list[float]],
) -> None:
    placed, digest = [], hashlib.sha256()
    with open(folder / DATA_FILE, "wb") as file:
        for matrix, data, bias in matrices:
            offset = _append(file, digest, data, matrix.num_bytes)
            bias_offset = None if bias is None else _append(file, digest, bias, 4 * matrix.rows)
            placed.append(replace(matrix, offset=offset, bias_offset=bias_offset))
        file.flush()
        os.fsync(file.fileno())
    index = {
        "version": VERSION,
        "data": _state(folder / DATA_FILE) | {"sha256": digest.hexdigest()},
        "matrices": [asdict(matrix) for matrix in placed],
        "vectors": [{"part": part, "layer": layer, "values": values} for (part, layer), values in vectors.items()],
    }
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")


def _append(file: IO[bytes], digest: Any, address: int, num_bytes: int) -> int:
    offset = file.tell()
    padding = bytes(-num_bytes % PAGE)
    for part in (memoryview((ctypes.c_uint8 * num_bytes).from_address(address)), padding):
        file.write(part)
        digest.update(part)
    return offset


def _check_data(folder: Path, known: dict[str, Any]) -> None:
    """Size and time cost nothing to look at; a file that differs in either must still have the same content."""
    found = _state(folder / DATA_FILE)
    if found["bytes"] != known["bytes"]:
        raise ValueError(f"{DATA_FILE} has {found['bytes']} bytes instead of {known['bytes']}")
    if found["time_ns"] != known["time_ns"] and sha256_of(folder / DATA_FILE) != known["sha256"]:
        raise ValueError(f"{DATA_FILE} has another content than when it was written")


def _state(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"bytes": stat.st_size, "time_ns": stat.st_mtime_ns}
