"""A server over the fake engine: in process for routes, on a real port where connections matter."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from paceline.serve.config import ServerConfig
from paceline.serve.generate.service import Service
from paceline.serve.http.app import create_app
from paceline.serve.http.server import GracefulServer, server_options
from tests.serve import fake


@dataclass
class Running:
    """A server on a loopback port, and what is behind it."""

    backend: fake.FakeBackend
    server: GracefulServer
    service: Service
    thread: threading.Thread
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, timeout=20, **options)  # type: ignore[arg-type]

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(backend: fake.FakeBackend, **options: object) -> Iterator[Running]:
    options = {"max_rate_per_client": 1e6} | options  # tests ask faster than any client should
    config = ServerConfig(("fake", "other-name"), **options)  # type: ignore[arg-type]
    app = create_app(backend, config)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # so that a slow reader is felt soon
    server = GracefulServer(server_options(app, config), app.state.service)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    handle = Running(backend, server, app.state.service, thread, listener.getsockname()[1])
    wait_until(lambda: server.started)
    try:
        yield handle
    finally:
        handle.stop()
        listener.close()


def wait_until(condition: object, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(fake.FakeBackend()) as handle:
        yield handle


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
