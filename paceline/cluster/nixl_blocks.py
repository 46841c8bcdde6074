"""The bytes of KV blocks over NIXL, beside a TCP connection that carries all else (fetch.py).

    reader -> holder   FETCH  the hashes, and that it reads with NIXL
    holder -> reader   AGENT  once, before the first block: how to read from this process
                       BLOCK  a hash without bytes: where they lie, how many, their crc
    reader -> holder   TAKEN  they were read, or could not be: the holder uses the place again
    holder -> reader   END

A holder that does not know NIXL, or whose room is in use by other readers, sends a block's bytes in its frame, and a
reader takes both. What is read is checked as what comes over TCP is: a place that was used again too early, because the
connection ended or a frame came twice, gives a block that did not arrive whole.
"""

import zlib
from typing import Any

from paceline.cluster.nixl_memory import NixlMemory
from paceline.cluster.transport import Channel, connect
from paceline.cluster.wire import MAX_PAYLOAD, Frame, Kind, ProtocolError


class NixlBlocks:
    name = "nixl"

    def __init__(self) -> None:
        self.memory = NixlMemory()

    async def connect(self, host: str, port: int) -> Channel:
        return NixlReader(await connect(host, port), self.memory, (host, port))

    def serving(self, channel: Channel) -> Channel:
        return NixlHolder(channel, self.memory)

    def close(self) -> None:
        self.memory.close()


class NixlHolder:
    """Of one connection: puts blocks where its reader can read them."""

    def __init__(self, channel: Channel, memory: NixlMemory) -> None:
        self._channel, self._memory = channel, memory
        self._is_asked = self._is_met = False
        self._waiting: dict[int, int] = {}  # number of a block -> its piece, until the reader has it
        self._num_sent = 0

    async def send(self, frame: Frame) -> None:
        piece = await self._piece(len(frame.payload)) if self._is_asked and frame.kind is Kind.BLOCK else None
        if piece is None:
            await self._channel.send(frame)
            return
        out, self._num_sent = self._memory.out, self._num_sent + 1
        self._waiting[self._num_sent] = piece
        out.put(piece, frame.payload)
        self._memory.serve()
        if not self._is_met:
            self._is_met = True
            agent = {"name": self._memory.name, "metadata": self._memory.metadata().hex()}
            await self._channel.send(Frame(Kind.AGENT, agent))
        place = [self._num_sent, out.address(piece), len(frame.payload), zlib.crc32(frame.payload)]
        await self._channel.send(Frame(frame.kind, frame.meta | {"place": place}))

    async def _piece(self, size: int) -> int | None:
        """None: those in use are other readers', who may take their time, or a block is longer than the first one."""
        while (piece := self._memory.out.take(size)) is None and self._waiting and self._memory.out.fits(size):
            frame = await self._channel.receive()
            if frame.kind is not Kind.TAKEN:
                raise ProtocolError(f"{frame.kind.name} came while blocks were being sent")
            self._taken(frame.meta)
        return piece

    def _taken(self, meta: dict[str, Any]) -> None:
        if (piece := self._waiting.pop(meta["number"], None)) is not None:  # else the frame came twice
            self._memory.out.give_back(piece)

    async def receive(self) -> Frame:
        while (frame := await self._channel.receive()).kind is Kind.TAKEN:
            self._taken(frame.meta)
        if frame.kind is Kind.FETCH:
            self._is_asked = frame.meta.get("transport") == "nixl"
        return frame

    def close(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for piece in waiting.values():
            self._memory.out.give_back(piece)
        self._channel.close()


class NixlReader:
    """Of one connection: blocks come with their bytes, as over TCP."""

    def __init__(self, channel: Channel, memory: NixlMemory, address: tuple[str, int]) -> None:
        self._channel, self._memory, self._address = channel, memory, address

    async def send(self, frame: Frame) -> None:
        if frame.kind is Kind.FETCH:
            frame = Frame(frame.kind, frame.meta | {"transport": "nixl"}, frame.payload)
        await self._channel.send(frame)

    async def receive(self) -> Frame:
        while (frame := await self._channel.receive()).kind is Kind.AGENT:
            self._memory.meet(self._address, frame.meta["name"], bytes.fromhex(frame.meta["metadata"]))
        if "place" not in frame.meta:
            return frame
        number, begin, size, crc = _place(frame.meta["place"])
        payload = await self._memory.read(self._address, begin, size)
        await self._channel.send(Frame(Kind.TAKEN, {"number": number}))
        return Frame(frame.kind, frame.meta, payload or b"", payload is not None and zlib.crc32(payload) == crc)

    def close(self) -> None:
        self._channel.close()


def _place(given: Any) -> tuple[int, int, int, int]:
    """Number, address, size and crc of a block."""
    try:
        number, begin, size, crc = map(int, given)
    except (TypeError, ValueError):
        raise ProtocolError(f"a block's place is not understood: {given!r}") from None
    if not 0 < size <= MAX_PAYLOAD:
        raise ProtocolError(f"no block has {size} bytes")
    return number, begin, size, crc
