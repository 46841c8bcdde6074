"""One worker: an engine behind a TCP port.

    control connection   HELLO, then SUBMIT, ABORT, PING, REPLAY; items, events and answers come back
    block connection     PREFILL, FETCH; blocks come back (fetch.py)

A prefill worker computes the full blocks of a prompt, sends them as they are computed, and keeps them in its cache,
under their hashes. A decode worker has a prompt computed elsewhere, computes what did not come, and sends items: one
frame per engine step with what is new in all its requests. When a connection ends, what it asked for ends.
"""

import asyncio
import itertools
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
from paceline.core.sampling_params import SamplingParams
from paceline.errors import EngineDeadError, PacelineError

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
        self._numbers = itertools.count()  # of prompts that others have computed here
        self._computing: set[asyncio.Task[None]] = set()
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
        while self._is_busy and time.monotonic() < end_s:
            await asyncio.sleep(DRAIN_POLL_S)
        self.stop(reason)

    @property
    def _is_busy(self) -> bool:
        return bool(self._computing) or any(session.num_requests for session in self.sessions)

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
        computing: asyncio.Task[None] | None = None
        try:
            while True:
                frame = await channel.receive()
                if frame.kind is Kind.PREFILL and computing is None:
                    computing = asyncio.create_task(self._compute(frame.meta["token_ids"], frame.meta["salt"]))
                    self._computing.add(computing)
                    computing.add_done_callback(self._computing.discard)
                elif not await self._answer(channel, frame, computing):
                    return
        finally:
            if computing is not None:
                computing.cancel()  # nobody waits for it any more

    async def _compute(self, token_ids: list[int], salt: str) -> None:
        """A prompt's full blocks, into the cache. The token that a pass draws is of no interest."""
        prompt = {"prompt_token_ids": token_ids, "cache_salt": salt or None}
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        try:
            async for output in self.engine.generate(prompt, params, f"prefill-{next(self._numbers)}"):
                if output.error is not None:
                    logger.warning("a prompt could not be computed: %s", output.error)
        except EngineDeadError as error:
            self.stop(f"the engine died: {error}")
        except PacelineError as error:  # whoever asked computes it, and finds out the same
            logger.info("a prompt could not be computed: %s", error)

    async def _answer(self, channel: Channel, frame: Frame, computing: "asyncio.Task[None] | None") -> bool:
        """False: nothing more is to be said over this connection."""
        if frame.kind is Kind.FETCH:
            self.num_sent_blocks += await serve_fetch(channel, frame, self.engine, self._fetch_batch, computing)
        elif frame.kind is Kind.PING:  # somebody asks how it is without using it
            await channel.send(Frame(Kind.PONG, self.hello() | self.figures()))
        elif frame.kind is Kind.STOP:
            self.stop("told to stop")
            return False
        elif frame.kind is Kind.HELLO:
            session = Session(self, channel)
            self.sessions.add(session)
            try:
                await session.run()
            finally:
                self.sessions.discard(session)
            return False
        else:
            raise ProtocolError(f"a connection cannot begin with {frame.kind.name}")
        return True

    def _publish(self, events: Sequence[Event]) -> None:
        sequence, payload = self.log.append(events)
        for session in self.sessions:
            session.post(Frame(Kind.EVENTS, {"sequence": sequence}, payload))
        for subscriber in self.subscribers:
            subscriber(sequence, payload)
