"""Transport nixl: blocks do go over it, over TCP where it cannot be used, and its memory comes back.

What must hold for every transport is in test_fetch.py.
"""

import asyncio
from collections.abc import Iterator

import pytest

from paceline.cluster import block_transport
from paceline.cluster.block_transport import TcpBlocks, check_transport, make_transport
from paceline.cluster.fetch import Fetched, fetch_blocks, serve_fetch
from paceline.cluster.nixl_blocks import NixlBlocks, NixlReader, _place
from paceline.cluster.nixl_memory import NUM_PIECES, NixlMemory
from paceline.cluster.transport import Channel, Faults, FaultyChannel, connect
from paceline.cluster.wire import Frame, Kind, ProtocolError
from paceline.errors import MissingExtraError
from tests.cluster.test_fetch import KEYS, Holder, Taker, content, fetch, listening
from tests.cluster.ways import Way, both_ends

NOWHERE = ("127.0.0.1", 1)


@pytest.fixture(scope="module")
def nixl() -> Iterator[Way]:
    with both_ends("nixl") as way:
        yield way


def memory_of(end: object) -> NixlMemory:
    assert isinstance(end, NixlBlocks)
    return end.memory


def num_read(way: Way) -> int:
    return memory_of(way.reader).num_read


def test_without_the_package_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_transport.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"transport nixl needs nixl: pip install 'paceline\[nixl\]'"):
        make_transport("nixl")
    check_transport("tcp")


def test_a_place_that_is_not_understood_is_an_error_of_the_protocol() -> None:
    for given in (None, 7, [1, 2, 3], ["a", 1, 1, 1], [1, 4096, 0, 0], [1, 4096, 1 << 40, 0]):
        with pytest.raises(ProtocolError):
            _place(given)


def test_blocks_are_read_with_nixl_also_more_of_them_than_there_are_pieces(nixl: Way) -> None:
    assert len(KEYS) > NUM_PIECES
    for _ in range(3):
        taker, before = Taker(), num_read(nixl)
        assert asyncio.run(fetch(Holder(), taker, idle_s=5, way=nixl)).reason == "complete"
        assert num_read(nixl) == before + len(KEYS)
        assert taker.written == {i: content(key) for i, key in enumerate(KEYS)}
        assert nixl.num_pieces_in_use() == 0


def test_where_one_side_has_tcp_only_blocks_go_over_tcp(nixl: Way) -> None:
    before = num_read(nixl)
    for way in (Way(TcpBlocks(), nixl.reader), Way(nixl.holder, TcpBlocks())):
        assert asyncio.run(fetch(Holder(), Taker(), idle_s=5, way=way)).num_blocks == len(KEYS)
    assert num_read(nixl) == before and nixl.num_pieces_in_use() == 0


def test_while_others_use_all_pieces_blocks_go_over_tcp_without_a_wait(nixl: Way) -> None:
    out, before = memory_of(nixl.holder).out, num_read(nixl)
    taken = []
    while (piece := out.take(len(content(KEYS[0])))) is not None:
        taken.append(piece)
    assert asyncio.run(fetch(Holder(), Taker(), idle_s=5, way=nixl)).num_blocks == len(KEYS)
    assert num_read(nixl) == before and len(taken) == NUM_PIECES
    for piece in taken:
        out.give_back(piece)


def test_a_block_longer_than_the_first_one_goes_over_tcp() -> None:
    with both_ends("nixl") as way:
        out = memory_of(way.holder).out
        piece = out.take(10)
        assert piece is not None
        out.give_back(piece)
        assert asyncio.run(fetch(Holder(), Taker(), idle_s=5, way=way)).num_blocks == len(KEYS)
        assert num_read(way) == 0


def test_when_the_holder_never_hears_that_blocks_were_read_the_rest_is_computed_and_its_pieces_come_back(
    nixl: Way,
) -> None:
    async def serve(connection: Channel) -> None:
        channel = nixl.holder.serving(connection)
        try:
            await serve_fetch(channel, await channel.receive(), holder)
        finally:
            channel.close()

    async def run() -> Fetched:
        async with listening(serve) as port:
            faults = Faults(lose=1.0, kinds=frozenset({Kind.TAKEN}))
            silent = FaultyChannel(await connect("127.0.0.1", port), faults, seed=0)
            channel = NixlReader(silent, memory_of(nixl.reader), ("127.0.0.1", port))
            try:
                return await fetch_blocks(channel, KEYS, Taker(), idle_timeout_s=0.5)
            finally:
                channel.close()

    holder = Holder()
    asyncio.run(fetch(Holder(), Taker(), idle_s=5, way=nixl))  # the agents know each other now: what follows is quick
    fetched = asyncio.run(run())
    assert fetched.reason == "timeout" and fetched.num_blocks == NUM_PIECES
    assert holder.open_leases == nixl.num_pieces_in_use() == 0


def test_an_agent_that_is_not_understood_gives_no_block_and_no_error(nixl: Way) -> None:
    memory = memory_of(nixl.reader)
    assert not memory.meet(NOWHERE, "somebody", b"not what an agent says")
    assert asyncio.run(memory.read(NOWHERE, 4096, 100)) is None


def test_memory_that_was_not_offered_is_not_read() -> None:
    with both_ends("nixl") as way:
        held, memory = memory_of(way.holder), memory_of(way.reader)
        piece = held.out.take(100)
        assert piece is not None
        held.out.put(piece, bytes(range(100)))
        assert memory.meet(NOWHERE, held.name, held.metadata())

        async def read(begin: int) -> bytes | None:
            held.serve()
            return await asyncio.wait_for(memory.read(NOWHERE, begin, 100), 10)

        assert asyncio.run(read(held.out.address(piece))) == bytes(range(100))
        assert asyncio.run(read(held.out.address(piece) + (1 << 30))) is None
        assert memory.into.num_in_use == 0


def test_frames_that_are_not_blocks_go_through_as_they_are(nixl: Way) -> None:
    async def serve(connection: Channel) -> None:
        channel = nixl.holder.serving(connection)
        await channel.send(Frame(Kind.PONG, {"n": 1}, (await channel.receive()).payload))

    async def run() -> Frame:
        async with listening(serve) as port:
            channel = await nixl.reader.connect("127.0.0.1", port)
            await channel.send(Frame(Kind.PING, {}, b"bytes"))
            try:
                return await channel.receive()
            finally:
                channel.close()

    answer = asyncio.run(run())
    assert (answer.kind, answer.meta, answer.payload) == (Kind.PONG, {"n": 1}, b"bytes")
