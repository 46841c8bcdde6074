"""One worker: an engine behind a TCP port.

    control connection   HELLO, then SUBMIT, ABORT, PREFILL, PING, REPLAY; items, events and answers come back
    block connection     FETCH; blocks come back (fetch.py)

A prefill worker computes the full blocks of a prompt and keeps them in its cache, under their hashes, until somebody
fetches them. A decode worker fetches what another has, computes the rest, and sends items: one frame per engine step
with what is new in all its requests. When a control connection ends, its requests end.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.cluster.block_transport import BlockTransport, TcpBlocks
from paceline.cluster.events import Event, EventLog
from paceline.cluster.fetch import BATCH, PREFILL_BATCH, serve_fetch
from paceline.cluster.session import Session
from paceline.cluster.transport import Channel, Listener
from paceline.cluster.wire import Frame, Kind, ProtocolError
from paceline.cluster.worker_engine import WorkerEngine

logger = logging.getLogger("paceline.cluster")
DRAIN_POLL_S = 0.05


class Worker:
    def __init__(
        self, engine: WorkerEngine, role: str, worker_id: str, transport: BlockTransport | None = None
    ) -> None:
        self.engine, self.role, self.worker_id = engine, role, worker_id
        self.transport = transport or TcpBlocks()
        self.log = EventLog()
        self.stopped = asyncio.Event()  # told to stop, refused, or its engine died
        self.reason = "told to stop"
        self.sessions: set[Session] = set()
        self.subscribers: list[Callable[[int, bytes], None]] = []  # of numbered batches of events
        self.num_sent_blocks = self.num_fetched_blocks = 0
        self._fetch_batch = PREFILL_BATCH if role == "prefill" else BATCH
        self._listener = Listener(self._handle)
        engine.listen(self._publish)

    @property
    def port(self) -> int:
        return self._listener.port

    async def start(self, host: str, port: int) -> None:
        await self._listener.start(host, port)

    async def close(self) -> None:
        await self._listener.close()
        self.transport.close()
        self.engine.shutdown()

    def stop(self, reason: str) -> None:
        self.reason = reason
        self.stopped.set()

    async def drain(self, timeout_s: float, reason: str) -> None:
        """No new requests from now on; ends when the last one has, or after that time: the rest goes on elsewhere."""
        for session in self.sessions:
            session.post(Frame(Kind.LEAVING))
        end_s = time.monotonic() + timeout_s
        while any(session.num_requests for session in self.sessions) and time.monotonic() < end_s:
            await asyncio.sleep(DRAIN_POLL_S)
        self.stop(reason)

    def hello(self) -> dict[str, Any]:
        return {"role": self.role, "worker_id": self.worker_id, **self.engine.info()}

    def figures(self) -> dict[str, Any]:
        return self.engine.figures() | {
            "pid": os.getpid(),
            "transport": self.transport.name,
            "num_sent_blocks": self.num_sent_blocks,
            "num_fetched_blocks": self.num_fetched_blocks,
        }

    async def _handle(self, connection: Channel) -> None:
        channel = self.transport.serving(connection)
        try:
            await self._speak(channel)
        except (KeyError, ValueError, TypeError) as error:
            logger.warning("a connection sent what is not understood: %r", error)
        finally:
            channel.close()

    async def _speak(self, channel: Channel) -> None:
        while True:
            frame = await channel.receive()
            if frame.kind is Kind.FETCH:
                self.num_sent_blocks += await serve_fetch(channel, frame, self.engine, self._fetch_batch)
            elif frame.kind is Kind.PING:  # somebody asks how it is without using it
                await channel.send(Frame(Kind.PONG, self.hello() | self.figures()))
            elif frame.kind is Kind.STOP:
                self.stop("told to stop")
                return
            elif frame.kind is Kind.HELLO:
                session = Session(self, channel)
                self.sessions.add(session)
                try:
                    await session.run()
                finally:
                    self.sessions.discard(session)
                return
            else:
                raise ProtocolError(f"a connection cannot begin with {frame.kind.name}")

    def _publish(self, events: Sequence[Event]) -> None:
        sequence, payload = self.log.append(events)
        for session in self.sessions:
            session.post(Frame(Kind.EVENTS, {"sequence": sequence}, payload))
        for subscriber in self.subscribers:
            subscriber(sequence, payload)
