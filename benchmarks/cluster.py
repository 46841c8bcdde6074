"""A real cluster of processes on this machine: faults, routing, disaggregation, and the simulator beside it.

    python benchmarks/cluster.py soak      [--requests 2000] [--streams 12] [--kill-every 3] [--model smollm2-135m]
                                           [--transport tcp]
                                           kill -9 of random workers; without --model: random weights, a few layers
    python benchmarks/cluster.py server    [--threads 2] [--rounds 5] [--tokens 64]         beside `paceline serve`
    python benchmarks/cluster.py routing   [--requests 120] [--rate 2]                      routers, shared prefixes
    python benchmarks/cluster.py disagg    [--requests 36] [--rate 1]                       long and short prompts
    python benchmarks/cluster.py simulate-check [--seconds 30] [--sleeping]                 predicted and measured
                                           [--lengths 60 150 330] [--answer 24] [--seed 0]
                                           [--model smollm2-135m] [--threads 1] [--spec none]

`soak` compares every answer (tokens, and bits of log-probabilities) with one engine's, and prints how long streams
that lost their worker stood still; the exit code is 1 where an answer is wrong or missing or a KV block does not come
back. `simulate-check` measures some passes, then runs loads
for real and simulated; with `--sleeping` passes last as long as a formula says. Prints a table, then one JSON line.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from cluster_load import Answered, Ask, arrivals, fleet, row, run_load, words, worker_command
from cluster_server import server
from cluster_simulate import check
from cluster_soak import soak
from tiny_model import write_tiny_model

from paceline.bench.run.provenance import provenance
from paceline.cli.lab import format_table
from paceline.cluster.backend import ClusterBackend
from paceline.cluster.local import LocalWorkers
from paceline.models.loading import load_tokenizer
from paceline.models.resolve import resolve_model

Rows = list[dict[str, Any]]


def command(args: argparse.Namespace, *more: str) -> list[str]:
    return worker_command(args.model, args.threads, ["--spec-method", args.spec, *more])


def run(args: argparse.Namespace, workers: LocalWorkers, asks: list[Ask], router: str, policy: str) -> list[Answered]:
    backend = ClusterBackend(workers.addresses(), args.tokenizer, router, policy)
    return asyncio.run(run_load(backend, asks))


def routing(args: argparse.Namespace) -> tuple[Rows, bool]:
    """Room for a few of the prefixes on each worker, so that it matters where a prompt goes."""
    rows = []
    times = arrivals(args.requests, args.rate, 0)
    with fleet(command(args, "--num-kv-blocks", "160"), ["decode"] * 3) as workers:
        for turn, router in enumerate(("round_robin", "power_of_two", "dynamo", "kv_aware")):
            # each router has prefixes of its own: none finds what another left behind
            shared = [words(args.tokenizer, 384, 10_000 * (turn + 1) + group) for group in range(9)]
            asks = [
                Ask(at_s, [*random.Random(i).choice(shared), *words(args.tokenizer, 48, 100_000 * turn + i)], 16, i)
                for i, at_s in enumerate(times)
            ]
            rows.append({"router": router} | row(run(args, workers, asks, router, "local")))
    best = rows[-1]
    return rows, all(best["hit rate"] >= other["hit rate"] for other in rows)


def disagg(args: argparse.Namespace) -> tuple[Rows, bool]:
    """Long prompts among short ones, on two workers that share the work in different ways."""
    wide = ["--max-token-delay", "60"]  # no limit that matters: chunks are as long as a pass may be
    fleets: list[tuple[list[str], list[str], dict[str, str]]] = [
        (["decode"] * 2, ["--max-num-batched-tokens", "512", *wide], {"2 mixed, chunks of 512": "local"}),
        (["decode"] * 2, ["--max-num-batched-tokens", "64", *wide], {"2 mixed, chunks of 64": "local"}),
        (["decode"] * 2, [], {"2 mixed, 20 ms delay": "local"}),
        (
            ["prefill", "decode"],
            [],
            {"1 + 1, always remote": "remote", "1 + 1, dynamo": "dynamo", "1 + 1, cost": "cost"},
        ),
    ]
    rows, times = list[dict[str, Any]](), arrivals(args.requests, args.rate, 0)
    for roles, options, ways in fleets:
        with fleet(command(args, *options), roles) as workers:
            for name, policy in ways.items():
                seed = 100_000 * len(rows)
                asks = [
                    Ask(at_s, words(args.tokenizer, 1400 if i % 5 == 0 else 60, seed + i), 48, i)
                    for i, at_s in enumerate(times)
                ]
                answers = run(args, workers, asks, "kv_aware", policy)
                short = [one for one in answers if len(one.ask.prompt) < 100]
                rows.append({"workers": name} | row(answers) | {"short TTFT p99 ms": row(short)["TTFT p99 ms"]})
    return rows, all(row["failed"] == 0 for row in rows)


EXPERIMENTS = {"soak": soak, "server": server, "routing": routing, "disagg": disagg, "simulate-check": check}
TOKENS = {"soak": 300, "server": 64}
REQUESTS = {"soak": 2000, "routing": 120, "disagg": 36}
RATES = {"soak": 4.0, "routing": 2.0, "disagg": 1.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--model", help="(default: smollm2-135m; soak: a tiny one with random weights)")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--spec", default="none", help="drafting method of the workers")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rate", type=float, help="requests per second")
    parser.add_argument("--kill-every", type=float, default=3.0, metavar="SECONDS", help="soak: mean pause")
    parser.add_argument("--rounds", type=int, default=5, help="server: of either side, after an untimed one")
    parser.add_argument("--streams", type=int, default=12, help="soak: requests at a time")
    parser.add_argument("--tokens", type=int, help="soak, server: of the shortest answer")
    parser.add_argument("--num-kv-blocks", type=int, default=1000, help="soak: of each worker")
    parser.add_argument("--transport", default="tcp", help="soak: of KV blocks")
    parser.add_argument("--seed", type=int, default=0, help="soak: of the kills; simulate-check: of the loads")
    parser.add_argument("--seconds", type=float, default=30.0, help="simulate-check: of each run")
    parser.add_argument("--lengths", type=int, nargs="+", default=[60, 150, 330], help="simulate-check: of the prompts")
    parser.add_argument("--answer", type=int, default=24, help="simulate-check: tokens of an answer")
    parser.add_argument("--sleeping", action="store_true", help="simulate-check: tiny workers whose passes sleep")
    args = parser.parse_args()
    args.requests, args.rate = args.requests or REQUESTS.get(args.experiment), args.rate or RATES.get(args.experiment)
    args.tokens = args.tokens or TOKENS.get(args.experiment)
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None and (args.experiment == "soak" or args.sleeping):
            args.model = str(write_tiny_model(Path(folder)))
        args.model = args.model or "smollm2-135m"
        args.tokenizer = load_tokenizer(resolve_model(args.model))
        rows, holds = EXPERIMENTS[args.experiment](args)
    for found in rows if len(rows) == 1 else []:
        print("\n".join(f"{name:28} {value}" for name, value in found.items()))
    if len(rows) > 1:
        print(format_table(rows))
    print(json.dumps({"experiment": args.experiment, "rows": rows, "holds": holds, **provenance()}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
