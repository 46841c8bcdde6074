"""Long prompts among short ones on workers that share the work in different ways: mixed, or split by role.

Every way gets the same arrivals and lengths and as many workers with as many threads. Prompts share nothing, so none
finds another's blocks. With `--load` the rate follows from what the first workers measured, and is the same for all.
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

from cluster_load import Answered, Ask, arrivals, fleet, percentile, row, run_load, words, worker_command
from cluster_simulate import measured_spec, request_s

from paceline.cluster.backend import ClusterBackend

ONE_IN = 5  # prompts is a long one
WIDE = ["--max-token-delay", "60"]  # no limit that matters: chunks are as long as a pass may be


def disagg(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    num_prefill = args.workers // 2
    mixed, split = ["decode"] * args.workers, ["prefill"] * num_prefill + ["decode"] * (args.workers - num_prefill)
    names = f"{args.workers} mixed", f"{num_prefill} + {args.workers - num_prefill}"
    fleets: list[tuple[list[str], list[str], dict[str, str]]] = [
        (mixed, ["--max-num-batched-tokens", "512", *WIDE], {f"{names[0]}, chunks of 512": "local"}),
        (mixed, ["--max-num-batched-tokens", "64", *WIDE], {f"{names[0]}, chunks of 64": "local"}),
        (mixed, [], {f"{names[0]}, 20 ms delay": "local"}),
        (split, [], {f"{names[1]}, {policy}": policy for policy in ("remote", "dynamo", "cost")}),
    ]
    rows = list[dict[str, Any]]()
    for roles, options, ways in fleets:
        options = ["--spec-method", args.spec, "--device", args.device, *options]
        with fleet(worker_command(args.model, args.threads, options), roles) as workers:
            if args.load is not None and not rows:
                lengths = [args.long, *[args.short] * (ONE_IN - 1)]
                spec = asyncio.run(measured_spec(workers.addresses()[0]))
                args.rate = args.load * args.workers / request_s(lengths, args.answer, spec)
                args.requests = max(10, round(args.rate * args.seconds))
            times = arrivals(args.requests, args.rate, args.seed)
            for name, policy in ways.items():
                asks = load(args, times, 100_000 * len(rows))
                backend = ClusterBackend(workers.addresses(), args.tokenizer, "kv_aware", policy)
                rows.append({"workers": name} | figures(args, asyncio.run(run_load(backend, asks))))
                print(rows[-1], flush=True)
    return rows, all(row["failed"] == 0 for row in rows)


def load(args: argparse.Namespace, times: Sequence[float], seed: int) -> list[Ask]:
    lengths = [args.long if i % ONE_IN == 0 else args.short for i in range(len(times))]
    return [
        Ask(at_s, words(args.tokenizer, length, seed + i), args.answer, i)
        for i, (at_s, length) in enumerate(zip(times, lengths, strict=True))
    ]


def figures(args: argparse.Namespace, answers: Sequence[Answered]) -> dict[str, Any]:
    long = [one.ttft_s for one in answers if len(one.ask.prompt) == args.long and one.event_s]
    short = [one.ttft_s for one in answers if len(one.ask.prompt) == args.short and one.event_s]
    found = row(answers)
    del found["hit rate"]  # blocks that came from another worker count as hits
    longest = [max(one.gaps_s) for one in answers if one.gaps_s]
    return found | {
        "longest gap of a stream, p50 ms": 1e3 * statistics.median(longest or [float("nan")]),
        "short TTFT p50 ms": 1e3 * percentile(short, 50),
        "short TTFT p99 ms": 1e3 * percentile(short, 99),
        "long TTFT p50 ms": 1e3 * percentile(long, 50),
        "rate": args.rate,
    }
