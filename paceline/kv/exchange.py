"""KV blocks out of an engine and into one, by their hashes.

Out: `pin` holds blocks, so that they are not handed out while they are read; a lease expires by itself. In: `reserve`
takes free blocks for those that will come, `write` fills them, `commit` makes them findable; a request that begins with
the same tokens then finds them as it finds any cached prefix. What does not arrive, is damaged, or comes too late is a
cache miss and nothing else.

    lease = exchange.pin([key.hash for key in exchange.usable(prompt)])
    sent = [exchange.read(lease, i) for i in range(len(lease.hashes))]

    ticket = other.reserve(keys)
    verified = [i for i in ticket.missing if other.write(ticket, i, received[i])]
    other.commit(ticket, verified)

Everything here belongs to the engine's thread, between two steps (`AsyncLLM.call_engine`).
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paceline.errors import InvalidRequestError
from paceline.kv.block_bytes import BlockBytes, decode, encode
from paceline.kv.block_pool import BlockListener
from paceline.kv.fingerprint import Fingerprint
from paceline.kv.hashes import BlockHash, BlockKey, block_keys
from paceline.kv.manager import KVCacheManager

logger = logging.getLogger("paceline")

TTL_S = 30.0  # vLLM's NIXL connector holds a lease as long
MOST_HELD = 0.5  # of the pool, by all leases and tickets together: the rest is for requests, whatever peers ask for


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks that stay where they are until it is released or expires."""

    number: int
    hashes: tuple[BlockHash, ...]
    expires_s: float  # by the exchange's clock


@dataclass(slots=True, eq=False)
class Ticket:
    """Blocks that will be written. Those of `keys` that are not `missing` were there, and are held too."""

    number: int
    keys: tuple[BlockKey, ...]
    missing: tuple[int, ...]  # indices of `keys`
    ttl_s: float  # after the last write
    expires_s: float
    written: set[int] = field(default_factory=set)


