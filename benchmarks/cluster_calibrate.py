"""What the simulator is told of two workers of this machine, measured from outside: passes, the way, and neighbours."""

import argparse
import asyncio
import statistics
from collections.abc import Sequence

from cluster_load import Ask, answer_all, percentile, words

from paceline.cluster.backend import ClusterBackend
from paceline.cluster.prefill_time import CONTEXT_UNIT, PrefillTime
from paceline.cluster.worker_spec import DECODES, READS, Slowdown, WorkerSpec
from paceline.lab.pass_cost import PassCost

BLOCK = 16
MOST_STREAMS = 16
STREAMS = (1, 2, 4, 8, MOST_STREAMS)  # that decode together in the calibration
PROMPTS = (12, MOST_STREAMS, 24, 32, 40, 48, 64, 96, 128)  # tokens of lone prompts in it, each read in one pass
SHORT, LONG = 20, 320  # of those that show what rows pay for the tokens before them
NUM_FACTORS = 200  # by which passes of the same rows differ
MOVED = (48, 144)  # lone prompts that a prefill worker computes, each in one pass: nothing travels before its end
NEIGHBOURS = {DECODES: (2, 20, 600), READS: (3, 200, 8)}  # its streams, tokens of prompt and answer, by what it does
NEIGHBOUR_REQUESTS = 150  # more than it can answer while the other worker is measured
NEIGHBOUR_STARTS_S = 0.3
ROUNDS, NEIGHBOUR_ROUNDS = 5, 3
FIRST_SEED, SEEDS = 10**12, 10**7  # of the words of prompts: of no load, and in a turn


