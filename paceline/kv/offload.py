"""KV of finished prompts, kept outside of the pool and brought back when a prompt begins alike (`--kv-offload`).

The pool forgets a block when it hands it out again. What is kept here outlives that, and in a folder also the process.
Whenever a request lets go of its blocks (it ended, or was preempted) those that are not kept yet are copied; a thread
of its own checksums and stores the copies. When a prefix is looked up and the pool does not have the next block, it is
read, checked and written into a free block. What is damaged, or of another engine, is removed and computed anew.
"""

import logging
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidOptionError
from paceline.kv.block_bytes import BlockBytes, Parts, decode
from paceline.kv.block_pool import BlockPool
from paceline.kv.block_stores import BlockStore, FolderStore, MemoryStore
from paceline.kv.hashes import BlockHash
from paceline.kv.offload_writer import OffloadWriter

logger = logging.getLogger("paceline")

DEFAULT_FOLDER_BYTES = (
    10 << 30
)  # where a folder is given without a limit. A choice: about 500,000 tokens of a 135M model
UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{unit}B": size for unit, size in list(UNITS.items()) if unit not in ("", "B")}
UNITS |= {f"{unit}I{b}": 1 << 10 * (i + 1) for i, unit in enumerate("KMGT") for b in ("", "B")}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class OffloadOption:
    limit_bytes: int
    folder: Path | None = None  # None: host memory

    def open(self) -> BlockStore:
        return MemoryStore(self.limit_bytes) if self.folder is None else FolderStore(self.folder, self.limit_bytes)


def parse_offload(given: str | int | Path) -> OffloadOption:
    """Bytes of host memory (2147483648, "2GiB", "500MB"), a folder, or a folder and its limit ("/var/kv:20GiB")."""
    if isinstance(given, bool) or not isinstance(given, str | int | Path) or given == "":
        raise InvalidOptionError(f"kv_offload is a number of bytes such as '2GiB', or a folder; got {given!r}")
    size = given if isinstance(given, int) else _size(str(given))
    if size is not None:
        return OffloadOption(_positive(size, given))
    folder, colon, limit = str(given).rpartition(":")
    limit_bytes = _size(limit) if colon and folder else None
    if limit_bytes is None:
        return OffloadOption(DEFAULT_FOLDER_BYTES, Path(str(given)).expanduser())
    return OffloadOption(_positive(limit_bytes, given), Path(folder).expanduser())


def _size(text: str) -> int | None:
    found = SIZE.fullmatch(text.strip())
    unit = UNITS.get(found[2].upper()) if found else None
    return None if found is None or unit is None else int(float(found[1]) * unit)


def _positive(size: int, given: object) -> int:
    if size <= 0:
        raise InvalidOptionError(f"kv_offload must be more than 0 bytes, got {given!r}: leave it out to keep nothing")
    return size


class Offload:
    def __init__(self, store: BlockStore, blocks: BlockBytes, pool: BlockPool, fingerprint: bytes = b"") -> None:
        if store.limit_bytes < blocks.target_bytes:
            raise InvalidOptionError(
                f"kv_offload of {store.limit_bytes} bytes is too little for one KV block of {blocks.target_bytes}"
            )
        self._store, self._blocks, self._pool, self._fingerprint = store, blocks, pool, fingerprint
        self.num_kept = self.num_brought_back = self.num_damaged = self.num_dropped = 0  # blocks
        self._writer = OffloadWriter(store, fingerprint)
        self._stop = weakref.finalize(self, self._writer.stop)  # also at the end of the process

    def keep(self, blocks: Sequence[tuple[BlockHash, int]]) -> None:
        for block_hash, block in blocks:
            if self._writer.get(block_hash) is not None or self._store.has(block_hash):
                continue
            if self._writer.is_full:
                self.num_dropped += 1
            else:
                self._writer.put(block_hash, self._blocks.read(block))
                self.num_kept += 1

    def bring_back(self, block_hash: BlockHash, allocate: Callable[[], int | None]) -> int | None:
        parts = self._writer.get(block_hash) or self._stored(block_hash)
        block = None if parts is None else allocate()
        if parts is None or block is None:
            return None
        if not self._blocks.write(block, parts):
            self._pool.release([block])
            return None
        self.num_brought_back += 1
        return block

    def forget_all(self) -> None:
        self.flush()
        self._store.clear()

    def flush(self) -> None:
        """Wait until all that was copied is stored."""
        self._writer.flush()

    def close(self) -> None:
        """Store what was copied, and end the thread."""
        self._stop()

    def figures(self) -> dict[str, int]:
        return {
            "num_bytes": self._store.num_bytes,
            "limit_bytes": self._store.limit_bytes,
            "num_kept": self.num_kept,
            "num_brought_back": self.num_brought_back,
            "num_damaged": self.num_damaged,
            "num_dropped": self.num_dropped,
        }

    def _stored(self, block_hash: BlockHash) -> Parts | None:
        data = self._store.get(block_hash)
        if data is None:
            return None
        parts = decode(data, self._fingerprint, block_hash)
        if parts is None:
            self._store.remove(block_hash)
            self.num_damaged += 1
            logger.warning("a kept KV block is damaged or of another engine: it is removed, and computed anew")
        return parts
