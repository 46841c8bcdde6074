"""Friendly streams beside attackers: does anybody notice? A real server, on loopback only; Linux.

    python benchmarks/hostile.py [--seconds 600] [--streams 16] [--attack NAME ...] [--json FILE]

Friendly clients read greedy and seeded answers, back to back, each under a `cache_salt` of its own: otherwise the
drafters would know the repeated answers by heart, and passes of hundreds of draft rows would hide what an attack adds.
Attacks (hostile_attacks.py) take turns beside them, with quiet slices in between. Every friendly text must be the one
that the quiet server gave before. A gap between two events of a stream counts for the attack under way when the later
one came; a slice ends only once every friendly stream was heard again. A server that died is started again, and the run
goes on. The server's pool of keys and values is small: it fills up as a cache does, and what else grows is to show.

| column         | meaning                                                                                     |
|----------------|---------------------------------------------------------------------------------------------|
| p50 .. longest | gaps between two events of a friendly stream                                                |
| added, over    | longest gap less the longest quiet one (`before`, `none`); gaps more than 50 ms above it    |
| first, health  | longest wait for a first event, and for `/health`, asked every 50 ms on a new connection    |
| stall, others  | how late the measuring process was at worst; share of the CPU that other programs took      |
| right, bad     | friendly answers; the bad ones were wrong or lost                                           |
| MiB, peak      | what the memory of the server grew by, and its highest                                      |

Prints a table, then one JSON line. The exit code is 1 where a target was missed.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hostile_attacks import ATTACKS
from serve_client import stream

from paceline.bench.run.provenance import provenance

BEFORE, QUIET, WARM_UP = "before", "none", "warm-up"  # slices without an attack; those of the warm-up count for nothing
WARM_UP_S = 5.0
QUIET_EVERY = 4  # attacks: all quiet slices together are long enough for a rare gap of the machine's own to show
MAX_ADDED_GAP_S, MAX_HEALTH_S, MAX_GROWTH = 0.05, 0.1, 0.10  # targets
SETTLE_S, SETTLE_LIMIT_S = 0.3, 60.0  # after a slice: at least, and at most where streams stay silent
PROBE_S, HEARTBEAT_S, DEAD_S = 0.05, 0.005, 5.0
MEMORY_SETTLED_S = 300.0
SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "longest": 1.0}  # of the gaps, in order of length
FRIEND_KEY, ATTACKER_KEY = "hostile-friend", "hostile-attacker"

TEXTS = (
    "Explain to a child why the sea is salty, and where all that salt comes from.",
    "def moving_average(values, width):\n",
    "Write a letter to a neighbour who lent you a ladder two years ago and now wants it back.",
    "Once upon a time, in a lighthouse at the end of the pier, ",
    "List the steps of baking bread. Give each a line of its own, and say how long it takes.",
    "Repeat after me: one red kite, two red kites, three red kites, one red kite, two red kites, ",
    "What happens to a drop of rain between the cloud and the tap? Answer in short sentences.",
    '{"name": "Ada", "city": "London", "age": 36}\n{"name": "Emmy", "city": ',
)


def friendly_requests() -> list[dict[str, Any]]:
    """Chats and completions, greedy and seeded, 48 to 128 tokens long whatever the model would like."""
    requests = []
    for number, text in enumerate(TEXTS * 2):
        prompt = {"messages": [{"role": "user", "content": text}]} if number % 2 == 0 else {"prompt": text}
        sampled = {"temperature": 0.0} if number < len(TEXTS) else {"temperature": 0.8, "seed": number}
        requests.append({**prompt, **sampled, "max_tokens": 48 + 16 * (number % 6), "ignore_eos": True})
    return requests


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
            async with asyncio.timeout(SETTLE_LIMIT_S):
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


class Slices:
    """What was under way when; every time measured is given to one attack."""

    def __init__(self) -> None:
        self._begins_s: list[float] = []
        self._names: list[str] = []
        self._samples: dict[str, list[tuple[float, float]]] = defaultdict(list)  # kind -> (time, seconds)

    def begin(self, name: str) -> None:
        self._begins_s.append(time.perf_counter())
        self._names.append(name)

    def at(self, time_s: float) -> str:
        return self._names[max(0, bisect_right(self._begins_s, time_s) - 1)]

    def add(self, kind: str, end_s: float, seconds: float) -> None:
        self._samples[kind].append((end_s, seconds))

    def of(self, kind: str) -> dict[str, list[float]]:
        """Attack -> seconds, sorted."""
        found: dict[str, list[float]] = defaultdict(list)
        for end_s, seconds in self._samples[kind]:
            found[self.at(end_s)].append(seconds)
        return {name: sorted(values) for name, values in found.items()}


class Trial:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.server = Server(args.model, args.num_kv_blocks, Path(args.log))
        self.attackers = Attackers()
        self.slices = Slices()
        self.salts = itertools.count()
        self.up = asyncio.Event()  # the latest probe was answered with 200
        self.up.set()
        self.down_since_s = 0.0
        self.over = False
        self.heard = [asyncio.Event() for _ in range(args.streams)]  # set at every event of a friend's stream
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.wrong: list[str] = []
        self.answers: dict[str, Counter[str]] = defaultdict(Counter)  # that attackers got
        self.samples: dict[str, list[str]] = defaultdict(list)  # of 5xx
        self.memory: list[tuple[float, float]] = []  # (time, MiB) since the last start of the server
        self.rss_mib: dict[str, list[tuple[float, float, float]]] = defaultdict(list)  # each slice: before, after, peak
        self.deaths: list[dict[str, Any]] = []
        self.others: dict[str, list[float]] = defaultdict(list)  # share of the CPU that other processes took
        self.held: dict[str, Any] = {}

    async def run(self) -> dict[str, Any]:
        names = self.args.attack or list(ATTACKS)
        groups = [names[at : at + QUIET_EVERY] for at in range(0, len(names), QUIET_EVERY)]
        order = [name for group in groups for name in (QUIET, *group)]
        slice_s = min(5.0, max(1.0, self.args.seconds / (3 * len(order)) - 2 * SETTLE_S))
        await self.server.start()
        try:
            requests = friendly_requests()
            note("reference answers of the quiet server")
            truths = [await stream(self.server.port, request, key=FRIEND_KEY) for request in requests]
            assert all(truth.ended == "length" for truth in truths), [truth.ended for truth in truths]
            await self.attackers.start(self.server.port, names)
            self.slices.begin(WARM_UP)
            known = [(request, truth.text) for request, truth in zip(requests, truths, strict=True)]
            async with asyncio.TaskGroup() as group:
                friends = [group.create_task(self.friend(number, known)) for number in range(self.args.streams)]
                watchers = [group.create_task(task) for task in (self.probe(), self.heartbeat(), self.watch_memory())]
                await asyncio.sleep(WARM_UP_S)
                await self.turn(BEFORE, min(30.0, self.args.seconds / 20))
                await self.take_turns(order, slice_s)
                self.over = True  # what was begun is read to its end: no answer goes unchecked
                _, hanging = await asyncio.wait(friends, timeout=SETTLE_LIMIT_S)
                self.outcomes[QUIET]["lost: never ended"] += len(hanging)
                for task in (*hanging, *watchers):
                    task.cancel()
            await self.attackers.stop()
            return self.result(order, slice_s, await self.server.stop())
        finally:
            await self.server.stop(signal.SIGKILL)

    async def take_turns(self, order: Sequence[str], slice_s: float) -> None:
        begin_s = time.perf_counter()
        for turn, name in enumerate(itertools.cycle(order)):
            if time.perf_counter() - begin_s > self.args.seconds and turn >= len(order):
                break
            await self.turn(name, slice_s)
        self.slices.begin(QUIET)

    async def turn(self, name: str, seconds: float) -> None:
        self.slices.begin(name)
        self.server.forget_peak()
        before_mib, cpu = self.server.memory_mib()[0], self.cpu_ticks()
        if name in ATTACKS:
            told = await self.attackers.attack(name, seconds)
            self.answers[name].update(told["answers"])
            self.samples[name] += told["samples"]
            self.held = told["held"]
        else:
            await asyncio.sleep(seconds)
        if await self.settle(name):
            self.others[name].append(others_share(cpu, self.cpu_ticks()))
            self.rss_mib[name].append((before_mib, *self.server.memory_mib()))

    def cpu_ticks(self) -> tuple[int, int, int]:
        """Of all cores, of those at work, and of our three processes."""
        ticks = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        ours = 0
        for pid in (os.getpid(), self.server.pid, self.attackers.pid):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ours += int(fields[11]) + int(fields[12])  # in user mode, in the kernel
        return sum(ticks), sum(ticks) - ticks[3] - ticks[4], ours

    async def settle(self, name: str) -> bool:
        """Until the server answers and every friend was heard, so that no attack is blamed for the one before it.
        False where the server had to be started again."""
        end_s = time.perf_counter() + SETTLE_LIMIT_S
        await asyncio.sleep(SETTLE_S)
        for event in self.heard:
            event.clear()
        while not (self.up.is_set() and all(event.is_set() for event in self.heard)):
            now_s = time.perf_counter()
            down = not self.up.is_set() and now_s - self.down_since_s > DEAD_S
            if self.server.exited or down or now_s > end_s:
                await self.revive(name)
                return False
            await asyncio.sleep(0.02)
        return True

    async def revive(self, name: str) -> None:
        how = "exited" if self.server.exited else "unhealthy" if not self.up.is_set() else "streams silent"
        note(f"the server died under {name!r} ({how}): starting it again")
        self.up.clear()
        self.deaths.append({"attack": name, "how": how, "exit_code": await self.server.stop(signal.SIGKILL)})
        await self.server.start()
        self.memory.clear()
        self.up.set()
        self.slices.begin(WARM_UP)
        await asyncio.sleep(WARM_UP_S)

    async def friend(self, number: int, known: Sequence[tuple[dict[str, Any], str]]) -> None:
        for request, truth in itertools.islice(itertools.cycle(known), number, None):
            await self.up.wait()
            if self.over:
                return
            request = request | {"cache_salt": f"{number} {next(self.salts)}"}
            begin_s = time.perf_counter()
            try:
                answer = await stream(self.server.port, request, first=self.heard[number], key=FRIEND_KEY)
            except (OSError, IndexError, ValueError) as error:
                await self.lose(type(error).__name__)
                continue
            times_s = answer.event_s[:-2] if answer.ended == "length" else answer.event_s  # without usage and end mark
            if times_s:
                self.slices.add("first", times_s[0], times_s[0] - begin_s)
            for earlier_s, later_s in itertools.pairwise(times_s):
                self.slices.add("gap", later_s, later_s - earlier_s)
            if answer.ended != "length":
                await self.lose(f"{answer.status} {answer.ended}")
                continue
            right = answer.text == truth
            self.outcomes[self.slices.at(time.perf_counter())]["right" if right else "wrong"] += 1
            if not right:
                self.wrong.append(f"{answer.text!r} is not {truth!r}")

    async def lose(self, why: str) -> None:
        self.outcomes[self.slices.at(time.perf_counter())][f"lost: {why}"] += 1
        await asyncio.sleep(0.1)

    async def probe(self) -> None:
        while True:
            begin_s = time.perf_counter()
            status = await self.server.health_status()
            end_s = time.perf_counter()
            if status == 200:
                self.slices.add("health", end_s, end_s - begin_s)
                self.up.set()
            elif self.up.is_set():
                self.up.clear()
                self.down_since_s = begin_s
            await asyncio.sleep(max(0.0, begin_s + PROBE_S - end_s))

    async def heartbeat(self) -> None:
        while True:
            begin_s = time.perf_counter()
            await asyncio.sleep(HEARTBEAT_S)
            end_s = time.perf_counter()
            self.slices.add("stall", end_s, end_s - begin_s - HEARTBEAT_S)

    async def watch_memory(self) -> None:
        while True:
            self.memory.append((time.perf_counter(), self.server.memory_mib()[0]))
            await asyncio.sleep(1.0)

    def result(self, order: Sequence[str], slice_s: float, exit_code: int) -> dict[str, Any]:
        kinds = {kind: self.slices.of(kind) for kind in ("gap", "first", "health", "stall")}
        quiet_s = max(kinds["gap"].get(BEFORE, []) + kinds["gap"].get(QUIET, []), default=0.0)
        rows = {name: self.row(name, kinds, quiet_s) for name in dict.fromkeys((BEFORE, *order))}
        outcomes = sum(self.outcomes.values(), Counter())
        peak_mib = max((peak for slices in self.rss_mib.values() for *_, peak in slices), default=0.0)
        seen = [mib for _, mib in self.memory] or [0.0]
        half_s = (self.memory[-1][0] - self.memory[0][0]) / 2 if self.memory else 0.0
        settled_s = min(MEMORY_SETTLED_S, half_s)
        settled = [mib for at_s, mib in self.memory if at_s - self.memory[0][0] >= settled_s] or seen
        begin_mib, end_mib = statistics.median(settled[:5]), statistics.median(settled[-5:])
        return {
            "slice_s": slice_s,
            "attacks": rows,
            "right": outcomes["right"],
            "wrong": outcomes["wrong"],
            "lost": sum(count for what, count in outcomes.items() if what.startswith("lost")),
            "examples": self.wrong[:3],
            "deaths": self.deaths,
            "exit_code": exit_code,
            "held": self.held,
            "rss_mib": {"first": seen[0], "settled": begin_mib, "end": end_mib, "peak": peak_mib},
            "rss_growth": end_mib / max(begin_mib, 1.0) - 1,
        }

    def row(self, name: str, kinds: dict[str, dict[str, list[float]]], quiet_s: float) -> dict[str, Any]:
        measured = kinds["gap"].get(name, [])
        longest_s = measured[-1] if measured else None
        others = self.others[name]
        return {
            "kind": ATTACKS[name].kind if name in ATTACKS else "",
            "gaps": len(measured),
            "others_cpu": sum(others) / max(1, len(others)),
            "gap_s": {label: measured[int(share * (len(measured) - 1))] for label, share in SHARES.items() if measured},
            "added_gap_s": None if longest_s is None else longest_s - quiet_s,
            "over": sum(gap > quiet_s + MAX_ADDED_GAP_S for gap in measured),
            **{f"{kind}_s": max(kinds[kind].get(name) or [0.0]) for kind in ("first", "health", "stall")},
            "friends": dict(self.outcomes[name]),
            "answers": dict(self.answers[name]),
            "num_5xx": sum(count for status, count in self.answers[name].items() if status.startswith("5")),
            "samples_5xx": self.samples[name][:3],
            "rss_mib": self.rss_mib[name],
        }


def others_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Of the CPU. Where other programs took much of it, the times say little about the server."""
    total, busy, ours = (later - earlier for earlier, later in zip(before, after, strict=True))
    return max(0, busy - ours) / max(total, 1)


