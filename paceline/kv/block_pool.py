"""KV blocks: which requests hold them, which hold a reusable prefix, which may be taken next.

A block is free when no request refers to it. A free block may still hold a full block of some prompt's KV: it stays
findable by its hash (hashes.py) until it is handed out again, least recently used first. So the prefix cache costs no
memory.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from paceline.kv.hashes import BlockHash, BlockKey


class BlockListener(Protocol):
    """Told which blocks can be found, in the engine's thread, while it works: to be taken note of and no more."""

    def stored(self, key: BlockKey, block_size: int) -> None: ...

    def removed(self, block_hash: BlockHash) -> None: ...

    def cleared(self) -> None: ...  # none can be found any more


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.listener: BlockListener | None = None  # `KVCacheManager` tells it what is stored, the pool the rest
        self.num_uses = np.zeros(num_blocks, dtype=np.int32)  # times that each was handed out
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # least recently used first
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._block_of)

    def allocate(self, count: int) -> list[int] | None:
        """`count` fresh blocks, or None when fewer are free. Cached content of a handed-out block is forgotten."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        self.num_uses[blocks] += 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each block (a prefix hit)."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less. The tail of a sequence is freed first, so that its head stays cached longest."""
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} freed twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:  # nothing worth keeping: hand it out before any cached one
                    self._free.move_to_end(block, last=False)

    def lookup(self, block_hash: BlockHash) -> int | None:
        return self._block_of.get(block_hash)

    def register(self, block: int, block_hash: BlockHash) -> bool:
        """Make a full block findable. Where another block already holds the same tokens, that one stays: False."""
        if block in self._hash_of or block_hash in self._block_of:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def forget_all(self) -> None:
        """No block is findable any more; what requests hold stays theirs."""
        self._block_of.clear()
        self._hash_of.clear()
        if self.listener is not None:
            self.listener.cleared()

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            if self.listener is not None:
                self.listener.removed(block_hash)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that nothing is lost, shared or freed wrongly. `held`: the block lists of all holders."""
        counts = [0] * self.num_blocks
        for blocks in held:
            assert len(set(blocks)) == len(blocks), f"a block stands twice in one table: {blocks}"
            for block in blocks:
                counts[block] += 1
        assert counts == self._ref_counts, "reference counts do not match the holders"
        free = set(self._free)
        assert free == {b for b in range(self.num_blocks) if counts[b] == 0}, "free list does not match"
        assert {b: h for h, b in self._block_of.items()} == self._hash_of, "prefix index is not one to one"
