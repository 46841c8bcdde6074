"""A run of `hostile.py`: friendly streams all the time, attacks in turns beside them."""

import argparse
import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hostile_attacks import ATTACKS
from hostile_findings import BEFORE, QUIET, WARM_UP, Findings
from hostile_processes import ANSWER_LIMIT_S, FRIEND_KEY, Attackers, Server, cpu_ticks, others_share
from serve_client import stream

WARM_UP_S = 5.0
QUIET_EVERY = 4  # attacks: all quiet slices together are long enough for a rare gap of the machine's own to show
SETTLE_S, SETTLE_LIMIT_S = 0.3, ANSWER_LIMIT_S  # after a slice: at least, and at most where streams stay silent
PROBE_S, HEARTBEAT_S, DEAD_S = 0.05, 0.005, 5.0

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


class Trial:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.server = Server(args.model, args.num_kv_blocks, Path(args.log))
        self.attackers = Attackers()
        self.findings = Findings()
        self.salts = itertools.count()
        self.up = asyncio.Event()  # the latest probe was answered with 200
        self.up.set()
        self.down_since_s = 0.0
        self.over = False
        self.heard = [asyncio.Event() for _ in range(args.streams)]  # set at every event of a friend's stream

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
            self.findings.slices.begin(WARM_UP)
            known = [(request, truth.text) for request, truth in zip(requests, truths, strict=True)]
            async with asyncio.TaskGroup() as group:
                friends = [group.create_task(self.friend(number, known)) for number in range(self.args.streams)]
                watchers = [group.create_task(task) for task in (self.probe(), self.heartbeat(), self.watch_memory())]
                await asyncio.sleep(WARM_UP_S)
                await self.turn(BEFORE, min(30.0, self.args.seconds / 20))
                await self.take_turns(order, slice_s)
                self.over = True  # what was begun is read to its end: no answer goes unchecked
                _, hanging = await asyncio.wait(friends, timeout=SETTLE_LIMIT_S)
                self.findings.outcomes[QUIET]["lost: never ended"] += len(hanging)
                for task in (*hanging, *watchers):
                    task.cancel()
            await self.attackers.stop()
            return self.findings.result(order, slice_s, await self.server.stop())
        finally:
            await self.server.stop(signal.SIGKILL)

    async def take_turns(self, order: Sequence[str], slice_s: float) -> None:
        begin_s = time.perf_counter()
        for turn, name in enumerate(itertools.cycle(order)):
            if time.perf_counter() - begin_s > self.args.seconds and turn >= len(order):
                break
            await self.turn(name, slice_s)
        self.findings.slices.begin(QUIET)

    async def turn(self, name: str, seconds: float) -> None:
        self.findings.slices.begin(name)
        self.server.forget_peak()
        before_mib, cpu = self.server.memory_mib()[0], self.cpu_ticks()
        if name in ATTACKS:
            told = await self.attackers.attack(name, seconds)
            self.findings.answers[name].update(told["answers"])
            self.findings.samples[name] += told["samples"]
            self.findings.held = told["held"]
        else:
            await asyncio.sleep(seconds)
        if await self.settle(name):
            self.findings.others[name].append(others_share(cpu, self.cpu_ticks()))
            self.findings.rss_mib[name].append((before_mib, *self.server.memory_mib()))

    def cpu_ticks(self) -> tuple[int, int, int]:
        return cpu_ticks((os.getpid(), self.server.pid, self.attackers.pid))

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
        self.findings.deaths.append({"attack": name, "how": how, "exit_code": await self.server.stop(signal.SIGKILL)})
        await self.server.start()
        self.findings.memory.clear()
        self.up.set()
        self.findings.slices.begin(WARM_UP)
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
                self.findings.slices.add("first", times_s[0], times_s[0] - begin_s)
            for earlier_s, later_s in itertools.pairwise(times_s):
                self.findings.slices.add("gap", later_s, later_s - earlier_s)
            if answer.ended != "length":
                await self.lose(f"{answer.status} {answer.ended}")
                continue
            right = answer.text == truth
            self.findings.count("right" if right else "wrong")
            if not right:
                self.findings.wrong.append(f"{answer.text!r} is not {truth!r}")

    async def lose(self, why: str) -> None:
        self.findings.count(f"lost: {why}")
        await asyncio.sleep(0.1)

    async def probe(self) -> None:
        while True:
            begin_s = time.perf_counter()
            status = await self.server.health_status()
            end_s = time.perf_counter()
            if status == 200:
                self.findings.slices.add("health", end_s, end_s - begin_s)
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
            self.findings.slices.add("stall", end_s, end_s - begin_s - HEARTBEAT_S)

    async def watch_memory(self) -> None:
        while True:
            self.findings.memory.append((time.perf_counter(), self.server.memory_mib()[0]))
            await asyncio.sleep(1.0)


def note(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)