def note(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f}"


def report(result: dict[str, Any]) -> bool:
    """The table; True where every target was met."""
    columns = ("gaps", *SHARES, "added", "over", "first", "health", "stall", "others", "right", "bad", "MiB", "peak")
    print(f"{'attack (times in ms)':<23} {'kind':<5} {' '.join(f'{title:>7}' for title in columns)}  answers")
    for name, row in result["attacks"].items():
        gaps_s, friends = row["gap_s"], Counter(row["friends"])
        grown = sum(after - before for before, after, _ in row["rss_mib"])
        peak = max((peak for *_, peak in row["rss_mib"]), default=0.0)
        cells = [row["gaps"], *(ms(gaps_s.get(label)) for label in SHARES), ms(row["added_gap_s"]), row["over"]]
        cells += [ms(row[f"{kind}_s"]) for kind in ("first", "health", "stall")]
        cells += [
            f"{row['others_cpu']:.0%}",
            friends["right"],
            friends.total() - friends["right"],
            f"{grown:+.0f}",
            f"{peak:.0f}",
        ]
        answers = ", ".join(f"{count} x {status}" for status, count in row["answers"].items())
        print(f"{name:<23} {row['kind']:<5} {' '.join(f'{cell:>7}' for cell in cells)}  {answers}")
        for sample in row["samples_5xx"][:1]:
            print(f"    5xx: {sample}")
    rows = {name: row for name, row in result["attacks"].items() if name in ATTACKS}
    slow = [name for name, row in rows.items() if row["gaps"] == 0 or row["added_gap_s"] > MAX_ADDED_GAP_S]
    unhealthy = [name for name, row in rows.items() if row["health_s"] > MAX_HEALTH_S]
    failing = {name: row["num_5xx"] for name, row in rows.items() if row["num_5xx"]}
    memory, held, deaths = result["rss_mib"], result["held"], result["deaths"]
    grew = ", ".join(f"{mib:.0f} MiB {when}" for when, mib in memory.items())
    texts = f"{result['right']} right, {result['wrong']} wrong, {result['lost']} lost"
    checks = [
        line("texts", texts, result["right"] > 0 and result["wrong"] + result["lost"] == 0),
        line("added gap", f"over {1000 * MAX_ADDED_GAP_S:.0f} ms: {', '.join(slow) or 'none'}", not slow),
        line("health", f"over {1000 * MAX_HEALTH_S:.0f} ms: {', '.join(unhealthy) or 'none'}", not unhealthy),
        line("5xx", f"{failing or 'none'}", not failing),
        line(
            "server",
            f"died: {deaths or 'never'}, exit code {result['exit_code']}",
            not deaths and result["exit_code"] == 0,
        ),
        line("memory", f"{grew}: grew {result['rss_growth']:+.1%}", result["rss_growth"] <= MAX_GROWTH),
    ]
    if held and not deaths:
        closed = (
            f"the server closed {held['closed']} of {held['opened']}, the last after {held['longest_closed_s']:.0f} s"
        )
        print(f"slow connections kept through the run: {closed}")
    return all(checks)


def line(what: str, text: str, reached: bool) -> bool:
    print(f"{what:<12} {'ok    ' if reached else 'MISSED'} {text}")
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seconds", type=float, default=600, help="at least one turn of every attack")
    parser.add_argument("--streams", type=int, default=16, help="of friendly clients")
    parser.add_argument("--num-kv-blocks", type=int, default=2048, help="of the server's pool")
    parser.add_argument("--attack", action="append", choices=list(ATTACKS), metavar="NAME", help="only this one")
    parser.add_argument("--json", metavar="FILE", help="write the JSON line there too")
    parser.add_argument("--log", default="hostile-benchmark.log", help="the server's log")
    args = parser.parse_args()
    result = asyncio.run(Trial(args).run())
    reached = report(result)
    record = json.dumps({"result": result, **provenance(vars(args))})
    print(record)
    if args.json:
        Path(args.json).write_text(record + "\n")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
