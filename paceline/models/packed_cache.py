"""Packed weights kept on disk between two loads of a large model, so that the second takes seconds and no packing.

An entry is found by what went into it: the model's files (by path, size and time), how they are to be computed, how
tensors are packed (`PACKING`), the kernels that packed them (the hash of the compiled library) and their instruction
set. A change of any of these is another entry, so an old one is never read by newer kernels. Entries appear whole or
not at all; one that is damaged is made anew; the least recently used ones go when all together exceed the limit.

`PACELINE_PACKED_CACHE` is the limit in gigabytes; 0 switches the cache off.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidOptionError
from paceline.models.aliases import SOURCE_FILE, cache_dir
from paceline.models.native_weights import NativeWeights
from paceline.models.packed_weights import INDEX_FILE, PackedWeights, write_packed
from paceline.ops import native
from paceline.ops.native.library import library_sha256

logger = logging.getLogger("paceline")

LIMIT_VARIABLE = "PACELINE_PACKED_CACHE"
DEFAULT_LIMIT_GB = 16.0  # a choice: a handful of models that fit a laptop's memory
LEAST_SOURCE_BYTES = 200_000_000  # smaller models are packed within about a second
REMAINS_AGE_S = 3600.0  # a hidden folder this old was left by a process that was killed
PACKING = 2  # changes with which format a tensor of a file is packed in; 2: int8 heads of 4-bit folders
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True, slots=True)
class PackedEntry:
    folder: Path
    limit_bytes: int

    def read(self) -> PackedWeights | None:
        """The weights of an earlier load, or None. What cannot be used is deleted."""
        if not (self.folder / INDEX_FILE).is_file():
            return None
        try:
            weights = PackedWeights(self.folder)
            os.utime(self.folder)  # when it was used last
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("Packed weights in %s are damaged (%s): packing the model again", self.folder, error)
            shutil.rmtree(self.folder, ignore_errors=True)
            return None
        return weights

    def write(self, weights: NativeWeights) -> None:
        """Keep what was just packed. A full or read-only disk is no reason to fail: the model is loaded."""
        matrices = list(weights.packed())
        needed = sum(matrix.num_bytes for matrix, _, _ in matrices)
        if needed > self.limit_bytes:
            return
        work = self.folder.parent / f".{self.folder.name}-{os.getpid()}.tmp"
        try:
            work.mkdir(parents=True)
            _remove_remains(self.folder.parent)
            _make_room(self.folder.parent, self.limit_bytes - needed)
            if shutil.disk_usage(work).free < 2 * needed:
                return  # others need the rest of the disk more
            write_packed(work, matrices, weights.vectors)
            if not self.folder.exists():  # else another process was faster
                work.rename(self.folder)
        except OSError as error:
            logger.warning("The packed weights could not be kept in %s (%s)", self.folder.parent, error)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def packed_entry(path: Path, **computed: object) -> PackedEntry | None:
    """Where the packed weights of this model are kept, or None where they are not. `computed`: how it is computed."""
    limit = _limit_bytes()
    files = [path] if path.is_file() else weight_files(path)
    state = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    if not limit or sum(size for _, size, _ in state) < LEAST_SOURCE_BYTES:
        return None
    about = {name: str(value) for name, value in sorted(computed.items())}
    key = json.dumps([state, about, PACKING, library_sha256(), native.instruction_set()])
    return PackedEntry(cache_dir() / "packed" / hashlib.sha256(key.encode()).hexdigest()[:32], limit)


def weight_files(folder: Path) -> Iterable[Path]:
    source = folder / SOURCE_FILE
    config = [folder / "config.json"]  # how the weights are to be understood
    return config + ([source] if source.is_file() else sorted(p for glob in WEIGHT_FILES for p in folder.glob(glob)))


def _limit_bytes() -> int:
    given = os.environ.get(LIMIT_VARIABLE)
    try:
        limit = DEFAULT_LIMIT_GB if given is None else float(given)
    except ValueError:
        raise InvalidOptionError(
            f"{LIMIT_VARIABLE} is {given!r}; it must be a number of gigabytes, 0 for none"
        ) from None
    if not 0 <= limit < float("inf"):
        raise InvalidOptionError(f"{LIMIT_VARIABLE} is {given!r}; it must be a number of gigabytes, 0 for none")
    return int(limit * 1e9)


def _make_room(folder: Path, most_bytes: int) -> None:
    """Delete the least recently used entries until the others fit."""
    entries = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    entries.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
    total = 0
    for entry in entries:
        total += sum(file.stat().st_size for file in entry.iterdir())
        if total > most_bytes:
            shutil.rmtree(entry, ignore_errors=True)  # a process that has it mapped keeps it


def _remove_remains(folder: Path) -> None:
    for remains in folder.glob(".*.tmp"):
        if time.time() - remains.stat().st_mtime > REMAINS_AGE_S:
            shutil.rmtree(remains, ignore_errors=True)
