"""The processes of `hostile.py`: the server under attack, the attackers, and what they take of the machine."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FRIEND_KEY, ATTACKER_KEY = "hostile-friend", "hostile-attacker"
ANSWER_LIMIT_S = 60.0  # after which a server that stays silent counts as dead


class Server:
    def __init__(self, model: str, num_kv_blocks: int, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._command = [sys.executable, "-m", "paceline", "serve", model, "--port", str(self.port)]
        self._command += ["--num-kv-blocks", str(num_kv_blocks)]
        self._log = log
        log.write_bytes(b"")

    async def start(self) -> None:
        """A restart keeps the port: clients come back by themselves."""
        environment = os.environ | {"PACELINE_API_KEY": f"{FRIEND_KEY},{ATTACKER_KEY}"}
        with self._log.open("a") as sink:
            self._process = subprocess.Popen(self._command, stderr=sink, env=environment)
        deadline_s = time.monotonic() + 300
        while await self.health_status() != 200:
            alive = self._process.poll() is None and time.monotonic() < deadline_s
            assert alive, f"the server did not start: {self._log.read_text()[-2000:]}"
            await asyncio.sleep(0.2)

    async def health_status(self) -> int:
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    writer.write(b"GET /health HTTP/1.1\r\nHost: friend\r\nConnection: close\r\n\r\n")
                    return int((await reader.readline()).split()[1])
                finally:
                    writer.close()
        except (OSError, IndexError):  # a timeout is an OSError
            return 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exited(self) -> bool:
        return self._process.poll() is not None

    def memory_mib(self) -> tuple[float, float]:
        """Resident now, and at its highest since `forget_peak`."""
        fields: dict[str, float] = {}
        with contextlib.suppress(OSError):
            for row in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
                name, _, value = row.partition(":")
                if value.endswith(" kB"):
                    fields[name] = int(value.split()[0]) / 1024
        return fields.get("VmRSS", 0.0), fields.get("VmHWM", 0.0)

    def forget_peak(self) -> None:
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    async def stop(self, how: int = signal.SIGTERM) -> int:
        if not self.exited:
            self._process.send_signal(how)
        return await asyncio.to_thread(self._process.wait, 60)


class Attackers:
    """The process of hostile_attacks.py."""

    async def start(self, port: int, names: Sequence[str]) -> None:
        program = str(Path(__file__).with_name("hostile_attacks.py"))
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, program, str(port), *names, stdin=pipe, stdout=pipe,
            env=os.environ | {"HOSTILE_KEY": ATTACKER_KEY},
        )  # fmt: skip
        self.pid = self._process.pid
        await self._read()  # it says that it is ready

    async def attack(self, name: str, seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"attack": name, "seconds": seconds}).encode() + b"\n")
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        row = await self._process.stdout.readline()
        assert row, "the attackers' process ended"
        result: dict[str, Any] = json.loads(row)
        return result

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


def cpu_ticks(pids: Iterable[int]) -> tuple[int, int, int]:
    """Of all cores, of those at work, and of these processes."""
    ticks = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    ours = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ours += int(fields[11]) + int(fields[12])  # in user mode, in the kernel
    return sum(ticks), sum(ticks) - ticks[3] - ticks[4], ours


def others_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Of the CPU. Where other programs took much of it, the times say little about the server."""
    total, busy, ours = (later - earlier for earlier, later in zip(before, after, strict=True))
    return max(0, busy - ours) / max(total, 1)
