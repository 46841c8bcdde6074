"""Clients of other people, run in a process of their own against our server.

They may be installed beside us, or, because some pin what we need in another version, in an environment of their own:
PACELINE_CLIENTS_PYTHON names its interpreter. What is not there is skipped, and says so.
"""

import contextlib
import functools
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

PYTHON_VARIABLE = "PACELINE_CLIENTS_PYTHON"
ROOT = Path(__file__).parents[2]


@functools.cache
def has(module: str) -> bool:
    if PYTHON_VARIABLE not in os.environ:
        return importlib.util.find_spec(module) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([interpreter(), "-c", code], check=False, env=environment()).returncode == 0


def interpreter() -> str:
    return os.environ.get(PYTHON_VARIABLE, sys.executable)


def needs(module: str, package: str) -> pytest.MarkDecorator:
    reason = f"{package} is not installed: pip install {package}, or name an interpreter that has it: {PYTHON_VARIABLE}"
    return pytest.mark.skipif(not has(module), reason=reason)


def environment(**more: str) -> dict[str, str]:
    """Without our own package on the path, and without a network."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and "proxy" not in name.lower()}
    return own | {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "NO_PROXY": "127.0.0.1"} | more


def run_client(code: str, *arguments: str, timeout_s: float = 120, **variables: str) -> Any:
    """The client's program; what it prints as its last line is JSON."""
    done = subprocess.run(
        [interpreter(), "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(**variables),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@contextlib.contextmanager
def served(*flags: str, model: str = "smollm2-135m") -> Iterator[str]:
    """The URL of a real server over the default model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "paceline", "serve", model, "--port", str(port), *flags]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)})
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                    break
            assert server.poll() is None, "the server ended"
            time.sleep(0.25)
        yield url
    finally:
        server.terminate()
        server.wait(30)


def npm_folder(package: str) -> Path | None:
    """Where node finds the package: NODE_PATH, or what `make test-clients` installs."""
    if shutil.which("node") is None:
        return None
    places = [*os.environ.get("NODE_PATH", "").split(os.pathsep), str(Path(__file__).parent / "node" / "node_modules")]
    return next((Path(place) for place in places if place and (Path(place) / package).is_dir()), None)
