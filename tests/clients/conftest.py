"""The real server on the default model, once for all clients.

The clients come with `make test-clients`, in an environment of their own: some of them need other versions of
libraries than the package's tools do. A client that is not there is skipped.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

MODEL = "smollm2-135m"
ROOT = Path(__file__).parent.parent.parent
START_S = 120.0  # a busy machine may take a minute to load the model


@pytest.fixture(scope="session")
def base_url(smollm2: Path) -> Iterator[str]:
    """Where the OpenAI API is."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--port", str(port), "--max-num-seqs", "4", "--log-level", "warning"]
    command = [sys.executable, "-m", "paceline", "serve", MODEL, *options]
    server = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, server)
        yield f"{url}/v1"
    finally:
        server.terminate()
        assert server.wait(60) == 0, "the server did not end well"


def _wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + START_S
    with httpx.Client(trust_env=False) as client:
        while True:
            assert server.poll() is None, f"the server ended with {server.returncode}"
            assert time.monotonic() < deadline_s, "the server did not start in time"
            try:
                if client.get(f"{url}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
