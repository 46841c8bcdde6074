"""The simulator beside real runs that it was not fitted to: is it within 20 % of their p50 and p99?

Two idle workers are measured first, from outside: equal streams (passes of few rows), lone prompts (passes of many
rows, and the way there), and both again on one worker while the other only decodes, or only reads prompts: workers of
one machine slow each other down. What moving KV takes is measured where a prefill worker does it. From these figures
alone loads of other lengths and rates are predicted, with the same router and policy, and then run.

What was fixed before any run: four rates for each of three fleets, `--seconds` each, answers of one length, prompts of
`--lengths` drawn by `--seed`. A run has `LEAST_REQUESTS` or more, so that its p99 is not its worst request alone. The
share of runs is told for each of the four figures, and for all four at once; the latter decides. `other programs` is
how many cores programs that are not ours used: where it is more than `MOST_OTHER` a run does not count and is made once
more, whatever came out; the last of `TRIES` counts. Other `--lengths`,
`--answer` and `--seed` than the defaults make a blind check: the simulator and the rates were changed after runs with
the defaults, not after runs with those. `--fleets 0 1 2` chooses fleets; their loads are the same as in a whole check.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cluster_calibrate import BLOCK, calibrate, link
from cluster_load import Answered, Ask, arrivals, fleet, percentile, run_load, words, worker_command

from paceline.cluster.backend import ClusterBackend
from paceline.cluster.local import LocalWorkers
from paceline.cluster.prefill_time import PrefillTime
from paceline.cluster.simulate.run import Fleet, simulate
from paceline.cluster.simulate.trace import Trace, TraceRequest
from paceline.cluster.status import ask as ask_worker
from paceline.cluster.worker_spec import WorkerSpec
from paceline.lab.pass_cost import PassCost

NEAR = 0.2  # of the real figure
ENOUGH = 0.8  # of the runs
LEAST_REQUESTS = 60  # of a load
MOST_OTHER = 0.25  # cores that other programs may use in a run: at 0.34 a run was 1.3 to 2.2 times as slow as before
TRIES = 3
SEEDS = 1000  # of loads, between one `--seed` and the next
FLEETS: dict[str, tuple[list[str], str, float]] = {  # roles, policy, workers that share the prompts
    "1 mixed": (["decode"], "local", 1.0),
    "2 mixed": (["decode", "decode"], "local", 2.0),
    "1 + 1": (["prefill", "decode"], "remote", 1.0),
}
UTILIZATION = (0.15, 0.25, 0.35, 0.5)  # of what one worker could read and answer: the rates follow from it


def check(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    command = [sys.executable, str(Path(__file__).parent / "sleeping_worker.py"), args.model]
    if not args.sleeping:
        command = worker_command(args.model, args.threads, ["--spec-method", "none", "--device", args.device])
    rows: list[dict[str, Any]] = []
    with fleet(command, ["decode", "decode"]) as workers:
        alone, beside = undisturbed(workers, partial(calibrate, workers.addresses(), args))[0]
    for index in args.fleets:
        name, (roles, policy, share) = list(FLEETS.items())[index]
        with fleet(command, roles) as workers:
            spec = beside if len(roles) > 1 else alone
            if "prefill" in roles:
                linked = ClusterBackend(workers.addresses(), args.tokenizer, "kv_aware", policy)
                spec = asyncio.run(link(linked, args, spec))
            backend = ClusterBackend(workers.addresses(), args.tokenizer, "kv_aware", policy, spec)
            for turn, part in enumerate(UTILIZATION):
                rate = part * share / request_s(args.lengths, args.answer, spec)
                seed = load_seed(args, len(UTILIZATION) * index + turn)
                told = predicted(load(args, rate, seed), spec, roles, policy)
                real, other = undisturbed(workers, partial(_run, backend, args, rate, seed))
                row = {"workers": name, "load": part, "rate": rate} | compared(real, told)
                rows.append(row | {"other programs": other})
                print(brief(rows[-1]), flush=True)
    near = sum(row["near"] for row in rows)
    print(f"{near} of {len(rows)} runs: all four figures within {NEAR:.0%}")
    for figure in FIGURES:
        print(f"  {figure}: {sum(is_near(row, figure) for row in rows)}")
    return rows, near >= ENOUGH * len(rows)


def _run(backend: ClusterBackend, args: argparse.Namespace, rate: float, seed: int, turn: int) -> list[Answered]:
    return asyncio.run(run_load(backend, load(args, rate, seed, turn)))


Result = TypeVar("Result")


def undisturbed(workers: LocalWorkers, work: Callable[[int], Result]) -> tuple[Result, float]:
    """What it returns, told how often it was called before, and how many cores other programs used meanwhile; once
    more where that is too much."""
    own = [os.getpid(), *(worker.process.pid for worker in workers.workers if worker.process is not None)]
    for turn in range(TRIES):
        begin_s, before_s = time.perf_counter(), other_programs_s(own)
        found = work(turn)
        other = (other_programs_s(own) - before_s) / (time.perf_counter() - begin_s)
        if other <= MOST_OTHER:
            break
        print(f"other programs used {other:.2f} cores: once more", flush=True)
    return found, other


def other_programs_s(own: Sequence[int]) -> float:
    """Processor seconds since the start of the machine that programs beside these used; 0 where there is no /proc."""
    if not Path("/proc/stat").exists():
        return 0.0
    ticks = [int(value) for value in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    idle, waits = ticks[3:5]
    used = sum(ticks) - idle - waits
    for pid in own:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used -= int(fields[11]) + int(fields[12])  # in user mode, in the kernel
    return float(used / os.sysconf("SC_CLK_TCK"))


def request_s(lengths: Sequence[int], answer: int, spec: WorkerSpec) -> float:
    """Seconds of one worker that a request of a load takes when eight share the passes."""
    price = PrefillTime(spec)
    prompt_s = statistics.fmean(price.prompt_s(count).seconds for count in lengths)
    return prompt_s + answer * price.rows_s(8, 0) / 8


async def measured_spec(address: tuple[str, int]) -> WorkerSpec:
    """By what a worker measured when it started."""
    curve = (await ask_worker(*address))["pass_cost"]
    return WorkerSpec("measured", PassCost.of({int(rows): float(seconds) for rows, seconds in curve.items()}))


# One load, real and simulated


def load_seed(args: argparse.Namespace, row: int) -> int:
    return int(SEEDS * args.seed + row)


def load(args: argparse.Namespace, rate: float, seed: int, turn: int = 0) -> list[Ask]:
    """In another `turn` the same, with other words."""
    dice = random.Random(seed)
    times = arrivals(max(LEAST_REQUESTS, round(rate * args.seconds)), rate, seed)
    return [
        Ask(at_s, words(args.tokenizer, dice.choice(args.lengths), 1000 * seed + i + turn * 10**10), args.answer, i)
        for i, at_s in enumerate(times)
    ]


def predicted(asks: Sequence[Ask], spec: WorkerSpec, roles: Sequence[str], policy: str) -> dict[str, float]:
    keys = iter(range(10**9))
    requests = [
        TraceRequest(
            ask.arrival_s,
            len(ask.prompt),
            ask.num_tokens,
            tuple(next(keys) for _ in range((len(ask.prompt) - 1) // BLOCK)),
        )
        for ask in asks
    ]
    members = Fleet(spec, roles.count("decode"), spec, roles.count("prefill"))
    outcome = simulate(Trace(requests, BLOCK), members, policy=policy)
    ttft_s = outcome.ttft_s.tolist()
    gaps = outcome.gaps
    seconds = (percentile(ttft_s, 50), percentile(ttft_s, 99), gaps.percentile(50), gaps.percentile(99))
    return {name: 1e3 * value for name, value in zip(FIGURES, seconds, strict=True)}


FIGURES = ("TTFT p50 ms", "TTFT p99 ms", "gap p50 ms", "gap p99 ms")


def compared(real: Sequence[Answered], told: dict[str, float]) -> dict[str, Any]:
    failed = [one.error for one in real if one.error is not None]
    assert not failed, failed
    ttft_s, gaps_s = [one.ttft_s for one in real], [gap for one in real for gap in one.gaps_s]
    seconds = (percentile(ttft_s, 50), percentile(ttft_s, 99), percentile(gaps_s, 50), percentile(gaps_s, 99))
    found: dict[str, Any] = {"requests": len(real)}
    for name, value in zip(FIGURES, seconds, strict=True):
        found |= {name: 1e3 * value, f"simulated {name}": told[name]}
    found["near"] = all(is_near(found, name) for name in FIGURES)
    return found


def brief(row: dict[str, Any]) -> str:
    figures = (f"{name} {row[name]:.1f} (simulated {row[f'simulated {name}']:.1f})" for name in FIGURES)
    return f"{row['workers']} at {row['load']}, other programs {row['other programs']:.2f}: {', '.join(figures)}"


def is_near(row: dict[str, Any], figure: str) -> bool:
    return bool(abs(row[f"simulated {figure}"] / row[figure] - 1) <= NEAR)
