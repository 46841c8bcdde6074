"""Frames over TCP, and a channel for tests that damages, doubles, swaps, loses and delays them.

Another way for the bytes of KV blocks is put over such a channel (block_transport.py).
"""

import asyncio
import contextlib
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.cluster.wire import HEAD_SIZE, Frame, Kind, ProtocolError, encode, parse_body, parse_head
from paceline.errors import PacelineError

BUFFER = 4 << 20  # bytes that may wait in a connection before `send` waits; a KV block has about 0.4 MB


class ChannelClosedError(PacelineError, ConnectionError):
    """The other side is gone."""


class UnreachableError(PacelineError, ConnectionError):
    """Nobody listens at an address."""


class Channel(Protocol):
    async def send(self, frame: Frame) -> None: ...  # frames of one channel come in order

    async def receive(self) -> Frame: ...  # raises ChannelClosedError, or ProtocolError, and is of no use after it

    def close(self) -> None: ...


class TcpChannel:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # items of a step are small and wanted now
        writer.transport.set_write_buffer_limits(high=BUFFER)

    async def send(self, frame: Frame) -> None:
        head, payload = encode(frame)
        await self.send_bytes(head, payload)

    async def send_bytes(self, *parts: bytes) -> None:
        try:
            self._writer.writelines(part for part in parts if part)
            await self._writer.drain()
        except (ConnectionError, RuntimeError) as error:  # RuntimeError: its event loop is closing
            raise ChannelClosedError(f"the connection is closed: {error}") from error

    async def receive(self) -> Frame:
        try:
            head = parse_head(await self._reader.readexactly(HEAD_SIZE))
            meta = await self._reader.readexactly(head.meta_size)
            payload = await self._reader.readexactly(head.payload_size) if head.payload_size else b""
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChannelClosedError("the other side closed the connection") from error
        return parse_body(head, meta, payload)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._writer.close()


async def connect(host: str, port: int, timeout_s: float = 5.0) -> TcpChannel:
    try:
        async with asyncio.timeout(timeout_s):
            return TcpChannel(*await asyncio.open_connection(host, port, limit=BUFFER))
    except (OSError, TimeoutError) as error:
        raise UnreachableError(f"nobody answers at {host}:{port}: {error or 'no answer in time'}") from error


Handler = Callable[[Channel], Awaitable[None]]


class Listener:
    """A listening socket; every connection is handled by a task of its own, and all of them end with `close`."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=BUFFER)
        except OSError as error:
            raise UnreachableError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        channel = TcpChannel(reader, writer)
        try:
            await self._handler(channel)
        except (ChannelClosedError, ProtocolError, asyncio.CancelledError):
            pass  # of this connection only
        finally:
            self._tasks.discard(task)
            channel.close()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities, per frame that is sent."""

    corrupt: float = 0.0  # one bit of its bytes
    corrupt_head: float = 0.0  # one bit of its head: the connection ends
    duplicate: float = 0.0
    reorder: float = 0.0  # it comes after the next one
    lose: float = 0.0
    stall: float = 0.0  # this frame and all after it are never sent
    close: float = 0.0  # the connection ends in the middle of it
    kinds: frozenset[Kind] = frozenset({Kind.BLOCK, Kind.END})  # other kinds go through


class FaultyChannel:
    """For tests: a TCP channel with faults drawn from a seed."""

    def __init__(self, channel: TcpChannel, faults: Faults, seed: int) -> None:
        self._channel, self._faults, self._dice = channel, faults, random.Random(seed)
        self._held: tuple[bytes, bytes] | None = None
        self._is_stalled = False

    async def send(self, frame: Frame) -> None:
        head, payload = encode(frame)
        if frame.kind not in self._faults.kinds:
            await self._channel.send_bytes(head, payload)
            return
        faults = self._faults
        self._is_stalled = self._is_stalled or self._hit(faults.stall)
        if self._is_stalled or self._hit(faults.lose):
            return
        if self._hit(faults.close):
            await self._channel.send_bytes(head, payload[: len(payload) // 2])
            self._channel.close()
            raise ChannelClosedError("closed by a fault")
        if payload and self._hit(faults.corrupt):
            payload = self._flip(payload)
        if self._hit(faults.corrupt_head):
            head = self._flip(head)
        if self._held is None and self._hit(faults.reorder):
            self._held = head, payload
            return
        for _ in range(2 if self._hit(faults.duplicate) else 1):
            await self._channel.send_bytes(head, payload)
        if self._held is not None:
            late, self._held = self._held, None
            await self._channel.send_bytes(*late)

    def _hit(self, probability: float) -> bool:
        return self._dice.random() < probability

    def _flip(self, data: bytes) -> bytes:
        bit = self._dice.randrange(8 * len(data))
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged)

    async def receive(self) -> Frame:
        return await self._channel.receive()

    def close(self) -> None:
        self._channel.close()
