"""Any OpenAI-compatible server: streamed completions over HTTP, and vLLM's speculation counters from /metrics.

Only the standard library is used: one thread per running request reads the server-sent events as they come. Tokens are
counted by the server (`stream_options.include_usage`): with speculation one event may hold several of them.
"""

import asyncio
import hashlib
import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from paceline.bench.run.backend import Answer, Sampling
from paceline.bench.run.server_counters import speculation_counts
from paceline.bench.workloads.workload import Prompt
from paceline.core.draft_counts import DraftCounts
from paceline.errors import InvalidOptionError

MAX_REQUESTS_AT_ONCE = 1024


class UrlBackend:
    def __init__(self, url: str, model: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidOptionError(f"a server's URL is such as http://localhost:8000, got {url!r}")
        self.url = url
        self._parts = parts
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(MAX_REQUESTS_AT_ONCE, thread_name_prefix="bench-client")
        self.model = model or self._first_model()

    async def generate(self, prompt: Prompt, sampling: Sampling, index: int) -> Answer:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._generate, prompt, sampling, index)

    def _generate(self, prompt: Prompt, sampling: Sampling, index: int) -> Answer:
        answer = Answer(prompt.prompt_id, prompt.category, time.perf_counter())
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed + index,
            "ignore_eos": sampling.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if prompt.chat:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt.text}]
        else:
            path, body["prompt"] = "/v1/completions", prompt.text
        try:
            self._stream(path, body, answer)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    def _stream(self, path: str, body: dict[str, Any], answer: Answer) -> None:
        text: list[str] = []
        connection = self._connect()
        try:
            headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
            connection.request("POST", self._base + path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {response.read(500).decode(errors='replace')}")
            done = False
            for data in _events(response):
                if data == "[DONE]":
                    done = True
                    break
                self._take_event(json.loads(data), answer, text)
        finally:
            connection.close()
        if not done:
            raise ValueError("the stream broke off before its end")
        if not answer.event_s:
            raise ValueError("the server answered without any text")
        answer.num_output_tokens = answer.num_output_tokens or len(answer.event_s)
        answer.output_hash = hashlib.sha256("".join(text).encode()).hexdigest()[:16]

    @staticmethod
    def _take_event(event: dict[str, Any], answer: Answer, text: list[str]) -> None:
        if "error" in event:
            raise ValueError(f"the server reported {event['error']}")
        usage = event.get("usage")
        if usage:
            answer.num_output_tokens = int(usage["completion_tokens"])
            answer.num_prompt_tokens = int(usage["prompt_tokens"])
        for choice in event.get("choices", ()):
            piece = choice.get("text") or (choice.get("delta") or {}).get("content")
            if piece:
                answer.event_s.append(time.perf_counter())
                text.append(piece)

    def counts(self) -> DraftCounts | None:
        """The server's own counters; None where it has no /metrics or does not speculate."""
        try:
            status, body = self._get("/metrics")
        except (OSError, http.client.HTTPException):
            return None
        return speculation_counts(body) if status == 200 else None

    def figures(self) -> dict[str, float]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {"backend": "url", "url": self.url, "model": self.model}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _first_model(self) -> str:
        try:
            status, body = self._get("/v1/models")
            if status != 200:
                raise ValueError(f"HTTP {status}")
            return str(json.loads(body)["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
            raise InvalidOptionError(f"no OpenAI-compatible server answers at {self.url}: {error}") from error

    def _get(self, path: str) -> tuple[int, str]:
        connection = self._connect()
        try:
            connection.request("GET", self._base + path)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        return kind(self._parts.hostname, self._parts.port, timeout=self._timeout_s)


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each server-sent event, as it comes; an event may spread over several data lines."""
    data: list[str] = []
    while line := response.readline():
        text = line.decode().rstrip("\r\n")
        if text.startswith("data:"):
            data.append(text[5:].removeprefix(" "))
        elif not text and data:
            yield "\n".join(data)
            data = []
    if data:
        yield "\n".join(data)
