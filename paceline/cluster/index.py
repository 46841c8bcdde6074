"""Who holds which KV blocks: from the hash of a block to the workers that have it, fed by their events.

A block's hash covers all tokens before it too, so the holders of a prompt's i-th block that hold all earlier ones hold
its first i blocks. Holders are the bits of one integer: a lookup is one dictionary access and one `and` per block,
whatever the number of workers. Keys are 64 bits of the hash (`routing_key`): two blocks that collide make a worse route
and never a wrong token, because blocks are fetched by their full hashes.
"""

from collections.abc import Iterable, Sequence


def routing_key(block_hash: bytes) -> int:
    """The last 64 bits, as vLLM publishes them in its events."""
    return int.from_bytes(block_hash[-8:], "big")


class PrefixIndex:
    """Workers are small numbers, the slots of the router. Not thread-safe: the router holds its lock."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # key -> bit mask of workers
        self._keys: dict[int, set[int]] = {}  # worker -> keys

    @property
    def num_blocks(self) -> int:
        """Different blocks that somebody holds."""
        return len(self._holders)

    def num_held(self, worker: int) -> int:
        return len(self._keys.get(worker, ()))

    def keys_of(self, worker: int) -> frozenset[int]:
        return frozenset(self._keys.get(worker, ()))

    def stored(self, worker: int, keys: Iterable[int]) -> None:
        bit, holders, own = 1 << worker, self._holders, self._keys.setdefault(worker, set())
        for key in keys:
            own.add(key)
            holders[key] = holders.get(key, 0) | bit

    def removed(self, worker: int, keys: Iterable[int]) -> None:
        """Keys that it does not hold are left alone: a lost event must not break the index."""
        own = self._keys.get(worker, set())
        for key in keys:
            if key in own:
                own.remove(key)
                self._without(key, 1 << worker)

    def cleared(self, worker: int) -> None:
        for key in self._keys.pop(worker, ()):
            self._without(key, 1 << worker)

    def _without(self, key: int, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]

    def overlaps(self, keys: Sequence[int]) -> dict[int, int]:
        """Worker -> how many of a prompt's leading blocks it holds; those that hold none are left out."""
        found: dict[int, int] = {}
        if not keys:
            return found
        get = self._holders.get
        mask = get(keys[0], 0)
        for depth in range(1, len(keys)):
            if not mask:
                return found
            still = mask & get(keys[depth], 0)
            if still != mask:
                _note(found, mask ^ still, depth)
                mask = still
        _note(found, mask, len(keys))
        return found

    def check_integrity(self) -> None:
        held: dict[int, int] = {}
        for worker, keys in self._keys.items():
            for key in keys:
                held[key] = held.get(key, 0) | 1 << worker
        assert held == self._holders, "the two directions of the index differ"


def _note(found: dict[int, int], mask: int, depth: int) -> None:
    while mask:
        low = mask & -mask
        found[low.bit_length() - 1] = depth
        mask ^= low
