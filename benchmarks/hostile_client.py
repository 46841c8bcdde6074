"""How the attackers of `hostile.py` behave on their connections; what they send is in hostile_bodies.py."""

import asyncio
import contextlib
import itertools
import json
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from hostile_bodies import Body, option

MIB = 1 << 20
ATTACKERS, HOLDERS = "127.0.0.2", "127.0.0.3"  # source addresses; friendly clients use 127.0.0.1
FLOOD_BYTES = 64 * MIB  # of one endless header or body: enough to be seen in the server's memory
ANSWER_S = 20.0  # how long an answer is waited for past the end of its slice
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(slots=True)
class Target:
    """The server under attack, and what it answered so far."""

    port: int
    key: str
    answers: Counter[str] = field(default_factory=Counter)
    samples: list[str] = field(default_factory=list)  # of answers with a 5xx status
    end_s: float = 0.0  # of the slice: nothing new is sent after it

    @contextlib.asynccontextmanager
    async def connect(
        self, source: str = ATTACKERS
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0))
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    @contextlib.asynccontextmanager
    async def converse(
        self, source: str = ATTACKERS
    ) -> AsyncIterator[tuple[asyncio.Future[None], asyncio.StreamWriter]]:
        """As `connect`, with the answer read beside what is still being sent."""
        async with self.connect(source) as (reader, writer):
            answer = asyncio.ensure_future(self.read_answer(reader))
            try:
                yield answer, writer
            finally:
                answer.cancel()

    async def read_answer(self, reader: asyncio.StreamReader) -> None:
        """Counts the status and drops the rest, to the end of the connection."""
        line = await reader.readline()
        status = line.split()[1].decode() if line.startswith(b"HTTP/") else "closed"
        self.answers[status] += 1
        if status.startswith("5") and len(self.samples) < 3:
            self.samples.append((await reader.read(2000)).decode(errors="replace").rpartition("\r\n")[2][:200])
        while await reader.read(1 << 16):
            pass

    async def exchange(self, raw: bytes) -> None:
        async with self.connect() as (reader, writer):
            writer.write(raw)
            await self.read_answer(reader)

    async def repeat(self, once: Callable[[], Awaitable[None]], workers: int = 1, pause_s: float = 0.0) -> None:
        """Until the slice ends. A refused or reset connection is an answer too."""

        async def worker() -> None:
            while time.monotonic() < self.end_s:
                try:
                    await once()
                except (OSError, EOFError, ValueError, IndexError) as error:
                    self.answers[type(error).__name__] += 1
                    await asyncio.sleep(0.05)
                await asyncio.sleep(pause_s)

        await asyncio.gather(*(worker() for _ in range(workers)))


def head(path: str, length: int | str | None = None, key: str = "", method: str = "POST", close: bool = True) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: hostile", "Content-Type: application/json"]
    lines += [f"Authorization: Bearer {key}"] * bool(key) + ["Connection: close"] * close
    lines += [f"Content-Length: {length}"] * (length is not None)
    return "\r\n".join([*lines, "", ""]).encode()


@dataclass(frozen=True, slots=True)
class Attack:
    kind: str  # "abuse" should cost the server next to nothing; "load" is legal work, which any client may ask for
    run: Callable[[Target, Iterator[bytes]], Awaitable[None]]
    bodies: Callable[[], Iterable[Body]] = tuple
    path: str = COMPLETIONS
    keyed: bool = True
    grace_s: float = 0.0  # after the slice: for answers that are still to come

    def prepare(self, target: Target) -> Iterator[bytes]:
        """Whole requests, over and over; an attack goes on where its last slice ended."""
        raws = [
            body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode() for body in self.bodies()
        ]
        key = target.key if self.keyed else ""
        return itertools.cycle([head(self.path, len(raw), key) + raw for raw in raws])


