"""One server that uses a worker: what it asks over its connection, and what it is answered.

All that is new in a step, of all its requests, goes out as one frame. When the connection ends, its requests end.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from paceline.cluster.block_transport import BlockTransport
from paceline.cluster.events import EventLog, Snapshot
from paceline.cluster.fetch import Fetched, fetch_blocks
from paceline.cluster.messages import decode_params, encode_error, encode_output
from paceline.cluster.transport import Channel, ChannelClosedError, UnreachableError
from paceline.cluster.wire import Frame, Kind, ProtocolError
from paceline.cluster.worker_engine import WorkerEngine
from paceline.errors import EngineDeadError, PacelineError

logger = logging.getLogger("paceline.cluster")


class SessionOwner(Protocol):
    """The worker."""

    engine: WorkerEngine
    transport: BlockTransport
    log: EventLog
    num_fetched_blocks: int

    def hello(self) -> dict[str, Any]: ...

    def figures(self) -> dict[str, Any]: ...

    def stop(self, reason: str) -> None: ...


class Session:
    def __init__(self, worker: SessionOwner, channel: Channel) -> None:
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
        """Blocks of the prompt from another worker, which computes them, as far as they come."""
        engine, there = self._worker.engine, meta["fetch"]
        try:
            channel = await self._worker.transport.connect(there["host"], there["port"])
        except UnreachableError as error:
            return Fetched(0, 0, 0, 0, str(error))
        prompt = {"token_ids": meta["token_ids"][: there["num_tokens"]], "salt": meta["salt"]}
        try:
            fetched = await fetch_blocks(channel, engine.keys(meta["token_ids"], meta["salt"]), engine, prompt)
        finally:
            channel.close()
        self._worker.num_fetched_blocks += fetched.num_received
        return fetched

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
