"""A request's slots: reserved before a pass, made contiguous after it, given back when they are not needed.

Slot `i` of a request is `block_ids[i // block_size] * block_size + i % block_size`. Committed token i lives in slot i.
Draft node j of a request with n tokens is written to slot n + j; `commit` moves an accepted path down to slots
n, n+1, ... so that the next pass sees one contiguous sequence.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.core.request import Request
from paceline.kv.block_pool import BlockPool
from paceline.kv.hashes import BlockHash, BlockKey, hash_block, root_hash


class KeptBlocks(Protocol):
    """Full blocks kept outside of the pool (offload.py)."""

    def keep(self, blocks: Sequence[tuple[BlockHash, int]]) -> None:
        """They may be handed out from now on: they are copied at once, as far as they are not kept yet."""

    def bring_back(self, block_hash: BlockHash, allocate: Callable[[], int | None]) -> int | None:
        """A fresh block with its content; None where it is not kept, is damaged, or no block is free."""

    def forget_all(self) -> None: ...


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.fingerprint = b""  # part of every hash, once blocks leave the process or come from outside
        self.held: dict[int, list[int]] = {}  # blocks of leases and tickets, by number (exchange.py)
        self.reclaim: Callable[[], None] | None = None  # lets go of those in `held` that have expired
        self.kept: KeptBlocks | None = None
        self._released: list[BlockHash] = []  # of blocks that were let go of, and not offered to `kept` yet
        self._hashes: dict[str, list[BlockHash]] = {}  # request id -> hashes of its full, computed blocks

    @property
    def usage(self) -> float:
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def reuse_prefix(self, request: Request) -> int:
        """Give a request without blocks its longest cached prefix; return the tokens it covers.

        The last token is always computed: its logits are what the pass is for."""
        assert not request.block_ids
        hashes: list[BlockHash] = []
        blocks: list[int] = []
        if self.enable_prefix_caching and request.sampling_params.prompt_logprobs is None:
            parent = self.root(request.cache_salt)
            for start in range(0, request.num_tokens - self.block_size, self.block_size):
                tokens = request.token_ids[start : start + self.block_size]
                block_hash = hash_block(parent, tokens)
                block = self.pool.lookup(block_hash)
                if block is not None:
                    self.pool.share((block,))  # now: bringing back the next one may take free blocks
                elif self.kept is not None:
                    block = self.kept.bring_back(block_hash, self._allocate_one)
                    if block is not None:
                        self.publish(block, block_hash, parent, tokens)
                if block is None:
                    break
                hashes.append(block_hash)
                blocks.append(block)
                parent = block_hash
        request.block_ids = blocks
        self._hashes[request.request_id] = hashes
        return len(blocks) * self.block_size

    def reserve(self, request: Request, num_slots: int) -> bool:
        """Grow the request to `num_slots` slots. False, and nothing changed, when the pool has too few blocks."""
        missing = -(-num_slots // self.block_size) - len(request.block_ids)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None and self.reclaim is not None:
            self.reclaim()
            blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        request.block_ids.extend(blocks)
        return True

    def trim(self, request: Request, num_slots: int) -> None:
        """Give back the blocks past `num_slots` slots."""
        keep = -(-num_slots // self.block_size)
        if len(request.block_ids) > keep:
            self.pool.release(request.block_ids[keep:])
            del request.block_ids[keep:]

    def release(self, request: Request) -> None:
        hashes = self._hashes.pop(request.request_id, None)
        if self.kept is not None and hashes:
            self._released += hashes
        self.pool.release(request.block_ids)
        request.block_ids = []

    def keep_released(self) -> None:
        """Keep what was released since the last call and can still be found: before any block is handed out, and once
        drafters were told of the pass, so that their rows are complete."""
        if self.kept is not None and self._released:
            released, self._released = self._released, []
            self.kept.keep([(h, block) for h in released if (block := self.pool.lookup(h)) is not None])

    def register_prefix(self, request: Request) -> None:
        """Make the request's full blocks, [0, num_computed_tokens), findable for others with the same salt."""
        if not self.enable_prefix_caching:
            return
        hashes = self._hashes.setdefault(request.request_id, [])
        for i in range(len(hashes), request.num_computed_tokens // self.block_size):
            tokens = request.token_ids[i * self.block_size : (i + 1) * self.block_size]
            parent = hashes[-1] if hashes else self.root(request.cache_salt)
            hashes.append(hash_block(parent, tokens))
            self.publish(request.block_ids[i], hashes[-1], parent, tokens)

    def publish(self, block: int, block_hash: BlockHash, parent: BlockHash, tokens: Sequence[int]) -> None:
        """Make a full block findable, and say so."""
        if self.pool.register(block, block_hash) and self.pool.listener is not None:
            self.pool.listener.stored(BlockKey(block_hash, parent, tuple(tokens)), self.block_size)

    def root(self, cache_salt: str) -> BlockHash:
        return root_hash(cache_salt, self.fingerprint)

    def use_fingerprint(self, digest: bytes) -> None:
        """From now on hashes begin with it: older ones are forgotten, but for those of running requests, which get new
        ones with their next pass."""
        if digest != self.fingerprint:
            self.fingerprint = digest
            self._hashes.clear()
            self.pool.forget_all()

    def forget_all(self) -> None:
        """No block that was computed before is found any more, wherever it is."""
        self._released = []
        self.pool.forget_all()
        if self.kept is not None:
            self.kept.forget_all()

    def _allocate_one(self) -> int | None:
        fresh = self.pool.allocate(1)
        return None if fresh is None else fresh[0]

    def moves(self, request: Request, num_tokens: int, accepted: Sequence[int]) -> list[tuple[int, int]]:
        """(from, to) slots that make an accepted path contiguous behind the first `num_tokens` tokens."""
        return [
            (self.slot(request, num_tokens + node), self.slot(request, num_tokens + depth))
            for depth, node in enumerate(accepted)
            if node != depth
        ]

    def slot(self, request: Request, index: int) -> int:
        return request.block_ids[index // self.block_size] * self.block_size + index % self.block_size

    def check_integrity(self, requests: Sequence[Request]) -> None:
        self.pool.check_integrity([*(request.block_ids for request in requests), *self.held.values()])
        for request in requests:
            num_slots = len(request.block_ids) * self.block_size
            assert request.num_computed_tokens <= num_slots, f"{request.request_id}: tokens without slots"
            assert request.num_computed_tokens <= request.num_tokens, f"{request.request_id}: computed the future"
