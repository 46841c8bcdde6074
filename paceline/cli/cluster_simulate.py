"""`paceline cluster simulate`: a load on a cluster that need not exist."""

import argparse
import json
import time
from typing import Any


def add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--worker", required=True, metavar="FILE", help="a kind of worker: JSON with its pass_cost (bench curve --out)"
    )
    parser.add_argument("--prefill-worker", metavar="FILE", help="those that only read prompts (default: --worker)")
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--trace", metavar="FILE", help="JSON lines: ours, or Mooncake's")
    load.add_argument("--load", metavar="NAME=N,...", help="made up: requests, rate, prompt, output, groups, prefix")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests of the trace")
    parser.add_argument("--faster", type=float, default=1.0, metavar="FACTOR", help="requests come so much faster")
    parser.add_argument("--workers", type=int, nargs="+", metavar="N", help="numbers of mixed workers to try")
    parser.add_argument("--prefill", type=int, nargs="+", metavar="N", help="with --decode: prefill workers")
    parser.add_argument("--decode", type=int, nargs="+", metavar="N", help="one for each of --prefill")
    parser.add_argument("--router", nargs="+", default=["kv_aware"], metavar="NAME", help="several: compare them")
    parser.add_argument("--policy", nargs="+", default=["cost"], metavar="NAME", help="where prompts are computed")
    parser.add_argument("--ttft-ms", type=float, help="target: then the fewest workers that meet it are searched")
    parser.add_argument("--gap-ms", type=float, help="target for the time between the items of a stream")
    parser.add_argument("--percentile", type=float, default=99.0, help="of both targets (default: %(default)s)")
    parser.add_argument("--max-workers", type=int, default=64, help="of the search (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--plot", metavar="FILE", help="draw it too: a .svg or .png file (extra plot)")


def run_simulate(args: argparse.Namespace) -> int:
    from paceline.cli.lab import format_table
    from paceline.errors import InvalidOptionError

    if args.plot:
        from paceline.lab.charts import check_plot

        check_plot(args.plot)
    searches = args.ttft_ms is not None or args.gap_ms is not None
    if not searches and args.workers is None and args.prefill is None:
        raise InvalidOptionError("give numbers of workers (--workers, or --prefill and --decode), or targets to meet")
    if len(args.prefill or []) != len(args.decode or []):
        raise InvalidOptionError("--prefill and --decode belong together: one number of each for every cluster")
    trace = _trace(args)
    started = time.perf_counter()
    rows, num_simulated = _plan(args, trace) if searches else _compare(args, trace)
    seconds = time.perf_counter() - started
    if args.plot:
        _plot(rows, args.plot)
    if args.json:
        print(json.dumps({"rows": rows, "simulated_requests": num_simulated, "seconds": seconds}))
        return 0
    print(format_table(rows) if rows else f"no cluster of up to {args.max_workers} workers meets the targets")
    print(f"\n{num_simulated} requests simulated in {seconds:.1f} s ({num_simulated / seconds:,.0f} a second)")
    return 0 if rows else 1


def _trace(args: argparse.Namespace) -> Any:
    from paceline.cluster.simulate.trace import Synthetic, load_trace

    trace = load_trace(args.trace, args.limit) if args.trace else Synthetic.parse(args.load).trace()
    return trace if args.faster == 1.0 else trace.faster(args.faster)


def _specs(args: argparse.Namespace) -> tuple[Any, Any]:
    from paceline.cluster.worker_spec import WorkerSpec

    worker = WorkerSpec.load(args.worker)
    return worker, WorkerSpec.load(args.prefill_worker) if args.prefill_worker else worker


def _compare(args: argparse.Namespace, trace: Any) -> tuple[list[dict[str, Any]], int]:
    from paceline.cluster.simulate.run import Fleet, simulate

    decode, prefill = _specs(args)
    fleets = [Fleet(decode, count) for count in args.workers or []]
    pairs = zip(args.prefill or [], args.decode or [], strict=True)
    fleets += [Fleet(decode, num_decode, prefill, num_prefill) for num_prefill, num_decode in pairs]
    rows = []
    for fleet in fleets:
        for router in args.router:
            for policy in args.policy if fleet.num_prefill else args.policy[:1]:
                outcome = simulate(trace, fleet, router, policy, args.seed)
                names = {"router": router, "policy": policy if fleet.num_prefill else None}
                rows.append({**names, **outcome.row()})
    return rows, len(rows) * len(trace.requests)


def _plan(args: argparse.Namespace, trace: Any) -> tuple[list[dict[str, Any]], int]:
    from paceline.cluster.simulate.plan import Planner, Targets

    def seconds(milliseconds: float | None) -> float | None:
        return None if milliseconds is None else milliseconds / 1e3

    decode, prefill = _specs(args)
    targets = Targets(seconds(args.ttft_ms), seconds(args.gap_ms), args.percentile)
    planner = Planner(trace, targets, args.router[0], args.policy[0], args.max_workers)
    found = list(planner.options(decode, prefill))
    found.sort(key=lambda outcome: (outcome.dollars_per_hour, outcome.num_workers))
    return [outcome.row() for outcome in found], planner.num_simulated


def _plot(rows: list[dict[str, Any]], path: str) -> None:
    from paceline.lab.charts import BarChart, save

    names = [
        " ".join(str(row[key]) for key in ("workers", "router", "policy") if row.get(key) is not None) for row in rows
    ]
    columns = {"first token p50": "TTFT p50 ms", "p99": "p99", "gap p50": "gap p50 ms", "gap p99": "gap p99"}
    bars = [(name, [row[column] for row in rows]) for name, column in columns.items()]
    save(BarChart("Simulated latencies", "ms", names, bars), path)
