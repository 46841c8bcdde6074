"""Blocks by hash over each transport: whatever happens, only whole blocks are kept, and all room comes back."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.cluster.block_transport import TRANSPORTS
from paceline.cluster.fetch import Fetched, fetch_blocks, serve_fetch
from paceline.cluster.transport import (
    Channel,
    ChannelClosedError,
    Faults,
    FaultyChannel,
    Listener,
    TcpChannel,
    UnreachableError,
    connect,
)
from paceline.cluster.wire import Frame, Kind, ProtocolError
from tests.cluster.ways import TCP, Way, both_ends


@dataclass(frozen=True)
class Key:
    hash: bytes


NO_FAULTS = Faults()
KEYS = [Key(hashlib.blake2b(bytes([i]), digest_size=16).digest()) for i in range(40)]


def content(key: Key) -> bytes:
    return key.hash * 500


@dataclass
class Holder:
    num_held: int = 40
    num_reads_before_expiry: int = 99
    open_leases: int = 0

    @property
    def held(self) -> set[bytes]:
        return {key.hash for key in KEYS[: self.num_held]}

    async def pin(
        self, hashes: Sequence[bytes], num_read: int, computing: "asyncio.Future[None] | None" = None
    ) -> tuple[list[bytes], list[bytes]]:
        self.open_leases += 1
        while computing is not None and not computing.done() and hashes[0] not in self.held:
            await asyncio.sleep(0.001)
        lease = [one for one in hashes if one in self.held]
        return lease, [content(Key(one)) for one in lease[:num_read]]

    def num_pinned(self, lease: list[bytes]) -> int:
        return len(lease)

    async def read(self, lease: list[bytes], blocks: Sequence[int]) -> list[bytes] | None:
        self.num_reads_before_expiry -= 1
        return None if self.num_reads_before_expiry < 0 else [content(Key(lease[i])) for i in blocks]

    async def release(self, lease: list[bytes]) -> None:
        self.open_leases -= 1


@dataclass
class Taker:
    """Checks nothing itself: what is wrong must not get here."""

    here: set[int] = field(default_factory=set)
    written: dict[int, bytes] = field(default_factory=dict)
    open_tickets: int = 0

    async def num_here(self, keys: Sequence[Any]) -> int:
        return next((i for i in range(len(keys)) if i not in self.here), len(keys))

    async def reserve(self, keys: Sequence[Any]) -> Sequence[Any]:
        self.open_tickets += 1
        return keys

    def missing(self, ticket: Sequence[Any]) -> Sequence[int]:
        return [i for i in range(len(ticket)) if i not in self.here]

    async def write(self, ticket: Any, blocks: Sequence[tuple[int, bytes]]) -> list[bool]:
        self.written.update(blocks)
        return [True] * len(blocks)

    async def commit(
        self, ticket: Any, verified: Sequence[int], last: Sequence[tuple[int, bytes]]
    ) -> tuple[list[bool], int]:
        self.written.update(last)
        self.open_tickets -= 1
        self.here |= {*verified, *(i for i, _ in last)}
        return [True] * len(last), next(i for i in range(len(KEYS) + 1) if i not in self.here)


async def fetch(
    holder: Holder, taker: Taker, faults: Faults = NO_FAULTS, seed: int = 0, idle_s: float = 0.05, way: Way = TCP
) -> Fetched:
    async def serve(connection: Channel) -> None:
        assert isinstance(connection, TcpChannel)
        channel = way.holder.serving(FaultyChannel(connection, faults, seed))
        try:
            await serve_fetch(channel, await channel.receive(), holder)
            await asyncio.sleep(0.2)  # a stalled worker keeps its connection
        finally:
            channel.close()

    async with listening(serve) as port:
        channel = await way.reader.connect("127.0.0.1", port)
        try:
            return await fetch_blocks(channel, KEYS, taker, idle_timeout_s=idle_s)
        finally:
            channel.close()


class listening:
    def __init__(self, handler: Callable[[Channel], Awaitable[None]]) -> None:
        self.listener = Listener(handler)

    async def __aenter__(self) -> int:
        await self.listener.start()
        return self.listener.port

    async def __aexit__(self, *error: object) -> None:
        await self.listener.close()


@pytest.fixture(scope="module", params=TRANSPORTS)
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    with both_ends(request.param) as way:
        yield way


def test_blocks_come_whole_and_in_order(way: Way) -> None:
    holder, taker = Holder(), Taker()
    fetched = asyncio.run(fetch(holder, taker, idle_s=5, way=way))
    assert fetched == Fetched(40, 40, 0, 40 * 8000, "complete")
    assert taker.written == {i: content(key) for i, key in enumerate(KEYS)}
    assert holder.open_leases == taker.open_tickets == way.num_pieces_in_use() == 0


def test_blocks_that_are_here_are_not_sent(way: Way) -> None:
    taker = Taker(here=set(range(30)))
    assert asyncio.run(fetch(Holder(), taker, idle_s=5, way=way)).num_received == 10
    assert set(taker.written) == set(range(30, 40))


def test_a_holder_of_a_part_sends_the_part_without_a_wait(way: Way) -> None:
    assert asyncio.run(fetch(Holder(num_held=7), Taker(), idle_s=60, way=way)).num_blocks == 7


def test_an_expired_lease_ends_the_transfer_and_what_came_is_kept(way: Way) -> None:
    holder = Holder(num_reads_before_expiry=0)  # after the batch that comes with the lease
    fetched = asyncio.run(fetch(holder, Taker(), idle_s=60, way=way))
    assert fetched.num_blocks == 16 and holder.open_leases == 0


FAULTS = {
    "corrupt": Faults(corrupt=0.2),
    "corrupt_head": Faults(corrupt_head=0.1),
    "duplicate": Faults(duplicate=0.5),
    "reorder": Faults(reorder=0.5),
    "lose": Faults(lose=0.2),
    "stall": Faults(stall=0.1),
    "close": Faults(close=0.1),
    "all": Faults(corrupt=0.1, corrupt_head=0.02, duplicate=0.2, reorder=0.2, lose=0.1, stall=0.02, close=0.02),
}


@pytest.mark.parametrize("name", FAULTS)
def test_under_every_fault_only_whole_blocks_are_kept_and_all_room_comes_back(name: str, way: Way) -> None:
    for seed in range(6):
        holder, taker = Holder(), Taker()
        with way.damaging(FAULTS[name].corrupt, seed):
            all_come = name in ("duplicate", "reorder", "corrupt")  # then it ends without a wait
            fetched = asyncio.run(fetch(holder, taker, FAULTS[name], seed, 5 if all_come else 0.05, way))
        assert all(data == content(KEYS[i]) for i, data in taker.written.items())
        assert taker.open_tickets == 0 and holder.open_leases == 0 and way.num_pieces_in_use() == 0
        assert fetched.num_received == len(taker.here) >= fetched.num_blocks
        if name in ("duplicate", "reorder"):
            assert fetched.num_blocks == 40
        if name == "corrupt":
            assert fetched.num_damaged > 0


async def fetch_computed(
    holder: Holder, taker: Taker, pause_s: float, num_computed: int, faults: Faults = NO_FAULTS, seed: int = 0
) -> Fetched:
    """As `fetch`, from a holder that computes a block after every pause, and may stop before the last one."""

    async def compute() -> None:
        while holder.num_held < num_computed:
            await asyncio.sleep(pause_s)
            holder.num_held += 1

    async def serve(connection: Channel) -> None:
        assert isinstance(connection, TcpChannel)
        channel = FaultyChannel(connection, faults, seed)
        frame = await channel.receive()
        assert (frame.kind, frame.meta) == (Kind.PREFILL, {"token_ids": [1, 2], "salt": ""})
        computing = asyncio.ensure_future(compute())
        try:
            await serve_fetch(channel, await channel.receive(), holder, computing=computing)
            await asyncio.sleep(0.2)
        finally:
            computing.cancel()
            channel.close()

    async with listening(serve) as port:
        channel = await connect("127.0.0.1", port)
        try:
            return await fetch_blocks(channel, KEYS, taker, {"token_ids": [1, 2], "salt": ""}, 0.3)
        finally:
            channel.close()


def test_blocks_come_as_they_are_computed() -> None:
    holder, taker = Holder(num_held=0), Taker()
    fetched = asyncio.run(fetch_computed(holder, taker, 0.002, 40))
    assert fetched == Fetched(40, 40, 0, 40 * 8000, "complete")
    assert taker.written == {i: content(key) for i, key in enumerate(KEYS)}
    assert holder.open_leases == taker.open_tickets == 0


def test_a_computation_that_ends_early_ends_the_transfer_and_what_came_is_kept() -> None:
    holder, taker = Holder(num_held=0), Taker()
    fetched = asyncio.run(fetch_computed(holder, taker, 0.002, 11))
    assert (fetched.num_blocks, fetched.reason) == (11, "complete")
    assert holder.open_leases == taker.open_tickets == 0


def test_a_holder_that_says_that_it_computes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cluster.fetch.ALIVE_EVERY_S", 0.05)
    fetched = asyncio.run(fetch_computed(Holder(num_held=38), Taker(), 0.6, 40))  # twice what a silent one is given
    assert fetched.num_blocks == 40


def test_a_holder_that_says_nothing_while_it_computes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cluster.fetch.ALIVE_EVERY_S", 60.0)
    holder, taker = Holder(num_held=38), Taker()
    fetched = asyncio.run(fetch_computed(holder, taker, 0.6, 40))
    assert (fetched.num_blocks, fetched.reason, taker.open_tickets) == (38, "timeout", 0)


@pytest.mark.parametrize("name", FAULTS)
def test_under_every_fault_while_blocks_are_computed_only_whole_ones_are_kept(name: str) -> None:
    for seed in range(4):
        holder, taker = Holder(num_held=0), Taker()
        # The reader's two frames go before the first fault can: its channel is sound.
        fetched = asyncio.run(fetch_computed(holder, taker, 0.001, 40, FAULTS[name], seed))
        assert all(data == content(KEYS[i]) for i, data in taker.written.items())
        assert taker.open_tickets == 0 and holder.open_leases == 0
        assert fetched.num_received == len(taker.here) >= fetched.num_blocks


def test_blocks_that_nobody_asked_for_are_not_taken() -> None:
    async def serve(channel: Channel) -> None:
        await channel.receive()
        await channel.send(Frame(Kind.BLOCK, {"hash": bytes(16).hex()}, b"x"))
        await channel.send(Frame(Kind.PONG))
        await channel.send(Frame(Kind.END, {"num_blocks": 1}))

    async def ask() -> Fetched:
        async with listening(serve) as port:
            channel = await connect("127.0.0.1", port)
            try:
                return await fetch_blocks(channel, KEYS, taker, idle_timeout_s=5)
            finally:
                channel.close()

    taker = Taker()
    assert asyncio.run(ask()).num_blocks == 0 and not taker.written


def test_nobody_there_and_a_port_in_use_say_so() -> None:
    async def ask() -> None:
        async def nothing(channel: Channel) -> None:
            await channel.receive()

        async with listening(nothing) as port:
            with pytest.raises(UnreachableError, match=f"cannot listen on 127.0.0.1:{port}"):
                await Listener(nothing).start(port=port)
        with pytest.raises(UnreachableError, match=f"nobody answers at 127.0.0.1:{port}"):
            await connect("127.0.0.1", port)

    asyncio.run(ask())


def test_a_stranger_on_the_port_ends_only_its_own_connection() -> None:
    seen: list[Exception] = []

    async def serve(channel: Channel) -> None:
        try:
            await channel.receive()
        except (ProtocolError, ChannelClosedError) as error:
            seen.append(error)
            raise

    async def ask() -> None:
        async with listening(serve) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(50))
            assert await reader.read() == b""
            writer.close()

    asyncio.run(ask())
    assert isinstance(seen[0], ProtocolError)
