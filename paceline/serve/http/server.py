"""uvicorn around the application, and a shutdown that leaves no stream hanging.

On SIGTERM or SIGINT: no new connections, new calls are told 503, open streams may finish; a stream that is not done
after `drain_timeout_s` gets an error as its last event. Then the engine stops and its KV blocks are counted.

When the engine itself dies (a broken model, no memory left) all streams end with an error, and the process ends too: a
supervisor can start another one; this one cannot be repaired.
"""

import asyncio
import logging
import math
import signal
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from paceline.serve.config import ServerConfig
from paceline.serve.generate.served_engine import ServedEngine
from paceline.serve.generate.service import Service
from paceline.serve.http.app import create_app
from paceline.serve.http.connection import limited_protocol
from paceline.serve.http.logs import configure_logging, log

DEATH_GRACE_S = 2.0  # after the engine died: for clients and health checks to hear of it
BACKSTOP_S = 2.0  # after the drain: for a reader that does not even take the last event


class GracefulServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._dead_since_s: float | None = None
        self.config.timeout_graceful_shutdown = math.ceil(service.config.drain_timeout_s + BACKSTOP_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As uvicorn's own, but the signal is spent here: after the server the engine is still to be stopped."""
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Asked ten times a second whether to stop."""
        if self._service.engine_dead and self._dead_since_s is None:
            self._dead_since_s = time.monotonic()
        if self._dead_since_s is not None and time.monotonic() - self._dead_since_s > DEATH_GRACE_S:
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        gate = self._service.gate
        log("draining", num_requests=gate.num_requests)
        gate.drain()
        timer = asyncio.get_running_loop().call_later(self._service.config.drain_timeout_s, gate.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            for connection in list(self.server_state.connections):
                connection.transport.abort()  # its reader is stuck: what it has not taken is dropped
            await asyncio.sleep(0)  # the loop closes the sockets


def server_options(app: FastAPI, config: ServerConfig, host: str = "127.0.0.1", port: int = 0) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=limited_protocol(config, app.state.pace),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
    )


def run_server(backend: ServedEngine, config: ServerConfig, host: str, port: int, log_level: str = "info") -> int:
    """Serve until told to stop, or until the engine dies; 0 when every block of KV came back."""
    configure_logging(log_level)
    app = create_app(backend, config)
    options = server_options(app, config, host, port)
    log(
        "starting",
        model=config.model_names[0],
        host=host,
        port=port,
        keys=len(config.api_keys),
        sampling_defaults=dict(backend.default_sampling),  # of requests that say nothing: --generation-config
    )
    GracefulServer(options, app.state.service).run()
    backend.shutdown()
    if app.state.service.engine_dead:
        log("stopped", level=logging.CRITICAL, engine="dead")
        return 1
    try:
        backend.check_integrity()
    except AssertionError as error:
        log("stopped", level=logging.ERROR, integrity="broken", error=error)
        return 1
    log("stopped", integrity="clean")
    return 0
