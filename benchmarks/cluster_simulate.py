"""The simulator beside real runs that it was not fitted to: is it within 20 % of their p50 and p99?

First some lone prompts and some equal streams are measured on idle workers: what a pass of so many rows takes (of few
rows from streams, of many from prompts, whose rows need no logits), what the way to a worker and back takes, and what
moving KV takes. On two workers passes are measured once more while the other worker is busy: they share a machine, and
slow each other down. From these figures alone loads of other lengths and rates are predicted, with the same router and
policy, and then run. Other `--lengths`, `--answer` and `--seed` than the defaults make a blind check: the simulator and
the rates were changed after runs with the defaults, not after runs with those.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster_load import Answered, Ask, answer_all, arrivals, fleet, percentile, run_load, words, worker_command

from paceline.cluster.backend import ClusterBackend
from paceline.cluster.prefill_time import PrefillTime
from paceline.cluster.simulate.run import Fleet, simulate
from paceline.cluster.simulate.trace import Trace, TraceRequest
from paceline.cluster.status import ask as ask_worker
from paceline.cluster.worker_spec import WorkerSpec
from paceline.lab.pass_cost import PassCost

BLOCK = 16
NEAR = 0.2  # of the real figure
ENOUGH = 0.8  # of the runs
STREAMS = (1, 2, 4, 8, 16)  # that decode together in the calibration
PROMPTS = (64, 96, 128)  # tokens of lone prompts in it, each read in one pass
NUM_FACTORS = 200  # by which passes of the same rows differ
LONE = 8  # tokens of the prompt that shows what the way takes
MOVED = (48, 144)  # lone prompts that a prefill worker computes, each in one pass: nothing travels before its end
NEIGHBOUR_STREAMS, NEIGHBOUR_TOKENS = 2, 16  # what keeps a neighbour busy: answers to prompts of `PROMPTS`
NEIGHBOUR_REQUESTS = 1000  # more than it can answer while the other worker is measured
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
    spec: WorkerSpec | None = None
    for name, (roles, policy, share) in FLEETS.items():
        with fleet(command, roles) as workers:
            spec = calibrated(workers.addresses(), args, roles, policy, spec)
            backend = ClusterBackend(workers.addresses(), args.tokenizer, "kv_aware", policy, spec)
            for part in UTILIZATION:
                rate = part * share / request_s(args.lengths, args.answer, spec)
                asks = load(args, rate, load_seed(args, len(rows)))
                real, told = asyncio.run(run_load(backend, asks)), predicted(asks, spec, roles, policy)
                rows.append({"workers": name, "load": part, "rate": rate} | compared(real, told))
    near = sum(row["near"] for row in rows)
    print(f"{near} of {len(rows)} runs: all four figures within {NEAR:.0%}")
    for figure in FIGURES:
        print(f"  {figure}: {sum(abs(row[f'simulated {figure}'] / row[figure] - 1) <= NEAR for row in rows)}")
    return rows, near >= ENOUGH * len(rows)


# What is measured before


def calibrated(
    addresses: Sequence[tuple[str, int]],
    args: argparse.Namespace,
    roles: Sequence[str],
    policy: str,
    before: WorkerSpec | None,
) -> WorkerSpec:
    """The pass cost from the first fleet; that beside a busy neighbour from two mixed workers; what moving blocks takes
    from the fleet that does it."""

    def backend(*workers: tuple[str, int]) -> ClusterBackend:
        return ClusterBackend(workers, args.tokenizer, "kv_aware", policy)

    if before is None:
        return asyncio.run(_spec(backend(*addresses), args))
    if "prefill" in roles:
        return asyncio.run(_link(backend(*addresses), args, before))
    one, other = addresses
    curve = asyncio.run(_beside(backend(one), backend(other), args, before.request_s))
    for rows, seconds in curve.items():
        print(f"{rows} rows: {1e3 * before.pass_cost(rows):.2f} ms, beside a busy worker {1e3 * seconds:.2f} ms")
    return before.replace(busy_pass_cost=PassCost.of(curve))


async def _spec(backend: ClusterBackend, args: argparse.Namespace) -> WorkerSpec:
    await backend.start().tried()
    curve, spread = await _stream_passes(backend, args, 50_000)
    way_s = max(0.0, await _lone_s(backend, args, LONE, 90_000) - PassCost.of(curve)(LONE))
    curve |= await _prompt_passes(backend, args, 90_000, way_s, max(curve.values()))
    await backend.stop()
    return WorkerSpec("calibrated", PassCost.of(curve), request_s=way_s, pass_spread=spread)


async def _beside(
    backend: ClusterBackend, neighbour: ClusterBackend, args: argparse.Namespace, way_s: float
) -> dict[int, float]:
    """The pass cost of one worker while the other one answers."""
    await backend.start().tried()
    await neighbour.start().tried()

    lengths = itertools.islice(itertools.cycle(PROMPTS), NEIGHBOUR_REQUESTS)
    asks = [Ask(0.0, words(args.tokenizer, count, 70_000_000 + i), NEIGHBOUR_TOKENS) for i, count in enumerate(lengths)]
    busy = asyncio.create_task(answer_all(neighbour, asks, NEIGHBOUR_STREAMS))
    curve, _ = await _stream_passes(backend, args, 250_000)
    curve |= await _prompt_passes(backend, args, 290_000, way_s, max(curve.values()))
    assert not busy.done(), "the neighbour was idle in the end"
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    await backend.stop()
    await neighbour.stop()
    return curve


async def _stream_passes(
    backend: ClusterBackend, args: argparse.Namespace, seed: int
) -> tuple[dict[int, float], tuple[float, ...]]:
    """Of few rows, and by which factors passes of the same rows differ."""
    curve: dict[int, float] = {}
    factors: list[float] = []
    for count in STREAMS:
        asks = [Ask(0.0, words(args.tokenizer, 20, seed + 100 * count + i), 60) for i in range(count)]
        # without the first ones, in which the others' prompts are still read
        gaps = [gap for one in await answer_all(backend, asks, count) for gap in one.gaps_s[10:]]
        curve[count] = statistics.fmean(gaps)
        factors += [gap / curve[count] for gap in gaps]
    return curve, tuple(percentile(factors, (i + 0.5) * 100 / NUM_FACTORS) for i in range(NUM_FACTORS))


async def _prompt_passes(
    backend: ClusterBackend, args: argparse.Namespace, seed: int, way_s: float, least_s: float
) -> dict[int, float]:
    """Of many rows."""
    curve: dict[int, float] = {}
    for count in PROMPTS:
        least_s = curve[count] = max(least_s, await _lone_s(backend, args, count, seed) - way_s)
    return curve


async def _lone_s(backend: ClusterBackend, args: argparse.Namespace, num_tokens: int, seed: int) -> float:
    """Until the first token of a prompt that has its worker for itself, the median of some."""
    found = []
    for turn in range(5):
        ask = Ask(0.0, words(args.tokenizer, num_tokens, seed + 7 * turn + 100 * num_tokens), 2)
        found += [one.ttft_s for one in await answer_all(backend, [ask], 1)]
    return statistics.median(found)


async def _link(backend: ClusterBackend, args: argparse.Namespace, spec: WorkerSpec) -> WorkerSpec:
    """What is left of remote prompts' first tokens when passes and the way are taken off."""
    await backend.start().tried()
    time, left = PrefillTime(spec), {}
    for count in MOVED:
        num_full = (count - 1) // BLOCK * BLOCK
        passes_s = time.prompt_s(num_full).seconds + time.prompt_s(count - num_full, num_full).seconds
        left[num_full] = max(1e-4, await _lone_s(backend, args, count, 90_000) - passes_s - spec.request_s)
    await backend.stop()
    (few, few_s), (many, many_s) = left.items()
    token_s = max(1e-7, (many_s - few_s) / (many - few))
    return spec.replace(bandwidth=spec.kv_bytes_per_token / token_s, latency_s=max(0.0, few_s - few * token_s))


def request_s(lengths: Sequence[int], answer: int, spec: WorkerSpec) -> float:
    """Seconds of one worker that a request of a load takes when eight share the passes."""
    time = PrefillTime(spec)
    prompt_s = statistics.fmean(time.prompt_s(count).seconds for count in lengths)
    return prompt_s + answer * spec.pass_cost(8) / 8


async def measured_spec(address: tuple[str, int]) -> WorkerSpec:
    """By what a worker measured when it started."""
    curve = (await ask_worker(*address))["pass_cost"]
    return WorkerSpec("measured", PassCost.of({int(rows): float(seconds) for rows, seconds in curve.items()}))


# One load, real and simulated


def load_seed(args: argparse.Namespace, row: int) -> int:
    return int(SEEDS * args.seed + row)


def load(args: argparse.Namespace, rate: float, seed: int) -> list[Ask]:
    dice = random.Random(seed)
    times = arrivals(max(10, round(rate * args.seconds)), rate, seed)
    return [
        Ask(at_s, words(args.tokenizer, dice.choice(args.lengths), 1000 * seed + i), args.answer, i)
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
    found["near"] = all(abs(told[name] / found[name] - 1) <= NEAR for name in FIGURES)
    return found
