"""A request's slots: reserved before a pass, made contiguous after it, given back when they are not needed.

Slot `i` of a request is `block_ids[i // block_size] * block_size + i % block_size`. Committed token i lives in slot i.
Draft node j of a request with n tokens is written to slot n + j; `commit` moves an accepted path down to slots
n, n+1, ... so that the next pass sees one contiguous sequence.
"""

from collections.abc import Sequence

from paceline.core.request import Request
from paceline.kv.block_pool import BlockHash, BlockPool, hash_block, root_hash


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
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
            for start in range(0, request.num_tokens - self.block_size, self.block_size):
                tokens = request.token_ids[start : start + self.block_size]
                block_hash = hash_block(hashes[-1] if hashes else root_hash(request.cache_salt), tokens)
                block = self.pool.lookup(block_hash)
                if block is None:
                    break
                hashes.append(block_hash)
                blocks.append(block)
        self.pool.share(blocks)
        request.block_ids = blocks
        self._hashes[request.request_id] = hashes
        return len(blocks) * self.block_size

    def reserve(self, request: Request, num_slots: int) -> bool:
        """Grow the request to `num_slots` slots. False, and nothing changed, when the pool has too few blocks."""
        missing = -(-num_slots // self.block_size) - len(request.block_ids)
        if missing <= 0:
            return True
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
        self.pool.release(request.block_ids)
        request.block_ids = []
        self._hashes.pop(request.request_id, None)

    def register_prefix(self, request: Request) -> None:
        """Make the request's full blocks, [0, num_computed_tokens), findable for others with the same salt."""
        if not self.enable_prefix_caching:
            return
        hashes = self._hashes.setdefault(request.request_id, [])
        for i in range(len(hashes), request.num_computed_tokens // self.block_size):
            tokens = request.token_ids[i * self.block_size : (i + 1) * self.block_size]
            hashes.append(hash_block(hashes[-1] if hashes else root_hash(request.cache_salt), tokens))
            self.pool.register(request.block_ids[i], hashes[-1])

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
        self.pool.check_integrity([request.block_ids for request in requests])
        for request in requests:
            num_slots = len(request.block_ids) * self.block_size
            assert request.num_computed_tokens <= num_slots, f"{request.request_id}: tokens without slots"
            assert request.num_computed_tokens <= request.num_tokens, f"{request.request_id}: computed the future"
