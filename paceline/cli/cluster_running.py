"""`paceline cluster status`, `restart` and `down`: of a cluster that `up` started on this machine.

While a cluster runs, a small file in the temporary folder says where it is.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidOptionError

if TYPE_CHECKING:
    from paceline.cluster.backend import Address

DOWN_TIMEOUT_S = 60.0
RESTART_TIMEOUT_S = 300.0  # of one worker: 60 for its streams, and its model has to be loaded
POLL_S = 0.1


def add_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8000, help="of the cluster's server (default: %(default)s)")


class StateFile:
    """Where the cluster at a port of this machine is, for as long as it runs."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.path = Path(tempfile.gettempdir()) / f"paceline-cluster-{os.getuid()}-{port}.json"

    @contextlib.contextmanager
    def held(self) -> Iterator["StateFile"]:
        """From before the first worker starts until the last one has ended."""
        if self.read() is not None:
            raise InvalidOptionError(
                f"a cluster runs at port {self.port} already: paceline cluster down --port {self.port}"
            )
        self.write([])
        try:
            yield self
        finally:
            self.path.unlink(missing_ok=True)

    def write(self, workers: "Sequence[Address]") -> None:
        self.path.write_text(json.dumps({"pid": os.getpid(), "port": self.port, "workers": list(workers)}))

    def read(self) -> dict[str, Any] | None:
        """What it says, where it is ours and its process lives."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            if self.path.stat().st_uid != os.getuid():
                return None
            state: dict[str, Any] = json.loads(self.path.read_text())
            return state if _lives(state["pid"]) else None
        return None


def run_status(args: argparse.Namespace) -> int:
    from paceline.cli.lab import format_table

    state = StateFile(args.port).read()
    if state is None:
        print(f"no cluster runs at port {args.port}")
        return 1
    if not state["workers"]:
        print(f"the cluster at port {args.port} is starting: process {state['pid']}")
        return 0
    rows = asyncio.run(_rows([(host, port) for host, port in state["workers"]]))
    print(f"http://127.0.0.1:{state['port']}  process {state['pid']}\n")
    print(format_table(rows))
    return 0


async def _rows(addresses: "list[Address]") -> list[dict[str, Any]]:
    from paceline.cluster.status import worker_row

    rows = []
    for host, port in addresses:
        found = await _answer(host, port)
        rows.append(worker_row(found) if found else {"worker": f"{host}:{port}", "role": "not reachable"})
    return sorted(rows, key=len, reverse=True)


def run_restart(args: argparse.Namespace) -> int:
    """One worker after another: the next when the one before it answers again. Its streams finish first."""
    from paceline.cluster.status import ask

    state = StateFile(args.port).read()
    if state is None:
        print(f"no cluster runs at port {args.port}")
        return 1
    for host, port in state["workers"]:
        before = asyncio.run(ask(host, port))
        os.kill(before["pid"], signal.SIGTERM)
        end_s = time.monotonic() + RESTART_TIMEOUT_S
        while (now := asyncio.run(_answer(host, port))) is None or now["pid"] == before["pid"]:
            if time.monotonic() > end_s:
                print(f"worker {before['worker_id']} has not come back", file=sys.stderr)
                return 1
            time.sleep(POLL_S)
        print(f"{before['worker_id']}: process {now['pid']} instead of {before['pid']}", flush=True)
    return 0


async def _answer(host: str, port: int) -> dict[str, Any] | None:
    from paceline.cluster.status import ask
    from paceline.errors import PacelineError

    try:
        return await ask(host, port)
    except PacelineError:
        return None


def run_down(args: argparse.Namespace) -> int:
    """Returns when the server and all its workers have ended."""
    file = StateFile(args.port)
    state = file.read()
    if state is None:
        print(f"no cluster runs at port {args.port}")
        return 1
    os.kill(state["pid"], signal.SIGTERM)
    end_s = time.monotonic() + DOWN_TIMEOUT_S
    while file.read() is not None or _lives(state["pid"]):
        if time.monotonic() > end_s:
            print(f"process {state['pid']} has not ended: its streams may still drain", file=sys.stderr)
            return 1
        time.sleep(POLL_S)
    print(f"the cluster at port {args.port} has ended")
    return 0


def _lives(pid: int) -> bool:
    """Not one that has ended and that its parent has not looked at yet."""
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    return False
