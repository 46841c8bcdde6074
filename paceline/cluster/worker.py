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
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from paceline.cluster.events import EventLog, Snapshot
from paceline.cluster.fetch import BATCH, PREFILL_BATCH, Fetched, fetch_blocks, serve_fetch
from paceline.cluster.messages import decode_params, encode_error, encode_output
from paceline.cluster.transport import Channel, ChannelClosedError, Listener, UnreachableError, connect
from paceline.cluster.wire import PREFILL_ATTEMPT, Frame, Kind, ProtocolError
from paceline.cluster.worker_engine import WorkerEngine
from paceline.core.sampling_params import SamplingParams
from paceline.errors import EngineDeadError, PacelineError

logger = logging.getLogger("paceline.cluster")
DRAIN_POLL_S = 0.05


class Worker:
    def __init__(self, engine: WorkerEngine, role: str, worker_id: str) -> None:
        self.engine, self.role, self.worker_id = engine, role, worker_id
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
            "num_sent_blocks": self.num_sent_blocks,
            "num_fetched_blocks": self.num_fetched_blocks,
        }

    async def _handle(self, channel: Channel) -> None:
        try:
            await self._speak(channel)
        except (KeyError, ValueError, TypeError) as error:
            logger.warning("a connection sent what is not understood: %r", error)

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

    def _publish(self, events: Any) -> None:
        sequence, payload = self.log.append(events)
        for session in self.sessions:
            session.post(Frame(Kind.EVENTS, {"sequence": sequence}, payload))
        for subscriber in self.subscribers:
            subscriber(sequence, payload)


class Session:
    """One server that uses this worker."""

    def __init__(self, worker: Worker, channel: Channel) -> None:
        self._worker, self._channel = worker, channel
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._frames: list[Frame] = []
        self._items: list[dict[str, Any]] = []
        self._changed = asyncio.Event()

    @property
    def num_requests(self) -> int:
        return len(self._tasks)

    async def run(self) -> None:
        await self._channel.send(Frame(Kind.HELLO, self._worker.hello()))
        sender = asyncio.create_task(self._send())
        try:
            while True:
                await self._take(await self._channel.receive())
        finally:
            tasks = [sender, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, frame: Frame) -> None:
        meta = frame.meta
        match frame.kind:
            case Kind.SUBMIT:
                self._begin(f"{meta['id']} {meta['attempt']}", self._submit, meta)
            case Kind.ABORT:
                if (task := self._tasks.get(f"{meta['id']} {meta['attempt']}")) is not None:
                    task.cancel()
            case Kind.PREFILL:
                self._begin(f"{meta['id']} {PREFILL_ATTEMPT}", self._prefill, meta)
            case Kind.PING:
                self.post(Frame(Kind.PONG, self._worker.figures()))
            case Kind.REPLAY:
                self._replay(meta["start"])
            case Kind.REFUSE:
                logger.error("this worker was refused: %s", meta["reason"])
                self._worker.stop(f"refused: {meta['reason']}")
            case Kind.STOP:
                self._worker.stop("told to stop")
            case Kind.WELCOME:
                pass
            case _:
                raise ProtocolError(f"a worker is not sent {frame.kind.name}")

    def _begin(self, name: str, run: Callable[[Mapping[str, Any]], Awaitable[None]], meta: Mapping[str, Any]) -> None:
        async def guarded() -> None:
            try:
                await run(meta)
            except EngineDeadError as error:  # the server finds another worker when this connection ends
                self._worker.stop(f"the engine died: {error}")
            finally:
                self._tasks.pop(name, None)

        self._tasks[name] = asyncio.create_task(guarded())

    async def _submit(self, meta: Mapping[str, Any]) -> None:
        engine, request_id, attempt = self._worker.engine, meta["id"], meta["attempt"]
        delivered = meta.get("output_token_ids")
        prompt = {"prompt_token_ids": meta["token_ids"], "cache_salt": meta["salt"] or None}
        if delivered:
            prompt["output_token_ids"] = delivered
        try:
            params = decode_params(meta["params"])
            if "fetch" in meta:
                fetched = await self._fetch(meta)
                self._add({"id": request_id, "attempt": attempt, "fetched": fetched.num_blocks, "why": fetched.reason})
            offsets = _offsets(delivered, params.n)
            # an attempt of its own name: the one before it may not have ended here yet
            async for output in engine.generate(
                prompt, params, f"{request_id}.{attempt}" if attempt > 1 else request_id
            ):
                item = encode_output(output, [offsets[sample.index] for sample in output.outputs])
                for sample in output.outputs:
                    offsets[sample.index] += len(sample.token_ids)
                self._add({"id": request_id, "attempt": attempt, **item})
        except EngineDeadError:
            raise
        except PacelineError as error:
            self._add({"id": request_id, "attempt": attempt, "raised": encode_error(error)})

    async def _fetch(self, meta: Mapping[str, Any]) -> Fetched:
        """Blocks of the prompt from another worker, as far as they come."""
        engine, (host, port) = self._worker.engine, meta["fetch"]
        try:
            channel = await connect(host, port)
        except UnreachableError as error:
            return Fetched(0, 0, 0, 0, str(error))
        try:
            fetched = await fetch_blocks(channel, engine.keys(meta["token_ids"], meta["salt"]), engine)
        finally:
            channel.close()
        self._worker.num_fetched_blocks += fetched.num_received
        return fetched

    async def _prefill(self, meta: Mapping[str, Any]) -> None:
        """Compute a prompt's full blocks; they stay in the cache. The token that a pass draws is of no interest."""
        prompt = {"prompt_token_ids": meta["token_ids"], "cache_salt": meta["salt"] or None}
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        reply: dict[str, Any] = {"id": meta["id"]}
        try:
            async for output in self._worker.engine.generate(prompt, params, f"prefill-{meta['id']}"):
                if output.error is not None:
                    reply["error"] = str(output.error)
        except EngineDeadError:
            raise
        except PacelineError as error:
            reply["error"] = str(error)
        self.post(Frame(Kind.PREFILLED, reply))

    def _replay(self, start: int) -> None:
        replay = self._worker.log.replay(start)
        if isinstance(replay, Snapshot):
            self.post(Frame(Kind.REPLAY, {"next": replay.next_sequence, "keys": sorted(replay.keys)}))
            return
        for sequence, payload in replay:
            self.post(Frame(Kind.EVENTS, {"sequence": sequence}, payload))
        self.post(Frame(Kind.REPLAY, {}))

    def _add(self, item: dict[str, Any]) -> None:
        self._items.append(item)
        self._changed.set()

    def post(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._changed.set()

    async def _send(self) -> None:
        """All items of a step are there before this task runs: their tasks were woken together, before it."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                frames, self._frames = self._frames, []
                items, self._items = self._items, []
                if items:
                    frames.append(Frame(Kind.ITEMS, {"items": items}))
                for frame in frames:
                    await self._channel.send(frame)
        except ChannelClosedError:
            pass  # `run` learns of it when it reads


def _offsets(delivered: Any, num_samples: int) -> list[int]:
    if not delivered:
        return [0] * num_samples
    return [len(delivered)] if num_samples == 1 else [len(sample) for sample in delivered]
