"""The thread that checksums and stores copies of KV blocks, so that the engine's does not wait for a disk.

It knows nothing of the engine: an engine that nobody holds any more is gone, whatever this thread does."""

import logging
import queue
import threading

from paceline.kv.block_bytes import Parts, encode
from paceline.kv.block_stores import BlockStore
from paceline.kv.hashes import BlockHash

logger = logging.getLogger("paceline")

MAX_PENDING_BYTES = 256 << 20  # copies that wait. At half of it a burst of requests that end loses more of its blocks

STOP_S = 10.0  # at the end of a process, for what waits; a disk that hangs does not keep it alive


class OffloadWriter:
    def __init__(self, store: BlockStore, fingerprint: bytes) -> None:
        self._store, self._fingerprint = store, fingerprint
        self._pending: dict[BlockHash, Parts] = {}  # copied, and not stored yet
        self._num_bytes = 0  # of them
        self._lock = threading.Lock()  # of both
        self._queue: queue.SimpleQueue[BlockHash | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="paceline-kv-offload", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        return self._num_bytes > MAX_PENDING_BYTES

    def put(self, block_hash: BlockHash, parts: Parts) -> None:
        with self._lock:
            self._pending[block_hash] = parts
            self._num_bytes += _num_bytes(parts)
        self._queue.put(block_hash)

    def get(self, block_hash: BlockHash) -> Parts | None:
        """What waits to be stored."""
        return self._pending.get(block_hash)

    def flush(self) -> None:
        """Wait until all that was put is stored."""
        done = threading.Event()
        self._queue.put(done)
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def stop(self) -> None:
        """Store what was put, and end the thread."""
        self._queue.put(None)
        self._thread.join(STOP_S)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            try:
                self._store.put(job, encode(self._pending[job], self._fingerprint, job))
            except Exception:
                logger.exception("a KV block could not be kept")
            with self._lock:
                self._num_bytes -= _num_bytes(self._pending.pop(job))


def _num_bytes(parts: Parts) -> int:
    return sum(len(data) for data in parts.values())