def posting(
    kind: str,
    bodies: Callable[[], Iterable[Body]],
    path: str = COMPLETIONS,
    *,
    workers: int = 1,
    pause_s: float = 0.25,
    keyed: bool = True,
) -> Attack:
    async def run(target: Target, raws: Iterator[bytes]) -> None:
        await target.repeat(lambda: target.exchange(next(raws)), workers, pause_s)

    return Attack(kind, run, bodies, path, keyed, ANSWER_S)


def flood(begin: Callable[[Target], bytes], chunk: bytes) -> Attack:
    """One connection at a time that never stops sending the same piece."""

    async def once(target: Target) -> None:
        async with target.converse() as (answer, writer):
            writer.write(begin(target))
            for _ in range(FLOOD_BYTES // len(chunk)):
                writer.write(chunk)
                await writer.drain()
                if answer.done():
                    break
            await answer

    return Attack("abuse", lambda target, _: target.repeat(lambda: once(target)))


def crawling(begin: Callable[[Target], bytes], drip: bytes, connections: int) -> Attack:
    """Connections that send a byte a second, or nothing at all."""
    return Attack("abuse", lambda target, _: crawl(target, begin(target), drip, connections))


async def crawl(target: Target, begin: bytes, drip: bytes, connections: int, source: str = ATTACKERS) -> None:
    async def one() -> None:
        try:
            async with target.converse(source) as (answer, writer):
                writer.write(begin)
                while not (await asyncio.wait([answer], timeout=1))[0]:
                    writer.write(drip)
                await answer
        except OSError as error:
            target.answers[type(error).__name__] += 1

    await asyncio.gather(*(one() for _ in range(connections)))


async def talk(target: Target, requests: Iterable[bytes]) -> None:
    """Request after request on one connection; each answer has a Content-Length."""
    async with target.connect() as (reader, writer):
        for raw in requests:
            writer.write(raw)
            answer = await reader.readuntil(b"\r\n\r\n")
            target.answers[answer.split(None, 2)[1].decode()] += 1
            length = answer.lower().partition(b"content-length:")[2].split(None, 1)[0]
            await reader.readexactly(int(length))


async def garbage(target: Target, _: Iterator[bytes]) -> None:
    raw = head(COMPLETIONS, 9, target.key, close=False) + b"{nonsense"
    await target.repeat(lambda: talk(target, itertools.repeat(raw)))


async def polling(target: Target, _: Iterator[bytes]) -> None:
    raws = [head(path, key=target.key, method="GET", close=False) for path in ("/api/live", "/metrics")]
    await target.repeat(lambda: talk(target, itertools.cycle(raws)), workers=2)


async def churn(target: Target, _: Iterator[bytes]) -> None:
    await target.repeat(lambda: target.exchange(head(COMPLETIONS, 0)), workers=4)


async def cancelling(target: Target, raws: Iterator[bytes]) -> None:
    async def once() -> None:
        async with target.connect() as (reader, writer):
            writer.write(next(raws))
            target.answers[(await reader.readline()).split()[1].decode()] += 1
            await reader.readuntil(b"data: ")

    await target.repeat(once, workers=4, pause_s=0.02)


async def unread(target: Target, raws: Iterator[bytes]) -> None:
    """Requests whose answers nobody reads: first many on one connection, then one long stream."""
    async with target.connect() as (_, many), target.connect() as (_, long):
        body = json.dumps(option()).encode()
        many.write((head(COMPLETIONS, len(body), target.key, close=False) + body) * 5000)
        long.write(next(raws))
        many.transport.pause_reading()  # type: ignore[attr-defined]
        long.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(3600)


async def not_http(target: Target, _: Iterator[bytes]) -> None:
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2
    lines = (b"GET / HTTP/9.9\r\n\r\n", b"\0" * 4096, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 4096, b"A" * 65536)
    raws = itertools.cycle((hello, *lines, struct.pack("<Q", 2**63) * 512))

    async def once() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(target.exchange(next(raws)), 0.5)

    await target.repeat(once, workers=4, pause_s=0.02)
