"""The server's connection to one worker: kept up, watched, and made again after a loss.

The worker counts as lost when its connection ends, when it sends nothing for `stall_timeout_s` though it is asked every
`PING_EVERY_S`, or when what it sends makes no sense. `on_lost` is then called once; later it may join again.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol

from paceline.cluster.events import EventReader, Snapshot
from paceline.cluster.transport import Channel, ChannelClosedError, UnreachableError, connect
from paceline.cluster.wire import Frame, Kind, ProtocolError
from paceline.errors import PacelineError

logger = logging.getLogger("paceline.cluster")
PING_EVERY_S = 0.5
STOPPING = "this server stops"  # why all are lost at the end
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # between attempts to connect


class WorkerLostError(PacelineError):
    """A worker died, stalled or misbehaved: its requests go on elsewhere."""


class RefusedError(PacelineError):
    """A worker that may not join, with the reason."""


class LinkOwner(Protocol):
    def check(self, hello: Mapping[str, Any]) -> None: ...  # raises RefusedError

    def joined(self, link: "WorkerLink") -> EventReader: ...

    def leaving(self, link: "WorkerLink") -> None: ...

    def lost(self, link: "WorkerLink", reason: str) -> None: ...

    def items(self, link: "WorkerLink", items: list[dict[str, Any]]) -> None: ...  # raises WorkerLostError: not sound


class WorkerLink:
    def __init__(self, owner: LinkOwner, host: str, port: int, stall_timeout_s: float) -> None:
        self.host, self.port = host, port
        self.hello: dict[str, Any] = {}
        self.figures: dict[str, Any] = {}
        self.is_up = False
        self.worker_id = f"{host}:{port}"
        self.last_loss = ""  # why it was lost last
        self.tried = asyncio.Event()  # the first attempt to connect is over
        self._owner, self._stall_timeout_s = owner, stall_timeout_s
        self._channel: Channel | None = None
        self._outgoing: list[Frame] = []
        self._has_outgoing = asyncio.Event()
        self._reader: EventReader | None = None
        self._heard_s = 0.0

    async def run(self) -> None:
        """Until cancelled, or refused."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                try:
                    await self._connect()
                finally:
                    self.tried.set()
                pause_s = FIRST_PAUSE_S
                await self._live()
            except UnreachableError:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            except RefusedError as error:
                self.last_loss = f"refused: {error}"
                logger.error("worker %s is refused: %s", self.worker_id, error)
                return
            except (ChannelClosedError, ProtocolError, WorkerLostError) as error:
                self._lose(str(error))
            except (KeyError, ValueError, TypeError) as error:
                self._lose(f"it sent what is not understood: {error!r}")
            except asyncio.CancelledError:
                self._lose(STOPPING)
                raise
            await asyncio.sleep(pause_s)

    async def _connect(self) -> None:
        self._channel = await connect(self.host, self.port)
        await self._channel.send(Frame(Kind.HELLO))
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                frame = await self._channel.receive()
        except TimeoutError:
            raise WorkerLostError("it does not answer") from None
        if frame.kind is not Kind.HELLO:
            raise ProtocolError(f"expected HELLO, got {frame.kind.name}")
        self.hello, self.worker_id = frame.meta, frame.meta["worker_id"]
        try:
            self._owner.check(self.hello)
        except RefusedError as error:
            await self._channel.send(Frame(Kind.REFUSE, {"reason": str(error)}))
            self._channel.close()
            raise
        self._outgoing = [Frame(Kind.WELCOME), Frame(Kind.REPLAY, {"start": 0})]
        self._has_outgoing.set()
        self.is_up = True
        self._reader = self._owner.joined(self)

    async def _live(self) -> None:
        assert self._channel is not None
        self._heard_s = time.monotonic()
        work = (self._receive(self._channel), self._send(self._channel), self._ping())
        tasks = [asyncio.create_task(one) for one in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()  # none of them ends but by an error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, channel: Channel) -> None:
        while True:
            frame = await channel.receive()
            self._heard_s = time.monotonic()
            self._take(frame)

    async def _send(self, channel: Channel) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            frames, self._outgoing = self._outgoing, []
            for frame in frames:
                await channel.send(frame)

    async def _ping(self) -> None:
        while True:
            self._post(Frame(Kind.PING))
            await asyncio.sleep(PING_EVERY_S)
            silent_s = time.monotonic() - self._heard_s
            if silent_s > self._stall_timeout_s:
                raise WorkerLostError(f"it has said nothing for {silent_s:.1f} s")

    def _take(self, frame: Frame) -> None:
        assert self._reader is not None
        match frame.kind:
            case Kind.ITEMS:
                self._owner.items(self, frame.meta["items"])
            case Kind.EVENTS:
                self._reader.feed(frame.meta["sequence"], frame.payload if frame.is_intact else b"")
            case Kind.REPLAY:
                keys = frame.meta.get("keys")
                self._reader.feed_replay([] if keys is None else Snapshot(frame.meta["next"], frozenset(keys)))
            case Kind.LEAVING:
                self._owner.leaving(self)
            case Kind.PONG:
                self.figures = frame.meta
            case _:
                raise ProtocolError(f"a worker does not send {frame.kind.name}")

    def _lose(self, reason: str) -> None:
        if self._channel is not None:
            self._channel.close()
        if not self.is_up:
            return
        self.is_up, self.last_loss = False, reason
        self._owner.lost(self, reason)

    def ask_replay(self, start: int) -> None:
        self._post(Frame(Kind.REPLAY, {"start": start}))

    def submit(self, meta: dict[str, Any]) -> None:
        self._post(Frame(Kind.SUBMIT, meta))

    def abort(self, request_id: str, attempt: int) -> None:
        self._post(Frame(Kind.ABORT, {"id": request_id, "attempt": attempt}))

    def _post(self, frame: Frame) -> None:
        self._outgoing.append(frame)
        self._has_outgoing.set()
