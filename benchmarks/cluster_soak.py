"""Workers that are killed and stopped at random while clients ask: is every answer exactly what one engine gives?

Workers are real processes. A kill (SIGKILL) may come while another worker is still starting again, and in every fourth
case a second one follows within half a second. Some are stopped (SIGSTOP) for longer than a worker may be silent.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
from collections import Counter
from typing import Any

from cluster_load import Answered, Ask, answer_all, fleet, percentile, row, words, worker_command

from paceline import LLM
from paceline.cluster.backend import ClusterBackend
from paceline.cluster.ingress import Ingress
from paceline.cluster.local import LocalWorkers
from paceline.cluster.status import ask as ask_worker

ROLES = ["prefill", "decode", "decode", "decode"]
SECOND_SHARE = 0.25  # of kills that another one follows while the streams are being moved
STOP_SHARE = 0.1  # of them that stop a worker instead
STOP_S = 8.0  # a worker is lost after 5 s of silence


class Chaos:
    def __init__(self, mean_pause_s: float, seed: int) -> None:
        self.mean_pause_s = mean_pause_s
        self.done: Counter[str] = Counter()
        self._dice = random.Random(seed)
        self._waking: set[asyncio.Task[None]] = set()

    async def run(self, ingress: Ingress) -> None:
        try:
            while True:
                await asyncio.sleep(self._dice.expovariate(1 / self.mean_pause_s))
                self._hit(ingress)
                if self._dice.random() < SECOND_SHARE:
                    await asyncio.sleep(self._dice.uniform(0, 0.5))
                    self._hit(ingress)
        finally:
            for task in self._waking:
                task.cancel()  # it wakes its worker then
            await asyncio.gather(*self._waking, return_exceptions=True)

    def _hit(self, ingress: Ingress) -> None:
        up = [link for link in ingress.links if link.is_up and link.figures]
        if not up:
            return
        link = self._dice.choice(up)
        pid, role = link.figures["pid"], link.hello["role"]
        link.figures = {}  # it is hit again when it has said something again
        if self._dice.random() < STOP_SHARE:
            self._waking.add(asyncio.create_task(self._stop(pid)))
            self.done[f"{role} stopped"] += 1
            return
        os.kill(pid, signal.SIGKILL)
        self.done[f"{role} killed"] += 1
        if len(up) < len(ROLES):
            self.done["while another was away"] += 1

    async def _stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(STOP_S)
        finally:
            os.kill(pid, signal.SIGCONT)


def soak(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    asks = [
        Ask(0.0, words(args.tokenizer, 40 + 37 * i % 300, i), args.tokens + 7 * i % 50, i, 0.8 * (i % 2))
        for i in range(args.requests)
    ]
    options = ["--spec-method", args.spec, "--device", args.device]
    options += ["--num-kv-blocks", str(args.num_kv_blocks), "--transport", args.transport]
    chaos = Chaos(args.kill_every, args.seed)
    with fleet(worker_command(args.model, args.threads, options), ROLES) as workers:
        backend = ClusterBackend(workers.addresses(), args.tokenizer, "kv_aware", "remote")
        ingress, answers = asyncio.run(_run(backend, asks, args.streams[0], chaos))
        all_free = asyncio.run(_all_free(workers))
        processes = [worker.process for worker in workers.workers]
    codes = [process.returncode for process in processes if process is not None]
    found = row(answers) | _differences(args, answers) | dict(chaos.done)
    for name, gaps in _recovery_gaps(ingress).items():
        found[f"{name} streams"] = len(gaps)
        if gaps:
            found |= {f"{name} p50 s": percentile(gaps, 50), f"{name} p99 s": percentile(gaps, 99)}
    found["all blocks back"] = all_free and not any(codes)
    holds = found["wrong"] == found["failed"] == 0 and found["all blocks back"]
    return [found], holds


def _recovery_gaps(ingress: Ingress) -> dict[str, list[float]]:
    """Seconds in which streams that lost their worker stood still."""
    found: dict[str, list[float]] = {"killed": [], "silent": [], "none was left": []}
    for one in ingress.recoveries:
        found["none was left" if one.waited else "silent" if "said nothing" in one.reason else "killed"].append(
            one.gap_s
        )
    return found


async def _run(
    backend: ClusterBackend, asks: list[Ask], num_streams: int, chaos: Chaos
) -> tuple[Ingress, list[Answered]]:
    ingress = backend.start()
    await ingress.tried()
    print(f"workers are up: {len(asks)} requests, {num_streams} at a time", file=sys.stderr)
    breaking = asyncio.create_task(chaos.run(ingress))
    try:
        answers = await answer_all(backend, asks, num_streams)
    finally:
        breaking.cancel()
        await asyncio.gather(breaking, return_exceptions=True)
    await backend.stop()
    return ingress, answers


async def _all_free(workers: LocalWorkers) -> bool:
    """Every worker that lives at the end runs nothing and holds no KV block. Killed ones are still coming back."""
    for host, port in workers.addresses():
        figures = await _once_up(host, port)
        if figures["num_running"] or figures["num_waiting"] or figures["kv_usage"]:
            return False
    return True


async def _once_up(host: str, port: int) -> dict[str, Any]:
    for _ in range(600):
        try:
            return await ask_worker(host, port)
        except ConnectionError:
            await asyncio.sleep(0.2)
    raise TimeoutError(f"the worker at port {port} has not come back")


def _differences(args: argparse.Namespace, answers: list[Answered]) -> dict[str, int]:
    """Answers, bit for bit, beside those of one engine that drafts nothing."""
    llm = LLM(
        args.model, {"method": "none"}, device=args.device, num_threads=args.threads, num_kv_blocks=args.num_kv_blocks
    )
    wrong = lost = doubled = 0
    prompts = [{"prompt_token_ids": one.ask.prompt} for one in answers]
    expected = llm.generate(prompts, [one.ask.params for one in answers], use_tqdm=False)
    for one, output in zip(answers, expected, strict=True):
        [sample] = output.outputs
        logprobs = [x.logprob for x in sample.token_logprobs or []]
        wrong += (sample.token_ids, logprobs) != (one.token_ids, one.logprobs)
        lost += max(0, len(sample.token_ids) - len(one.token_ids))
        doubled += max(0, len(one.token_ids) - len(sample.token_ids))
    return {"wrong": wrong, "tokens lost": lost, "doubled": doubled}