class KVExchange:
    def __init__(
        self,
        kv: KVCacheManager,
        blocks: BlockBytes,
        fingerprint: Fingerprint,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fingerprint = fingerprint
        self.block_size = kv.block_size
        self._kv, self._blocks, self._clock = kv, blocks, clock
        self._digest = fingerprint.digest
        self._open: dict[int, Lease | Ticket] = {}
        self._numbers = itertools.count(1)
        self._known: dict[BlockHash, BlockKey] = {}  # findable now, in the order in which they were stored
        self._listeners: list[BlockListener] = []
        kv.use_fingerprint(self._digest)
        kv.reclaim = self.expire
        kv.pool.listener = self

    def keys(self, token_ids: Sequence[int], cache_salt: str = "") -> list[BlockKey]:
        """Of all full blocks of these tokens."""
        return block_keys(token_ids, self.block_size, self._kv.root(cache_salt))

    def usable(self, token_ids: Sequence[int], cache_salt: str = "") -> list[BlockKey]:
        """Of those that a request with these tokens would use: its last token is always computed."""
        return self.keys(token_ids[:-1], cache_salt)

    def num_held(self, hashes: Iterable[BlockHash]) -> int:
        """How many of them, from the first on, are here."""
        return sum(1 for _ in itertools.takewhile(lambda h: self._kv.pool.lookup(h) is not None, hashes))

    # Out

    def pin(self, hashes: Sequence[BlockHash], ttl_s: float = TTL_S) -> Lease:
        """Hold those that are here, from the first on, as far as there is room for leases."""
        self.expire()
        here = list(dict.fromkeys(hashes))[: self._room()]
        here = here[: self.num_held(here)]
        lease = Lease(next(self._numbers), tuple(here), self._clock() + ttl_s)
        blocks = [block for h in here if (block := self._kv.pool.lookup(h)) is not None]
        self._kv.pool.share(blocks)
        self._hold(lease, blocks)
        return lease

    def read(self, lease: Lease, index: int) -> bytes:
        """The bytes of one of its blocks; raises where the lease has ended."""
        self.expire()
        if lease.number not in self._open:
            raise InvalidRequestError("the lease on these KV blocks has expired or was released: pin them again")
        block = self._kv.held[lease.number][index]
        return encode(self._blocks.read(block), self._digest, lease.hashes[index])

    def renew(self, lease: Lease, ttl_s: float = TTL_S) -> bool:
        """False: it had expired."""
        self.expire()
        lease.expires_s = self._clock() + ttl_s
        return lease.number in self._open

    def release(self, lease: Lease) -> None:
        self._end(lease)

    # In

    def reserve(self, keys: Sequence[BlockKey], ttl_s: float = TTL_S) -> Ticket:
        """Take blocks for these, from the first on, as far as there is room. Those that are here are held as well."""
        wrong = next((key for key in keys if not key.is_true or len(key.token_ids) != self.block_size), None)
        if wrong is not None:
            raise InvalidRequestError(f"{wrong.hash.hex()} is not the hash of the KV block that it is given for")
        self.expire()
        pool = self._kv.pool
        wanted = list({key.hash: key for key in keys}.values())[: self._room()]
        found = [pool.lookup(key.hash) for key in wanted]
        here = [block for block in found if block is not None]
        pool.share(here)  # before any is taken: what is here must not be handed out for what is not
        blocks: list[int] = []
        for block in found:
            fresh = [block] if block is not None else pool.allocate(1)
            if fresh is None:
                break
            blocks += fresh
        pool.release([block for block in here if block not in blocks])
        missing = tuple(i for i in range(len(blocks)) if found[i] is None)
        ticket = Ticket(next(self._numbers), tuple(wanted[: len(blocks)]), missing, ttl_s, self._clock() + ttl_s)
        self._hold(ticket, blocks)
        return ticket

    def write(self, ticket: Ticket, index: int, data: bytes) -> bool:
        """Fill one of the missing blocks with what `read` gave. False: the ticket has ended, or these are not its
        bytes, or they are damaged; nothing was written then."""
        self.expire()
        if ticket.number not in self._open or index not in ticket.missing:
            return False
        parts = decode(data, self._digest, ticket.keys[index].hash)
        if parts is None or not self._blocks.write(self._kv.held[ticket.number][index], parts):
            return False
        ticket.written.add(index)
        ticket.expires_s = self._clock() + ticket.ttl_s  # more is coming
        return True

    def commit(self, ticket: Ticket, verified: Iterable[int]) -> int:
        """Blocks that were written and verified can be found from now on, the others go back. How many of the ticket's
        blocks, from the first on, are here now; 0 where it has ended."""
        self.expire()
        if ticket.number not in self._open:
            return 0
        blocks = self._kv.held[ticket.number]
        for i in sorted(ticket.written.intersection(verified)):
            key = ticket.keys[i]
            self._kv.publish(blocks[i], key.hash, key.parent, key.token_ids)
        self._end(ticket)
        return self.num_held(key.hash for key in ticket.keys)

    def abandon(self, ticket: Ticket) -> None:
        self._end(ticket)

    # Both

    def expire(self) -> None:
        """Let go of leases and tickets whose time is over."""
        if self._open:
            now = self._clock()
            for one in [one for one in self._open.values() if one.expires_s <= now]:
                self._end(one)

    def _room(self) -> int:
        held = sum(len(blocks) for blocks in self._kv.held.values())
        return max(0, int(self._kv.pool.num_blocks * MOST_HELD) - held)

    def _hold(self, one: Lease | Ticket, blocks: list[int]) -> None:
        self._open[one.number] = one
        self._kv.held[one.number] = blocks

    def _end(self, one: Lease | Ticket) -> None:
        if self._open.pop(one.number, None) is not None:
            self._kv.pool.release(self._kv.held.pop(one.number))

    # What can be found

    def listen(self, listener: BlockListener) -> None:
        """Tell it from now on; `snapshot` says what came before."""
        self._listeners.append(listener)

    def snapshot(self) -> list[BlockKey]:
        """All that can be found now, each after its parent where that is among them."""
        ordered: dict[BlockHash, BlockKey] = {}
        for key in self._known.values():
            line = [key]
            while (parent := self._known.get(line[-1].parent)) is not None and parent.hash not in ordered:
                line.append(parent)
            ordered.update((one.hash, one) for one in reversed(line))
        return list(ordered.values())

    def stored(self, key: BlockKey, block_size: int) -> None:
        self._known[key.hash] = key
        self._tell(lambda listener: listener.stored(key, block_size))

    def removed(self, block_hash: BlockHash) -> None:
        self._known.pop(block_hash, None)
        self._tell(lambda listener: listener.removed(block_hash))

    def cleared(self) -> None:
        self._known.clear()
        self._tell(lambda listener: listener.cleared())

    def _tell(self, what: Callable[[BlockListener], None]) -> None:
        for listener in list(self._listeners):
            try:
                what(listener)
            except Exception:
                self._listeners.remove(listener)
                logger.exception("listener %r raised: it is told of no more blocks", listener)
