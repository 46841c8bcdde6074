"""A headless Chromium, driven over WebDriver's plain HTTP."""

import base64
import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,1000",
)  # fmt: skip


def missing() -> str | None:
    """Why no browser test can run here; None where it can."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not installed (Debian: chromium chromium-driver)" if absent else None


class Browser:
    def __init__(self, driver: httpx.Client, session: str) -> None:
        self._driver = driver
        self._base = f"/session/{session}"

    def _post(self, path: str, **body: Any) -> Any:
        answer = self._driver.post(self._base + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def open(self, url: str) -> None:
        self._post("/url", url=url)

    def run(self, script: str) -> Any:
        return self._post("/execute/sync", script=script, args=[])

    def wait_for(self, expression: str, timeout_s: float = 20.0) -> Any:
        """The first true value of a JavaScript expression."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(f"return {expression}")):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)
        return value

    def console(self) -> list[dict[str, Any]]:
        """What the page wrote to the console, loading errors included."""
        lines: list[dict[str, Any]] = self._post("/se/log", type="browser")
        return lines

    def screenshot(self, path: Path) -> None:
        answer = self._driver.get(self._base + "/screenshot")
        path.write_bytes(base64.b64decode(answer.json()["value"]))


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            ["chromedriver", f"--port={port}", "--log-level=OFF"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as driver:
                session = _session(driver, folder)
                try:
                    yield Browser(driver, session)
                finally:
                    driver.delete(f"/session/{session}")
        finally:
            process.terminate()
            process.wait(10)


def _session(driver: httpx.Client, folder: str) -> str:
    deadline = time.monotonic() + 20
    while True:
        try:
            if driver.get("/status").json()["value"]["ready"]:
                break
        except httpx.TransportError:
            assert time.monotonic() < deadline, "chromedriver did not start"
            time.sleep(0.05)
    options = {"args": [*FLAGS, f"--user-data-dir={folder}"]}
    wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    answer = driver.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["value"]["sessionId"])
