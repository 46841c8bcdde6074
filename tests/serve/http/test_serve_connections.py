"""Clients that hang up, die, read slowly or are many; a server that is told to stop."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve import fake
from tests.serve.conftest import Running, running, wait_until

HERE = Path(__file__).parents[1]


def request_bytes(**body: Any) -> bytes:
    data = json.dumps({"prompt": "x", "seed": 0} | body).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + data


def streamed_text(raw: str) -> str:
    chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", []))


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    with running(fake.FakeBackend(step_s=0.01, max_num_seqs=64)) as handle:
        yield handle


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_aborts_within_a_step(slow: Running, stream: bool) -> None:
    before = len(slow.backend.aborted)
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        connection.sendall(request_bytes(max_tokens=4000, stream=stream))
        wait_until(lambda: slow.backend.running)
        if stream:
            assert b"200 OK" in connection.recv(4096)
    wait_until(lambda: not slow.backend.running, timeout_s=1.0)
    assert len(slow.backend.aborted) == before + 1


def test_a_killed_client_is_noticed(slow: Running) -> None:
    code = (
        f"import socket, time; s = socket.create_connection(('127.0.0.1', {slow.port}));"
        f"s.sendall({request_bytes(max_tokens=4000, stream=True)!r}); s.recv(100);"
        "print('reading', flush=True); time.sleep(60)"
    )
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert client.stdout is not None and client.stdout.readline() == b"reading\n"
    assert slow.backend.running
    client.kill()
    client.wait(5)
    client.stdout.close()
    wait_until(lambda: not slow.backend.running, timeout_s=1.0)


def test_a_slow_reader_gets_everything_and_delays_no_other() -> None:
    """It reads nothing for a second while its answer, far larger than its buffers, is generated."""
    length = 12_000
    backend = fake.FakeBackend(max_model_len=length + 100)
    prompt_text = fake.expected_text(list(b"x"), 0, 0, length)
    with running(backend) as handle, socket.socket() as connection, handle.client() as client:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", handle.port))
        connection.sendall(request_bytes(max_tokens=length, stream=True))
        wait_until(lambda: backend.running)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            client.post("/v1/completions", json={"prompt": "other", "max_tokens": 5}).raise_for_status()
        assert backend.running, "it was meant to be too slow for its stream"
        connection.settimeout(30)
        raw = b""
        while b"data: [DONE]" not in raw[-200:]:
            piece = connection.recv(1 << 16)
            assert piece, "the stream ended early"
            raw += piece
        assert _dechunked_text(raw) == prompt_text


def _dechunked_text(raw: bytes) -> str:
    _, _, rest = raw.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return streamed_text(body.decode())


def test_many_streams_are_not_mixed_up(slow: Running) -> None:
    async def one(client: httpx.AsyncClient, i: int) -> None:
        prompt = f"prompt number {i}"
        body = {"prompt": prompt, "seed": i, "max_tokens": 20 + i, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            text = streamed_text("\n".join([line async for line in answer.aiter_lines()]))
        assert text == fake.expected_text(list(prompt.encode()), i, 0, 20 + i)

    async def all_at_once() -> None:
        async with httpx.AsyncClient(base_url=slow.url, trust_env=False, timeout=20) as client:
            await asyncio.gather(*(one(client, i) for i in range(40)))

    asyncio.run(all_at_once())
    assert not slow.backend.running


class Process:
    """A server in a process of its own."""

    def __init__(self, step_s: float, drain_s: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        command = [sys.executable, str(HERE / "serve_fake.py"), str(self.port), str(step_s), str(drain_s)]
        environment = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent.parent}"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        wait_until(self._answers, timeout_s=30)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/ready", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def open_stream(self, max_tokens: int) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.settimeout(20)
        connection.sendall(request_bytes(max_tokens=max_tokens, stream=True))
        assert b"200 OK" in connection.recv(4096)
        return connection

    def finish(self) -> list[dict[str, Any]]:
        """Wait for the end; it must be a clean one. Returns the log."""
        _, errors = self.process.communicate(timeout=20)
        assert self.process.returncode == 0, errors
        return [json.loads(line) for line in errors.splitlines()]


def read_all(connection: socket.socket) -> str:
    data = b""
    with connection:
        while piece := connection.recv(1 << 16):
            data += piece
    return data.decode()


def test_sigterm_lets_streams_finish_and_ends_those_that_take_too_long() -> None:
    server = Process(step_s=0.02, drain_s=1.0)
    short = server.open_stream(max_tokens=60)
    long = [server.open_stream(max_tokens=4000) for _ in range(3)]
    server.process.send_signal(signal.SIGTERM)
    raw = read_all(short)
    assert '"finish_reason":"length"' in raw and "data: [DONE]" in raw
    for stream in long:
        raw = read_all(stream)
        assert '"code": "shutdown"' in raw and "data: [DONE]" in raw
    log = server.finish()
    assert log[-1]["event"] == "stopped" and log[-1]["integrity"] == "clean"


def test_a_shutdown_does_not_wait_for_a_reader_that_is_stuck() -> None:
    backend = fake.FakeBackend(max_model_len=100_000)
    with running(backend, drain_timeout_s=0.1) as handle, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", handle.port))
        connection.sendall(request_bytes(max_tokens=90_000, stream=True))
        wait_until(lambda: backend.running)
        known = 0.0
        while (sent := handle.server._service.metrics.generation_tokens.total()) > known:  # until every buffer is full
            known = sent
            time.sleep(0.1)
        begin_s = time.monotonic()
        handle.stop()
        assert time.monotonic() - begin_s < 8
    assert not backend.running


def test_an_answer_before_the_end_of_the_body_says_that_the_connection_closes() -> None:
    with running(fake.FakeBackend(), max_body_bytes=2000) as handle:
        for extra in (b"Content-Length: 9999\r\n", b"Transfer-Encoding: chunked\r\n"):
            with socket.create_connection(("127.0.0.1", handle.port), timeout=5) as connection:
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                connection.sendall(head + extra + b"\r\n")
                if b"chunked" in extra:
                    connection.sendall(b"BB8\r\n" + b" " * 3000 + b"\r\n")
                answer = b""
                while piece := connection.recv(4096):
                    answer += piece
                assert b" 413 " in answer.splitlines()[0] and b"connection: close" in answer.lower()
        whole = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )
        with socket.create_connection(("127.0.0.1", handle.port), timeout=5) as connection:
            connection.sendall(whole)
            answer = connection.recv(65536)
            assert b" 4" in answer.splitlines()[0] and b"connection: close" not in answer.lower()
