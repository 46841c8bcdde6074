"""Any OpenAI-compatible server: streamed completions over HTTP, and vLLM's speculation counters from /metrics.

One thread per running request reads the server-sent events as they come, over httpx (extra `bench`). Every request has
a connection of its own, and nothing is compressed: what is timed is the server. Tokens are counted by the server
(`stream_options.include_usage`): with speculation one event may hold several of them.
"""

import asyncio
import hashlib
import json
import ssl
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline.bench.run.backend import Answer, Sampling
from paceline.bench.run.server_counters import speculation_counts
from paceline.bench.workloads.workload import Prompt
from paceline.core.draft_counts import DraftCounts
from paceline.errors import InvalidOptionError, MissingExtraError

try:
    import httpx
except ImportError as error:
    raise MissingExtraError("measuring a server", "httpx", "bench") from error

MAX_REQUESTS_AT_ONCE = 1024


class UrlBackend:
    def __init__(self, url: str, model: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = url
        self._client = httpx.Client(
            base_url=_base_of(url),
            headers={"Accept-Encoding": "identity"},
            timeout=timeout_s,  # of each wait for the server, not of a whole answer
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            verify=ssl.create_default_context(),
            trust_env=False,  # no proxy between the clock and the server
        )
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
            path, body["messages"] = "v1/chat/completions", prompt.messages
        else:
            path, body["prompt"] = "v1/completions", prompt.text
        if prompt.schema is not None:  # the answer ends where its schema does
            schema = {"name": "answer", "strict": True, "schema": json.loads(prompt.schema)}
            body |= {"ignore_eos": False, "response_format": {"type": "json_schema", "json_schema": schema}}
        try:
            self._stream(path, body, answer)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    def _stream(self, path: str, body: dict[str, Any], answer: Answer) -> None:
        text: list[str] = []
        done = False
        with self._client.stream("POST", path, json=body, headers={"Accept": "text/event-stream"}) as response:
            if response.status_code != 200:
                shown = next(response.iter_bytes(500), b"").decode(errors="replace")
                raise ValueError(f"HTTP {response.status_code}: {shown}")
            for data in _events(response.iter_bytes()):
                if data == "[DONE]":
                    done = True
                    break
                self._take_event(json.loads(data), answer, text)
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
            page = self._client.get("metrics")
        except httpx.HTTPError:
            return None
        return speculation_counts(page.text) if page.status_code == 200 else None

    def figures(self) -> dict[str, float]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {"backend": "url", "url": self.url, "model": self.model}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _first_model(self) -> str:
        try:
            answer = self._client.get("v1/models")
            if answer.status_code != 200:
                raise ValueError(f"HTTP {answer.status_code}")
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            self.close()
            raise InvalidOptionError(f"no OpenAI-compatible server answers at {self.url}: {error}") from error


def _base_of(url: str) -> httpx.URL:
    try:
        base = httpx.URL(url if "//" in url else f"http://{url}")
    except httpx.InvalidURL as error:
        raise InvalidOptionError(f"a server's URL is such as http://localhost:8000, got {url!r}: {error}") from error
    if base.scheme not in ("http", "https") or not base.host:
        raise InvalidOptionError(f"a server's URL is such as http://localhost:8000, got {url!r}")
    return base.copy_with(path=base.path.rstrip("/").removesuffix("/v1") + "/", query=None)


def _events(chunks: Iterable[bytes]) -> Iterator[str]:
    """The data of each server-sent event, as it comes; an event may spread over several data lines."""
    data: list[str] = []
    for line in _lines(chunks):
        text = line.decode().rstrip("\r\n")
        if text.startswith("data:"):
            data.append(text[5:].removeprefix(" "))
        elif not text and data:
            yield "\n".join(data)
            data = []
    if data:
        yield "\n".join(data)


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Split at newlines alone. httpx's `iter_lines` also splits at U+2028 and others, which JSON has inside strings."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest
