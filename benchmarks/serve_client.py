"""A client for `serve.py` and `hostile.py` that costs next to nothing: it shares its cores with the server it measures.

Lines of a stream are kept as they come, with their times, and parsed once the stream is over.
"""

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Answer:
    """What came back. `ended` is a finish reason, an error code, "hung up" (by us) or "cut" (by the server)."""

    begin_s: float
    status: int = 0
    event_s: list[float] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    ended: str = "cut"
    text: str = ""
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.event_s[0] - self.begin_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.event_s, self.event_s[1:], strict=False)]

    def parse(self) -> None:
        done = False
        for line in self.lines:
            if line == b"data: [DONE]\r\n" or line == b"data: [DONE]\n":
                done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                self.ended = event["error"]["code"]
            for choice in event.get("choices", ()):
                self.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                self.ended = choice["finish_reason"] or self.ended
            if event.get("usage"):
                self.num_tokens = event["usage"]["completion_tokens"]
        if not done and self.ended != "hung up":
            self.ended = "cut"
        self.lines.clear()


async def stream(
    port: int,
    body: dict[str, Any],
    *,
    hang_up_after: int | None = None,
    pause_s: float = 0.0,
    first: Any = None,
    key: str = "",
) -> Answer:
    """One streamed answer, a chat where the body has messages. `hang_up_after` events the connection is closed;
    `pause_s` makes a slow reader; `first` is set at each event."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reader, writer = await _post(port, json.dumps(body | options).encode(), path, key)
    answer = Answer(time.perf_counter())
    try:
        answer.status = int((await reader.readline()).split()[1])
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                if answer.status != 200 and line.startswith(b"{"):
                    answer.ended = json.loads(line)["error"]["code"]
                    break
                continue
            answer.event_s.append(time.perf_counter())
            answer.lines.append(line)
            if first is not None:
                first.set()
            if hang_up_after is not None and len(answer.lines) > hang_up_after:
                answer.ended = "hung up"
                break
            if line.startswith(b"data: [DONE]"):
                break
            if pause_s:
                await asyncio.sleep(pause_s)
    finally:
        writer.close()
    if answer.status == 200:
        answer.parse()
    return answer


async def all_answers(port: int, bodies: Sequence[dict[str, Any]], num_streams: int) -> tuple[float, list[Answer]]:
    """So many clients until every body is answered, to its full length: tokens per second, and the answers."""
    waiting, answers = list(bodies), list[Answer]()

    async def client() -> None:
        while waiting:
            answers.append(await stream(port, waiting.pop(0)))

    begin_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(num_streams)))
    seconds = time.perf_counter() - begin_s
    assert all(answer.ended == "length" for answer in answers), [answer.ended for answer in answers]
    return sum(answer.num_tokens for answer in answers) / seconds, answers


def accepts(port: int) -> bool:
    """Does a server listen there?"""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


async def refused(port: int, raw: bytes) -> int:
    """The status that a body which must be refused gets."""
    reader, writer = await _post(port, raw)
    try:
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()


async def _post(
    port: int, data: bytes, path: str = "/v1/completions", key: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"{authorization}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    return reader, writer
