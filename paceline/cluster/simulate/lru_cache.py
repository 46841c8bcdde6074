"""A worker's prefix cache: the blocks used last, as many as fit."""

from collections import OrderedDict
from collections.abc import Sequence


class LRUCache:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, keys: Sequence[int]) -> int:
        """How many of a prompt's leading blocks are here. They count as used, the first as the last used one."""
        blocks, found = self._blocks, 0
        for key in keys:
            if key not in blocks:
                break
            found += 1
        for key in reversed(keys[:found]):
            blocks.move_to_end(key)
        return found

    def store(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """Put a prompt's blocks there; returns those that are new, and those that had to go."""
        blocks = self._blocks
        new = [key for key in keys if key not in blocks]
        for key in reversed(keys):  # the tail of a prompt goes first, as in kv/block_pool.py
            blocks[key] = None
            blocks.move_to_end(key)
        removed = []
        while len(blocks) > self.num_blocks:
            removed.append(blocks.popitem(last=False)[0])
        return new, removed
