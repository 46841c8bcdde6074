"""A real cluster of processes on this machine: faults, routing, disaggregation, and the simulator beside it.

    python benchmarks/cluster.py soak      [--requests 2000] [--streams 12] [--kill-every 3] [--model smollm2-135m]
                                           [--transport tcp]
                                           kill -9 of random workers; without --model: random weights, a few layers
    python benchmarks/cluster.py server    [--threads 2] [--rounds 5] [--tokens 64] [--streams 1 32] [--device cpu]
                                           beside `paceline serve` and `LLM.generate`, in turns
    python benchmarks/cluster.py routing   [--requests 120] [--rate 2]                      routers, shared prefixes
    python benchmarks/cluster.py disagg    [--requests 36] [--rate 1] [--workers 2]         long and short prompts
                                           or, instead of both: [--load 0.4] [--seconds 30]
                                           [--long 1400] [--short 60] [--answer 48]
    python benchmarks/cluster.py simulate-check [--seconds 30] [--sleeping]                 predicted and measured
                                           [--lengths 60 150 330] [--answer 24] [--seed 0]
                                           [--model smollm2-135m] [--threads 1] [--spec none]
                                           [--fleets 0 1 2]

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

from cluster_disagg import disagg
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
    return worker_command(args.model, args.threads, ["--spec-method", args.spec, "--device", args.device, *more])


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


EXPERIMENTS = {"soak": soak, "server": server, "routing": routing, "disagg": disagg, "simulate-check": check}
# What differs from one experiment to another
DEFAULTS: dict[str, dict[str, Any]] = {
    "soak": {"requests": 2000, "streams": [12], "tokens": 300, "num_kv_blocks": 1000, "spec": "ngram"},
    "server": {"streams": [1, 32], "tokens": 64, "num_kv_blocks": 4096},
    "routing": {"requests": 120, "rate": 2.0},
    "disagg": {"requests": 36, "rate": 1.0, "answer": 48},
    "simulate-check": {"answer": 24},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--model", help="(default: smollm2-135m; soak: a tiny one with random weights)")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--device", default="cpu", help="of each worker")
    parser.add_argument("--spec", help="drafting method of the workers (default: none; soak: ngram)")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rate", type=float, help="requests per second")
    parser.add_argument("--kill-every", type=float, default=3.0, metavar="SECONDS", help="soak: mean pause")
    parser.add_argument("--rounds", type=int, default=5, help="server: of either side, after an untimed one")
    parser.add_argument("--streams", type=int, nargs="+", help="soak, server: requests at a time")
    parser.add_argument("--tokens", type=int, help="soak, server: of the shortest answer")
    parser.add_argument("--num-kv-blocks", type=int, help="soak, server: of each worker (default: 1000, 4096)")
    parser.add_argument("--transport", default="tcp", help="soak: of KV blocks")
    parser.add_argument("--seed", type=int, default=0, help="soak: of the kills; others: of the loads")
    parser.add_argument("--seconds", type=float, default=30.0, help="simulate-check, disagg with --load: of each run")
    parser.add_argument("--workers", type=int, default=2, help="disagg: all mixed, or half of them for prompts")
    parser.add_argument("--load", type=float, help="disagg: share of the workers' time, by what their passes take")
    parser.add_argument("--long", type=int, default=1400, help="disagg: tokens of one prompt in five")
    parser.add_argument("--short", type=int, default=60, help="disagg: of the others")
    parser.add_argument("--lengths", type=int, nargs="+", default=[60, 150, 330], help="simulate-check: of the prompts")
    parser.add_argument("--answer", type=int, help="simulate-check, disagg: tokens of an answer (default: 24, 48)")
    parser.add_argument(
        "--fleets", type=int, nargs="+", default=[0, 1, 2], help="simulate-check: by number, which ones"
    )
    parser.add_argument("--sleeping", action="store_true", help="simulate-check: tiny workers whose passes sleep")
    args = parser.parse_args()
    for name, value in ({"spec": "none"} | DEFAULTS[args.experiment]).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
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
