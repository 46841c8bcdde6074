"""Workers as processes of this machine: started together, started again when they die, ended with their parent.

A worker says in one line of JSON on its standard output where it listens, once it is ready, and ends when its standard
input does: so none outlives the process that started it, however that ended.
"""

import contextlib
import itertools
import json
import logging
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError

logger = logging.getLogger("paceline.cluster")
REFUSED = 3  # exit code of a worker that may not join: it is not started again
POLL_S = 0.1
END_TIMEOUT_S = 10.0
LONGEST_PAUSE_S = 30.0  # before one that keeps dying is started again
SOUND_S = 20.0  # one that lived for so long did not die of its start: the next one comes at once


class WorkerStartError(PacelineError):
    """A worker process ended before it was ready."""


@dataclass(slots=True)
class LocalWorker:
    name: str
    role: str
    command: Sequence[str]  # `paceline cluster worker ...`, or what understands the same options
    port: int = 0
    process: "subprocess.Popen[str] | None" = None
    begin_s: float = 0.0
    due_s: float | None = None  # when it is started again, once it was seen to have ended
    num_quick_ends: int = 0  # in a row
    is_leaving: bool = False  # it drains, and does not come back

    def start(self) -> None:
        own = ["--worker-name", self.name, "--role", self.role, "--listen", f"127.0.0.1:{self.port}"]
        command = [*self.command, *own, "--end-with-stdin"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends its workers
        )
        self.begin_s, self.due_s = time.monotonic(), None

    def wait_ready(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise WorkerStartError(f"worker {self.name} ended with code {self.process.wait()} before it was ready")
        self.port = json.loads(line)["port"]

    def plan_restart(self, now_s: float) -> None:
        """At once where it lived for a while; one that keeps dying waits twice as long each time."""
        self.num_quick_ends = self.num_quick_ends + 1 if now_s - self.begin_s < SOUND_S else 0
        pause_s = min(LONGEST_PAUSE_S, 2.0 ** (self.num_quick_ends - 2)) if self.num_quick_ends > 1 else 0.0
        self.due_s = now_s + pause_s

    def end(self) -> None:
        process = self.process
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


class LocalWorkers:
    def __init__(self, workers: Sequence[LocalWorker]) -> None:
        self.workers = list(workers)
        self._numbers = itertools.count(len(self.workers))  # for names that nobody has had
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-workers", daemon=True)

    def start(self) -> None:
        """Returns when all are ready; ends all when one is not."""
        try:
            for worker in self.workers:
                worker.start()
            for worker in self.workers:
                worker.wait_ready()
        except BaseException:
            self.end()
            raise
        self._thread.start()

    def addresses(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", worker.port) for worker in list(self.workers)]

    def scale(self, role: str, count: int) -> None:
        """So many workers of a role from now on. New ones are ready when this returns; those that go drain first."""
        live = [worker for worker in list(self.workers) if worker.role == role and not worker.is_leaving]
        for worker in live[count:]:
            worker.is_leaving = True
            if worker.process is not None:
                worker.process.terminate()
        for _ in range(count - len(live)):
            new = LocalWorker(f"{role}-{next(self._numbers)}", role, self.workers[0].command)
            new.start()
            new.wait_ready()
            self.workers.append(new)

    def end(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        threads = [threading.Thread(target=worker.end) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(POLL_S):
            for worker in list(self.workers):
                self._look_at(worker, time.monotonic())

    def _look_at(self, worker: LocalWorker, now_s: float) -> None:
        process = worker.process
        if process is None or process.poll() is None or process.returncode == REFUSED:
            return
        if worker.is_leaving:
            worker.end()
            self.workers.remove(worker)
            return
        if worker.due_s is None:
            worker.plan_restart(now_s)
        if worker.due_s is not None and now_s >= worker.due_s:
            logger.warning("worker %s ended with code %s: it is started again", worker.name, process.returncode)
            worker.end()
            worker.start()  # at the port it had: the server connects to it again by itself
