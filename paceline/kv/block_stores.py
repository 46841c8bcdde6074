"""Where bytes of KV blocks are kept outside of an engine's pool: host memory, or a folder. Least recently used go.

A store may lose a block at any time and may give back anything: whoever reads it checks what it got (block_bytes.py).
All methods may be called from several threads.
"""

import logging
import os
import shutil
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from paceline.errors import InvalidOptionError
from paceline.kv.hashes import BlockHash

logger = logging.getLogger("paceline")


class BlockStore(Protocol):
    limit_bytes: int

    @property
    def num_bytes(self) -> int: ...

    def has(self, block_hash: BlockHash) -> bool: ...

    def put(self, block_hash: BlockHash, data: bytes) -> None: ...

    def get(self, block_hash: BlockHash) -> bytes | None: ...

    def remove(self, block_hash: BlockHash) -> None: ...

    def clear(self) -> None: ...


class MemoryStore:
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[BlockHash, bytes] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def has(self, block_hash: BlockHash) -> bool:
        with self._lock:
            found = block_hash in self._blocks
            if found:
                self._blocks.move_to_end(block_hash)
            return found

    def put(self, block_hash: BlockHash, data: bytes) -> None:
        with self._lock:
            self._remove(block_hash)
            while self._blocks and self.num_bytes + len(data) > self.limit_bytes:
                self._remove(next(iter(self._blocks)))
            if len(data) <= self.limit_bytes:
                self._blocks[block_hash] = data
                self.num_bytes += len(data)

    def get(self, block_hash: BlockHash) -> bytes | None:
        with self._lock:
            if block_hash in self._blocks:
                self._blocks.move_to_end(block_hash)
            return self._blocks.get(block_hash)

    def remove(self, block_hash: BlockHash) -> None:
        with self._lock:
            self._remove(block_hash)

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()
            self.num_bytes = 0

    def _remove(self, block_hash: BlockHash) -> None:
        data = self._blocks.pop(block_hash, None)
        self.num_bytes -= 0 if data is None else len(data)


SUBFOLDER = "paceline-kv"  # in the folder that the user names: no other file of it is looked at or removed
SUFFIX, PART_SUFFIX = ".kv", ".part"
PART_AGE_S = 600.0  # a part this old was left by a process that was killed
KEPT_SHARE = (
    0.9  # of the limit, after the oldest files were removed. At twice the rest, half as many walks over all files
)
PAUSE_S = 60.0  # after a write failed, for example because the disk is full; at half of it twice as many attempts


class FolderStore:
    """A file for each block, named by its hash. Several processes may share a folder: each looks for files by name, and
    keeps to the limit by what it finds there when it has written a tenth of it."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0  # of all files, as of the last walk, and what was written since
        self._folder = folder / SUBFOLDER
        self._paused_until_s = 0.0
        self._lock = threading.Lock()  # of the counts; files appear and go whole
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # what was said can be guessed from KV
            probe = self._folder / f"{os.getpid()}{PART_SUFFIX}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InvalidOptionError(f"KV blocks cannot be kept in {str(folder)!r}: {error}") from error
        self._make_room()

    def has(self, block_hash: BlockHash) -> bool:
        return self._touch(block_hash)

    def put(self, block_hash: BlockHash, data: bytes) -> None:
        """A full or failing disk is no reason to fail: the block is then not kept."""
        if time.monotonic() < self._paused_until_s or len(data) > self.limit_bytes:
            return
        part = self._folder / f"{block_hash.hex()}.{os.getpid()}{PART_SUFFIX}"
        try:
            if shutil.disk_usage(self._folder).free < 2 * len(data):
                raise OSError("the disk is full")
            part.write_bytes(data)
            part.replace(self._file(block_hash))
        except OSError as error:
            self._paused_until_s = time.monotonic() + PAUSE_S
            logger.warning("KV blocks are not kept for %.0f s: %s cannot be written (%s)", PAUSE_S, self._folder, error)
            with suppress(OSError):
                part.unlink()
            return
        with self._lock:
            self.num_bytes += len(data)
            is_full = self.num_bytes > self.limit_bytes
        if is_full:
            self._make_room()

    def get(self, block_hash: BlockHash) -> bytes | None:
        try:
            data = self._file(block_hash).read_bytes()
        except OSError:
            return None
        self._touch(block_hash)
        return data

    def remove(self, block_hash: BlockHash) -> None:
        with suppress(OSError):
            self._file(block_hash).unlink()

    def clear(self) -> None:
        for path in self._folder.glob(f"*{SUFFIX}"):
            with suppress(OSError):
                path.unlink()
        with self._lock:
            self.num_bytes = 0

    def _file(self, block_hash: BlockHash) -> Path:
        return self._folder / f"{block_hash.hex()}{SUFFIX}"

    def _touch(self, block_hash: BlockHash) -> bool:
        """It was used now."""
        try:
            os.utime(self._file(block_hash))
        except OSError:
            return False
        return True

    def _make_room(self) -> None:
        """Remove the files that were not used for longest until the rest is well below the limit."""
        files: list[tuple[float, int, Path]] = []
        for path in self._folder.iterdir():
            with suppress(OSError):  # another process was faster
                stat = path.stat()
                if path.suffix == PART_SUFFIX and time.time() - stat.st_mtime > PART_AGE_S:
                    path.unlink()
                elif path.suffix == SUFFIX:
                    files.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        if total > self.limit_bytes:
            for _, size, path in sorted(files):
                if total <= self.limit_bytes * KEPT_SHARE:
                    break
                with suppress(OSError):
                    path.unlink()
                total -= size
        with self._lock:
            self.num_bytes = total
