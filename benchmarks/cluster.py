"""A real cluster of processes on this machine: faults, routing, disaggregation, and the simulator beside it.

    python benchmarks/cluster.py soak      [--requests 2000] [--streams 12] [--kill-every 3] [--model smollm2-135m]
                                           kill -9 of random workers; without --model: random weights, a few layers
    python benchmarks/cluster.py routing   [--requests 120] [--rate 2]                      routers, shared prefixes
    python benchmarks/cluster.py disagg    [--requests 60] [--rate 1]                       long and short prompts
    python benchmarks/cluster.py simulator --worker-file cpu.json [--rates 0.5 1 2]         predicted and measured
                                           [--model smollm2-135m] [--threads 1] [--spec none]

`soak` compares every answer (tokens, and bits of log-probabilities) with one engine's, and prints how long streams
that lost their worker stood still; the exit code is 1 where an answer is wrong or missing or a KV block does not come
back. `simulator` is given the
pass cost of one worker with as many threads (`paceline bench curve --num-threads 1 --out cpu.json`) and runs each load
for real and simulated. Prints a table, then one JSON line.
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
from cluster_soak import soak
from tiny_model import write_tiny_model

from paceline.bench.run.provenance import provenance
from paceline.cli.lab import format_table
from paceline.cluster.backend import ClusterBackend
from paceline.cluster.simulate.figures import Outcome
from paceline.cluster.simulate.run import Fleet, simulate
from paceline.cluster.simulate.trace import Trace, TraceRequest
from paceline.cluster.worker_spec import WorkerSpec
from paceline.models.loading import load_tokenizer
from paceline.models.resolve import resolve_model

Rows = list[dict[str, Any]]
BLOCK = 16


def command(args: argparse.Namespace, *more: str) -> list[str]:
    return worker_command(args.model, args.threads, ["--spec-method", args.spec, *more])


def run(
    args: argparse.Namespace, roles: list[str], asks: list[Ask], router: str, policy: str, *more: str
) -> list[Answered]:
    with fleet(command(args, *more), roles) as workers:
        backend = ClusterBackend(workers.addresses(), args.tokenizer, router, policy)
        return asyncio.run(run_load(backend, asks))


def routing(args: argparse.Namespace) -> tuple[Rows, bool]:
    shared = [words(args.tokenizer, 384, 1000 + group) for group in range(9)]
    asks = [
        Ask(at_s, [*random.Random(i).choice(shared), *words(args.tokenizer, 48, i)], 16, seed=i)
        for i, at_s in enumerate(arrivals(args.requests, args.rate, 0))
    ]
    rows = []
    for router in ("round_robin", "power_of_two", "dynamo", "kv_aware"):
        # room for a few of the prefixes on each worker, so that it matters where a prompt goes
        answers = run(args, ["decode"] * 3, asks, router, "local", "--num-kv-blocks", "160")
        rows.append({"router": router} | row(answers))
    return rows, True


def disagg(args: argparse.Namespace) -> tuple[Rows, bool]:
    asks = [
        Ask(at_s, words(args.tokenizer, 1400 if i % 5 == 0 else 60, i), 48, seed=i)
        for i, at_s in enumerate(arrivals(args.requests, args.rate, 0))
    ]
    ways: list[tuple[str, list[str], str, list[str]]] = [
        (
            "2 mixed, chunks of 512",
            ["decode"] * 2,
            "local",
            ["--max-num-batched-tokens", "512", "--max-token-delay", "60"],
        ),
        (
            "2 mixed, chunks of 64",
            ["decode"] * 2,
            "local",
            ["--max-num-batched-tokens", "64", "--max-token-delay", "60"],
        ),
        ("2 mixed, 20 ms delay", ["decode"] * 2, "local", []),
        ("1 + 1, always remote", ["prefill", "decode"], "remote", []),
        ("1 + 1, dynamo", ["prefill", "decode"], "dynamo", []),
        ("1 + 1, cost", ["prefill", "decode"], "cost", []),
    ]
    rows = []
    for name, roles, policy, options in ways:
        answers = run(args, roles, asks, "kv_aware", policy, *options)
        short = [one for one in answers if len(one.ask.prompt) < 100]
        rows.append({"workers": name} | row(answers) | {"short TTFT p99 ms": row(short)["TTFT p99 ms"]})
    return rows, True


def simulator(args: argparse.Namespace) -> tuple[Rows, bool]:
    spec = WorkerSpec.load(args.worker_file)
    rows, near = [], []
    for rate in args.rates:
        for roles, policy in ((["decode"], "local"), (["decode"] * 2, "local"), (["prefill", "decode"], "remote")):
            asks = [
                Ask(at_s, words(args.tokenizer, random.Random(i).choice([60, 200, 600]), i), 32, seed=i)
                for i, at_s in enumerate(arrivals(args.requests, rate, 1))
            ]
            real = row(run(args, roles, asks, "kv_aware", policy))
            told = predicted(asks, spec, roles, policy).row()
            pairs = {
                "TTFT p50 ms": "TTFT p50 ms",
                "TTFT p99 ms": "p99",
                "gap p50 ms": "gap p50 ms",
                "gap p99 ms": "gap p99",
            }
            found: dict[str, Any] = {"workers": "+".join(roles), "rate": rate}
            for mine, theirs in pairs.items():
                found |= {mine: real[mine], f"simulated {mine}": told[theirs]}
                near.append(abs(told[theirs] / real[mine] - 1) <= 0.2)
            rows.append(found)
    print(f"{sum(near)} of {len(near)} figures within 20 %")
    return rows, sum(near) >= 0.8 * len(near)


def predicted(asks: list[Ask], spec: WorkerSpec, roles: list[str], policy: str) -> Outcome:
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
    return simulate(
        Trace(requests, BLOCK), Fleet(spec, roles.count("decode"), spec, roles.count("prefill")), policy=policy
    )


EXPERIMENTS = {"soak": soak, "routing": routing, "disagg": disagg, "simulator": simulator}
REQUESTS = {"soak": 2000, "routing": 120, "disagg": 60, "simulator": 60}
RATES = {"soak": 4.0, "routing": 2.0, "disagg": 1.0, "simulator": 1.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--model", help="(default: smollm2-135m; soak: a tiny one with random weights)")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--spec", default="none", help="drafting method of the workers")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rate", type=float, help="requests per second")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0, 3.0])
    parser.add_argument("--kill-every", type=float, default=3.0, metavar="SECONDS", help="soak: mean pause")
    parser.add_argument("--streams", type=int, default=12, help="soak: requests at a time")
    parser.add_argument("--tokens", type=int, default=160, help="soak: of the shortest answer")
    parser.add_argument("--num-kv-blocks", type=int, default=1000, help="soak: of each worker")
    parser.add_argument("--seed", type=int, default=0, help="soak: of the kills")
    parser.add_argument("--worker-file", metavar="FILE")
    args = parser.parse_args()
    args.requests, args.rate = args.requests or REQUESTS[args.experiment], args.rate or RATES[args.experiment]
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None and args.experiment == "soak":
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