def calibrate(
    addresses: Sequence[tuple[str, int]], args: argparse.Namespace, turn: int
) -> tuple[WorkerSpec, WorkerSpec]:
    """The first of two workers, as it is alone and as it is beside the other. In each `turn` other prompts, which no
    cache knows."""
    seed = FIRST_SEED + turn * SEEDS
    one, other = (ClusterBackend([address], args.tokenizer, "kv_aware", "local") for address in addresses)
    spec = asyncio.run(_spec(one, args, seed))
    curve = zip(spec.pass_cost.rows, spec.pass_cost.seconds, strict=True)
    print("pass ms: " + ", ".join(f"{rows:.0f} rows {1e3 * seconds:.1f}" for rows, seconds in curve))
    more_s = {
        "row of a stream": spec.stream_row_s,
        "row after 1000 tokens": spec.context_s,
        "stream": spec.stream_context_s,
        "way": spec.request_s,
    }
    print("more ms: " + ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in more_s.items()), flush=True)
    one, other = (ClusterBackend([address], args.tokenizer, "kv_aware", "local") for address in addresses)
    slowdown, spread = asyncio.run(_slowdown(one, other, args, seed + SEEDS // 2))
    return spec, spec.replace(slowdown=slowdown, pass_spread=spread)


async def _spec(backend: ClusterBackend, args: argparse.Namespace, seed: int) -> WorkerSpec:
    """Of few rows from streams, of many from lone prompts; the difference at `MOST_STREAMS` rows is what a row of a
    stream costs more."""
    await backend.start().tried()
    passes_s, spread = await _stream_passes(backend, args, seed)
    slower_s = statistics.median([await _slower_s(backend, args, seed + 200_000 + 1000 * i) for i in range(ROUNDS)])
    way_s = max(0.0, await _lone_s(backend, args, 1, seed) - passes_s[1])
    lone_s = {count: await _lone_s(backend, args, count, seed) - way_s for count in (*PROMPTS, LONG)}
    await backend.stop()
    stream_row_s = max(0.0, passes_s[MOST_STREAMS] - lone_s[MOST_STREAMS]) / MOST_STREAMS
    curve, least_s = {}, 0.0
    for rows in sorted({*STREAMS, *PROMPTS}):
        seconds = passes_s[rows] - rows * stream_row_s if rows in passes_s else lone_s[rows]
        least_s = curve[rows] = max(least_s, seconds)
    spec = WorkerSpec("calibrated", PassCost.of(curve), stream_row_s=stream_row_s, request_s=way_s, pass_spread=spread)
    longer_s = lone_s[LONG] - PrefillTime(spec).prompt_s(LONG).seconds
    context_s = max(0.0, longer_s) * 2 * CONTEXT_UNIT / LONG**2
    stream_context_s = max(0.0, slower_s * CONTEXT_UNIT / (LONG - SHORT) - context_s)
    return spec.replace(context_s=context_s, stream_context_s=stream_context_s)


async def _slowdown(
    backend: ClusterBackend, neighbour: ClusterBackend, args: argparse.Namespace, seed: int
) -> tuple[Slowdown, tuple[float, ...]]:
    """How much longer passes of one worker take while the other one reads prompts, or only decodes; and by which
    factors passes then differ from their mean. In turns and as medians of some rounds: the machine's own speed changes
    from one second to the next."""
    await backend.start().tried()
    await neighbour.start().tried()
    factors: dict[str, list[float]] = {f"{kind}_beside_{name}": [] for kind in (DECODES, READS) for name in NEIGHBOURS}
    spreads: dict[str, list[tuple[float, ...]]] = {name: [] for name in NEIGHBOURS}
    for turn in range(NEIGHBOUR_ROUNDS):
        first = seed + SEEDS // 20 * turn
        alone, _ = await _two_kinds_s(backend, args, first)
        for name, (num_streams, num_prompt, num_tokens) in NEIGHBOURS.items():
            first += SEEDS // 100
            asks = [
                Ask(0.0, words(args.tokenizer, num_prompt, first + SEEDS // 200 + i), num_tokens)
                for i in range(NEIGHBOUR_REQUESTS)
            ]
            busy = asyncio.create_task(answer_all(neighbour, asks, num_streams))
            await asyncio.sleep(NEIGHBOUR_STARTS_S)
            beside, spread = await _two_kinds_s(backend, args, first)
            assert not busy.done(), "the neighbour was idle in the end"
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)
            await asyncio.sleep(NEIGHBOUR_STARTS_S)
            spreads[name].append(spread)
            for kind in alone:
                factors[f"{kind}_beside_{name}"].append(beside[kind] / alone[kind])
    await backend.stop()
    await neighbour.stop()
    table = {name: max(1.0, statistics.median(found)) for name, found in factors.items()}
    print("slowdown: " + ", ".join(f"{name} {factor:.2f}" for name, factor in table.items()), flush=True)
    return Slowdown(**table), tuple(factor for rounds in spreads.values() for factor in _medians(rounds))


async def _two_kinds_s(
    backend: ClusterBackend, args: argparse.Namespace, seed: int
) -> tuple[dict[str, float], tuple[float, ...]]:
    """Passes of two streams, with the factors by which they differ, and a lone prompt."""
    asks = [Ask(0.0, words(args.tokenizer, 20, seed + i), 110) for i in range(2)]
    gaps_s = [gap for one in await answer_all(backend, asks, 2) for gap in one.gaps_s[10:]]
    mean_s = statistics.fmean(gaps_s)
    return {DECODES: mean_s, READS: await _lone_s(backend, args, PROMPTS[-1], seed)}, _even(
        [gap / mean_s for gap in gaps_s]
    )


async def _stream_passes(
    backend: ClusterBackend, args: argparse.Namespace, seed: int
) -> tuple[dict[int, float], tuple[float, ...]]:
    """Of few rows, the median of some rounds, and by which factors passes of the same rows differ."""
    rounds: dict[int, list[float]] = {count: [] for count in STREAMS}
    spreads: list[tuple[float, ...]] = []
    for turn in range(ROUNDS):
        factors: list[float] = []
        for count in STREAMS:
            first = seed + 100_000 + 1000 * turn + 50 * count
            asks = [Ask(0.0, words(args.tokenizer, SHORT, first + i), 50) for i in range(count)]
            # without the first ones, in which the others' prompts are still read
            gaps = [gap for one in await answer_all(backend, asks, count) for gap in one.gaps_s[10:]]
            rounds[count].append(statistics.fmean(gaps))
            factors += [gap / rounds[count][-1] for gap in gaps]
        spreads.append(_even(factors))
    return {count: statistics.median(means) for count, means in rounds.items()}, _medians(spreads)


async def _slower_s(backend: ClusterBackend, args: argparse.Namespace, seed: int) -> float:
    """How much longer a pass of a stream takes after a `LONG` prompt than after a `SHORT` one."""
    found_s = []
    for count in (SHORT, LONG):
        ask = Ask(0.0, words(args.tokenizer, count, seed + count), 50)
        found_s.append(statistics.median((await answer_all(backend, [ask], 1))[0].gaps_s[10:]))
    return found_s[1] - found_s[0]


def _medians(spreads: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """What is rare in most rounds, and not what was rare in one."""
    return tuple(statistics.median(factors) for factors in zip(*spreads, strict=True))


def _even(factors: Sequence[float]) -> tuple[float, ...]:
    return tuple(percentile(factors, (i + 0.5) * 100 / NUM_FACTORS) for i in range(NUM_FACTORS))


async def _lone_s(
    backend: ClusterBackend, args: argparse.Namespace, num_tokens: int, seed: int, turns: int = 7
) -> float:
    """Until the only token of a prompt that has its worker for itself, the median of some.

    Two more go before: after passes that decode the engine takes a row for expensive and reads prompts in parts."""
    found = []
    for turn in range(turns + 2):
        ask = Ask(0.0, words(args.tokenizer, num_tokens, seed + 7 * turn + 100 * num_tokens + 7), 1)
        found += [one.ttft_s for one in await answer_all(backend, [ask], 1)]
    return statistics.median(found[2:])


async def link(backend: ClusterBackend, args: argparse.Namespace, spec: WorkerSpec) -> WorkerSpec:
    """What is left of remote prompts' first tokens when passes and the way are taken off."""
    await backend.start().tried()
    price, left = PrefillTime(spec), {}
    for count in MOVED:
        num_full = (count - 1) // BLOCK * BLOCK
        passes_s = price.prompt_s(num_full).seconds + price.prompt_s(count - num_full, num_full).seconds
        left[num_full] = max(1e-4, await _lone_s(backend, args, count, FIRST_SEED - SEEDS) - passes_s - spec.request_s)
    await backend.stop()
    (few, few_s), (many, many_s) = left.items()
    token_s = max(1e-7, (many_s - few_s) / (many - few))
    return spec.replace(bandwidth=spec.kv_bytes_per_token / token_s, latency_s=max(0.0, few_s - few * token_s))
