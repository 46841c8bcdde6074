"""KV blocks by their hashes, from a worker that holds them to one that needs them.

    reader -> holder   FETCH  the hashes
    holder -> reader   BLOCK  one per block: its hash, its bytes
                       END    how many there were

The holder pins the blocks under a lease while it sends them. The reader reserves room, writes each block that arrived
whole, and commits what it has when the last one came, the connection ended, or nothing came for a while. So it keeps
every verified block, whatever happened to the others; what is missing is computed, as after any cache miss. Blocks may
come damaged, twice, in any order, or not at all.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from paceline.cluster.transport import Channel, ChannelClosedError
from paceline.cluster.wire import Frame, Kind, ProtocolError

# Blocks that are read or written between two engine steps: a choice. Half: twice as many waits for a step's end. Twice:
# a step may wait 10 ms for their bytes (16 blocks of 0.4 MB are copied in 2 to 5).
BATCH = 16
# A prefill worker has no streams that wait for their tokens, but passes of a tenth of a second: fewer, larger reads.
PREFILL_BATCH = 64
IDLE_TIMEOUT_S = 2.0  # without a frame: what has come is taken. A block takes 1 ms on the slowest link we know


class Key(Protocol):
    """What names a block."""

    @property
    def hash(self) -> bytes: ...


# What an engine gives out and gets back: nobody here looks inside.
LeaseT = TypeVar("LeaseT")
TicketT = TypeVar("TicketT")
KeyT = TypeVar("KeyT", bound=Key)
KeyIn = TypeVar("KeyIn", bound=Key, contravariant=True)


class BlockHolder(Protocol[LeaseT]):
    """The sender's engine."""

    async def pin(self, hashes: Sequence[bytes], num_read: int) -> tuple[LeaseT, list[bytes]]: ...

    # on the leading ones that are there, with the bytes of the first so many: each call may wait for a pass to end

    def num_pinned(self, lease: LeaseT) -> int: ...

    async def read(self, lease: LeaseT, blocks: Sequence[int]) -> list[bytes] | None: ...  # None: the lease expired

    async def release(self, lease: LeaseT) -> None: ...


class BlockTaker(Protocol[KeyIn, TicketT]):
    """The receiver's engine."""

    async def reserve(self, keys: Sequence[KeyIn]) -> TicketT: ...

    def missing(self, ticket: TicketT) -> Sequence[int]: ...  # indices of keys whose bytes must come

    async def write(self, ticket: TicketT, blocks: Sequence[tuple[int, bytes]]) -> list[bool]: ...

    async def commit(
        self, ticket: TicketT, verified: Sequence[int], last: Sequence[tuple[int, bytes]]
    ) -> tuple[list[bool], int]: ...  # writes the last ones too; which of them were good, leading blocks there now


@dataclass(frozen=True, slots=True)
class Fetched:
    num_blocks: int  # leading blocks of the keys that are there now
    num_received: int  # that came whole and were written
    num_damaged: int
    num_bytes: int
    reason: str  # complete, timeout, closed: ...


async def serve_fetch(channel: Channel, frame: Frame, holder: BlockHolder[LeaseT], batch: int = BATCH) -> int:
    """Answer one FETCH; returns the number of blocks sent."""
    hashes = [bytes.fromhex(text) for text in frame.meta["hashes"]]
    data: list[bytes] | None
    lease, data = await holder.pin(hashes, batch)
    num_sent, count = 0, holder.num_pinned(lease)
    try:
        while data:
            for content in data:
                await channel.send(Frame(Kind.BLOCK, {"hash": hashes[num_sent].hex()}, content))
                num_sent += 1
            more = range(num_sent, min(num_sent + batch, count))
            data = await holder.read(lease, more) if more else None
        await channel.send(Frame(Kind.END, {"num_blocks": num_sent}))
    finally:
        await holder.release(lease)
    return num_sent


async def fetch_blocks(
    channel: Channel, keys: Sequence[KeyT], taker: BlockTaker[KeyT, TicketT], idle_timeout_s: float = IDLE_TIMEOUT_S
) -> Fetched:
    """Get the blocks of these keys, as far as they come; never raises for what the other side or the network did."""
    ticket = await taker.reserve(keys)
    wanted = {keys[i].hash: i for i in taker.missing(ticket)}
    incoming = _Incoming(taker, ticket, wanted)
    reason = "complete"
    try:
        if wanted:
            await channel.send(Frame(Kind.FETCH, {"hashes": [one.hex() for one in wanted]}))
            while not incoming.is_complete:
                async with asyncio.timeout(idle_timeout_s):
                    frame = await channel.receive()
                await incoming.take(frame)
    except TimeoutError:
        reason = "timeout"
    except (ChannelClosedError, ProtocolError) as error:
        reason = f"closed: {error}"
    finally:  # also when this task is cancelled: what is verified is kept, and the rest of the room is given back
        num_blocks = await asyncio.shield(incoming.commit())
    return Fetched(num_blocks, len(incoming.verified), incoming.num_damaged, incoming.num_bytes, reason)


class _Incoming(Generic[TicketT]):
    def __init__(self, taker: BlockTaker[Any, TicketT], ticket: TicketT, wanted: dict[bytes, int]) -> None:
        self._taker, self._ticket, self._wanted = taker, ticket, wanted
        self._batch: dict[int, bytes] = {}
        self._num_announced: int | None = None  # by END
        self._seen: set[bytes] = set()  # hashes, whole or damaged
        self.verified: set[int] = set()
        self.num_damaged = 0
        self.num_bytes = 0

    @property
    def is_complete(self) -> bool:
        """All that is wanted came, or as much as the other side says it sent."""
        if len(self.verified) + len(self._batch) == len(self._wanted):
            return True
        return self._num_announced is not None and len(self._seen) >= self._num_announced

    async def take(self, frame: Frame) -> None:
        if frame.kind is Kind.END:
            self._num_announced = int(frame.meta["num_blocks"])
            return
        if frame.kind is not Kind.BLOCK:
            return
        block_hash = bytes.fromhex(frame.meta["hash"])
        self._seen.add(block_hash)
        index = self._wanted.get(block_hash)
        if not frame.is_intact:
            self.num_damaged += 1
        elif index is not None and index not in self.verified and index not in self._batch:
            self._batch[index] = frame.payload
            self.num_bytes += len(frame.payload)
            if len(self._batch) >= BATCH and not self.is_complete:
                await self._flush()

    async def _flush(self) -> None:
        batch = self._taken()
        self._note(batch, await self._taker.write(self._ticket, batch))

    def _taken(self) -> list[tuple[int, bytes]]:
        batch, self._batch = list(self._batch.items()), {}
        return batch

    def _note(self, batch: Sequence[tuple[int, bytes]], written: Sequence[bool]) -> None:
        self.verified.update(index for (index, _), is_good in zip(batch, written, strict=True) if is_good)
        self.num_damaged += len(batch) - sum(written)

    async def commit(self) -> int:
        """With what was not written yet: one wait for the engine less."""
        batch = self._taken()
        written, num_blocks = await self._taker.commit(self._ticket, sorted(self.verified), batch)
        self._note(batch, written)
        return num_blocks
