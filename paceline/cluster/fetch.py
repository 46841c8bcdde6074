"""KV blocks by their hashes, from a worker that holds them to one that needs them.

    reader -> holder   PREFILL  a prompt that the holder shall compute
                       FETCH    the hashes
    holder -> reader   BLOCK    one per block: its hash, its bytes
                       WAIT     more are being computed
                       END      how many there were

Blocks go out after the pass that computed them, while the next one runs. The holder pins them under a lease while it
sends them. The reader reserves room when the first one comes, writes each block that arrived whole, and commits what it
has when the last one came, the connection ended, or nothing came for a while. So it keeps every verified block,
whatever happened to the others; what is missing is computed, as after any cache miss. Blocks may come damaged, twice,
in any order, or not at all.
"""

import asyncio
from collections.abc import Mapping, Sequence
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
ALIVE_EVERY_S = 0.5  # a holder that waits for a pass says so


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

    async def pin(
        self, hashes: Sequence[bytes], num_read: int, computing: "asyncio.Future[None] | None"
    ) -> tuple[LeaseT, list[bytes]]: ...

    # on the leading ones that are there, with the bytes of the first so many: each call may wait for a pass to end.
    # With `computing`: once the first one is there, or when `computing` is over

    def num_pinned(self, lease: LeaseT) -> int: ...

    async def read(self, lease: LeaseT, blocks: Sequence[int]) -> list[bytes] | None: ...  # None: the lease expired

    async def release(self, lease: LeaseT) -> None: ...


class BlockTaker(Protocol[KeyIn, TicketT]):
    """The receiver's engine."""

    async def num_here(self, keys: Sequence[KeyIn]) -> int: ...  # from the first on

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


async def serve_fetch(
    channel: Channel,
    frame: Frame,
    holder: BlockHolder[LeaseT],
    batch: int = BATCH,
    computing: "asyncio.Future[None] | None" = None,  # of these blocks; None: nobody computes more than there are
) -> int:
    """Answer one FETCH; returns the number of blocks sent."""
    hashes = [bytes.fromhex(text) for text in frame.meta["hashes"]]
    num_sent, is_over = 0, False
    while num_sent < len(hashes) and not is_over:
        is_over = computing is None or computing.done()
        num_sent += await _send_stored(channel, hashes[num_sent:], holder, batch, computing)
    await channel.send(Frame(Kind.END, {"num_blocks": num_sent}))
    return num_sent


async def _send_stored(
    channel: Channel,
    hashes: Sequence[bytes],
    holder: BlockHolder[LeaseT],
    batch: int,
    computing: "asyncio.Future[None] | None",
) -> int:
    """The leading ones that are there."""
    data: list[bytes] | None
    lease, data = await _pinned(channel, hashes, holder, batch, computing)
    num_sent, count = 0, holder.num_pinned(lease)
    try:
        while data:
            for content in data:
                await channel.send(Frame(Kind.BLOCK, {"hash": hashes[num_sent].hex()}, content))
                num_sent += 1
            more = range(num_sent, min(num_sent + batch, count))
            data = await holder.read(lease, more) if more else None
    finally:
        await holder.release(lease)
    return num_sent


async def _pinned(
    channel: Channel,
    hashes: Sequence[bytes],
    holder: BlockHolder[LeaseT],
    batch: int,
    computing: "asyncio.Future[None] | None",
) -> tuple[LeaseT, list[bytes]]:
    """Says that it waits, for as long as it does."""
    pinning = asyncio.ensure_future(holder.pin(hashes, batch, computing))
    try:
        while not pinning.done():
            await asyncio.wait((pinning,), timeout=ALIVE_EVERY_S)
            if not pinning.done():
                await channel.send(Frame(Kind.WAIT))  # raises where nobody reads any more
    except BaseException:
        if computing is not None:
            computing.cancel()  # so that the wait for its blocks ends
        lease, _ = await pinning
        await holder.release(lease)
        raise
    return pinning.result()


async def fetch_blocks(
    channel: Channel,
    keys: Sequence[KeyT],
    taker: BlockTaker[KeyT, TicketT],
    prompt: Mapping[str, Any] | None = None,  # that the other side shall compute: token_ids, salt
    idle_timeout_s: float = IDLE_TIMEOUT_S,
) -> Fetched:
    """Get the blocks of these keys, as far as they come; never raises for what the other side or the network did."""
    incoming = _Incoming(taker, keys)
    reason = "complete"
    try:
        if prompt is not None:  # first: it begins while the engine here is asked what is missing
            await channel.send(Frame(Kind.PREFILL, dict(prompt)))
        if wanted := await incoming.look():
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
    def __init__(self, taker: BlockTaker[Any, TicketT], keys: Sequence[Key]) -> None:
        self._taker, self._keys = taker, keys
        self._ticket: TicketT | None = None  # from the first block on: before it, others may use the room
        self._num_here = 0
        self._wanted: dict[bytes, int] = {}
        self._batch: dict[int, bytes] = {}
        self._num_announced: int | None = None  # by END
        self._seen: set[bytes] = set()  # hashes, whole or damaged
        self.verified: set[int] = set()
        self.num_damaged = 0
        self.num_bytes = 0

    async def look(self) -> list[bytes]:
        """The hashes of those that are not here."""
        self._num_here = await self._taker.num_here(self._keys)
        self._wanted = {self._keys[i].hash: i for i in range(self._num_here, len(self._keys))}
        return list(self._wanted)

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
        if self._ticket is None:
            self._ticket = await self._taker.reserve(self._keys)
            missing = {self._keys[i].hash: i for i in self._taker.missing(self._ticket)}
            self._wanted = {one: i for one, i in missing.items() if one in self._wanted}
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
        assert self._ticket is not None
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
        if self._ticket is None:
            return self._num_here
        batch = self._taken()
        written, num_blocks = await self._taker.commit(self._ticket, sorted(self.verified), batch)
        self._note(batch, written)
        return num_blocks
