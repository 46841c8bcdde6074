"""A worker's KV events for others, such as Dynamo or llm-d: over ZeroMQ, as vLLM publishes them (extra `cluster`).

PUB     (topic, number of the batch as 8 bytes, batch)
ROUTER  asked with a number, it sends every batch from there on that is kept, then the number -1 and nothing
"""

import asyncio
from typing import Any

from paceline.cluster.events import EventLog, Snapshot
from paceline.errors import InvalidOptionError, MissingExtraError

END = (-1).to_bytes(8, "big", signed=True)


class ZmqEvents:
    def __init__(self, log: EventLog, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        try:
            import zmq
            import zmq.asyncio
        except ImportError as error:
            raise MissingExtraError("publishing KV events", "pyzmq", "cluster") from error
        self._log, self._topic, self._no_wait = log, topic.encode(), zmq.NOBLOCK
        context = zmq.asyncio.Context.instance()
        self._sockets: list[Any] = []
        self._task: asyncio.Task[None] | None = None
        try:
            self._publisher = self._bind(context.socket(zmq.PUB), endpoint)
            self._replayer = self._bind(context.socket(zmq.ROUTER), replay_endpoint) if replay_endpoint else None
        except zmq.ZMQError as error:
            self.close()
            raise InvalidOptionError(
                f"cannot publish KV events at {endpoint}, {replay_endpoint}: {error}; expected such as tcp://*:5557"
            ) from error
        if self._replayer is not None:
            self._task = asyncio.create_task(self._answer())

    def _bind(self, socket: Any, endpoint: str) -> Any:
        self._sockets.append(socket)
        socket.linger = 0
        socket.bind(endpoint)
        return socket

    def publish(self, sequence: int, payload: bytes) -> None:
        """Never waits: a reader that is too slow misses batches, and asks for them."""
        self._publisher.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload], flags=self._no_wait)

    async def _answer(self) -> None:
        assert self._replayer is not None
        while True:
            client, *rest = await self._replayer.recv_multipart()
            if not rest or len(rest[-1]) != 8:
                continue  # nothing that can be answered
            replay = self._log.replay(int.from_bytes(rest[-1], "big"))
            if isinstance(replay, Snapshot):  # this protocol knows none: send all that is kept
                replay = self._log.kept()
            for sequence, payload in replay:
                await self._replayer.send_multipart([client, b"", sequence.to_bytes(8, "big"), payload])
            await self._replayer.send_multipart([client, b"", END, b""])

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for socket in self._sockets:
            socket.close()
