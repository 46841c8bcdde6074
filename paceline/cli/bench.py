"""`paceline bench`: measure, sweep, report, replay.

paceline bench run    --setting ngram:4 --workload code --concurrency 4
paceline bench sweep  --setting plain auto ngram:4 suffix:8 --workload chat code --concurrency 1 8 --out runs.jsonl
paceline bench sweep  --setting plain=http://localhost:8000 ngram=http://localhost:8001 --out vllm.jsonl
paceline bench report runs.jsonl --out report.html --config-out config.json [--users 8]
paceline bench pair   TARGET DRAFT --out pair.html
paceline bench quantization MODEL@float32 MODEL FOLDER... --out quantization.html
paceline bench contributions
paceline bench never-slower | adapt | predict | overhead | curve | record | replay
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.cli import (
    bench_claims,
    bench_contributions,
    bench_never_slower,
    bench_pair,
    bench_quantization,
    bench_report,
    options,
)
from paceline.cli.lab import format_table

if TYPE_CHECKING:
    from paceline.bench.run.backend import Backend
    from paceline.bench.run.grid import Grid, Setting
    from paceline.bench.run.results import RecordFile
    from paceline.bench.run.side_by_side import MakeEngine
    from paceline.bench.run.sweep import MakeBackend
    from paceline.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="bench_verb", required=True, metavar="VERB")
    single = verbs.add_parser("run", help="one setting on one workload, printed")
    single.add_argument("--setting", default="auto", help="plain, auto, METHOD:K, JSON or NAME=URL (default: auto)")
    single.add_argument(
        "--workload", default="all", help="category, list of them, all, agents, or a file (default: all)"
    )
    single.add_argument("--concurrency", type=int)
    single.add_argument("--rate", type=float, metavar="PER_S", help="open loop: Poisson arrivals instead of users")
    single.add_argument("--temperature", type=float, default=0.0)
    single.set_defaults(bench_run=_run)
    add_run_arguments(single)
    sweep = verbs.add_parser("sweep", help="settings x workloads x temperatures x loads, resumable")
    sweep.add_argument("--setting", nargs="+", default=["plain", "auto"], metavar="SETTING")
    sweep.add_argument("--k", type=int, nargs="+", default=[], help="with --method: each method at each of these K")
    sweep.add_argument("--method", nargs="+", default=[], help="with --k")
    add_sweep_arguments(sweep)
    sweep.set_defaults(bench_run=_sweep)
    bench_report.add_verb(verbs)
    bench_pair.add_verb(verbs)
    bench_quantization.add_verb(verbs)
    bench_contributions.add_verb(verbs)
    bench_never_slower.add_verb(verbs)
    bench_claims.add_verbs(verbs)
    for verb in verbs.choices.values():
        verb.add_argument("--json", action="store_true", help="JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    if "plot" in args and args.plot:
        from paceline.lab.charts import check_plot

        check_plot(args.plot)  # before hours of measuring, not after
    return int(args.bench_run(args))


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_arguments(parser)
    parser.add_argument("--requests", type=int, help="per run (default: twice the users, at least 4)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--natural-end", action="store_true", help="let answers end by themselves (default: full length)"
    )
    parser.add_argument("--warm-up", type=int, metavar="N", help="requests before the clock starts")
    parser.add_argument("--ttft-target", type=float, metavar="S", help="goodput: latest first token")
    parser.add_argument("--tpot-target", type=float, metavar="S", help="goodput: slowest time per token")


def add_sweep_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    parser.add_argument("--workload", nargs="+", default=defaults.get("workload", ["chat", "code", "repetitive"]))
    parser.add_argument("--temperature", type=float, nargs="+", default=defaults.get("temperature", [0.0]))
    parser.add_argument("--concurrency", type=int, nargs="+", default=defaults.get("concurrency", [1, 8]))
    parser.add_argument("--rate", type=float, nargs="+", default=[], metavar="PER_S", help="open loop loads as well")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--out", default=defaults.get("out", "runs.jsonl"), help="records; a rerun goes on where it was"
    )
    add_run_arguments(parser)


def make_grid(
    args: argparse.Namespace, settings: list[str], loads: list[Any], cold_settings: Sequence[str] = ()
) -> "Grid":
    from paceline.bench.run.backend import Sampling
    from paceline.bench.run.grid import Grid, enough_for, parse_setting

    def listed(value: Any) -> list[Any]:
        return value if isinstance(value, list) else [value]

    grid = Grid(
        [parse_setting(text) for text in settings],
        listed(args.workload),
        listed(args.temperature),
        loads,
        getattr(args, "repeats", 1),
        Sampling(max_tokens=args.max_tokens, seed=args.seed, ignore_eos=not args.natural_end),
        args.requests,
        args.model,
        requests_for=getattr(args, "requests_for", enough_for),
        cold_settings=[parse_setting(text) for text in cold_settings],
    )
    grid.check()
    return grid


def loads_of(args: argparse.Namespace) -> list[Any]:
    from paceline.bench.run.load import Load

    return [*(Load(concurrency=c) for c in args.concurrency), *(Load(rate_per_s=rate) for rate in args.rate)]


def backend_maker(args: argparse.Namespace) -> "MakeBackend":
    """Backends for settings; our engine's weights are loaded once and shared."""
    loaded: dict[str, Any] = {}

    def make(setting: "Setting") -> "Backend":
        if setting.url is not None:
            from paceline.bench.run.url_backend import UrlBackend

            return UrlBackend(setting.url)
        from paceline.bench.run.engine_backend import EngineBackend
        from paceline.llm import AsyncLLM

        given = options.model_options(args)
        llm = AsyncLLM(loaded.get("model", args.model), setting.config, **given)
        loaded["model"] = llm.engine.model
        return EngineBackend(llm, setting.config, args.model)

    return make


def engine_maker(args: argparse.Namespace) -> "MakeEngine":
    """Engines for settings, with one model."""
    loaded: dict[str, Any] = {}

    def make(setting: "Setting") -> "LLM":
        from paceline.llm import LLM

        llm = LLM(loaded.get("model", args.model), setting.config, **options.model_options(args))
        loaded["model"] = llm.engine.model
        return llm

    return make


def run_options(args: argparse.Namespace) -> Any:
    from paceline.bench.run.summary import LatencyTarget
    from paceline.bench.run.sweep import RunOptions

    target = None
    if args.ttft_target is not None or args.tpot_target is not None:
        target = LatencyTarget(args.ttft_target, args.tpot_target)
    return RunOptions(args.warm_up, target)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def sweep_to_records(args: argparse.Namespace, settings: list[str]) -> list[dict[str, Any]]:
    """Run what is missing; the grid's own records, old and new."""
    from paceline.bench.run.results import RecordFile
    from paceline.bench.run.sweep import run_sweep

    grid = make_grid(args, settings, loads_of(args))
    records = RecordFile(args.out)
    run_sweep(grid, backend_maker(args), records, run_options(args), say, _facts(args))
    return _latest(grid, records)


def sweep_side_by_side(
    args: argparse.Namespace, warm: list[str], cold: list[str], records: "RecordFile", plan: dict[str, Any]
) -> list[dict[str, Any]]:
    """The same with engines that take turns: settings on warm engines, and on cold ones."""
    from paceline.bench.run.side_by_side import run_side_by_side

    grid = make_grid(args, warm, loads_of(args), cold)
    run_side_by_side(grid, engine_maker(args), records, run_options(args), say, _facts(args), plan)
    return _latest(grid, records)


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(args).items() if not callable(value)}


def _latest(grid: "Grid", records: "RecordFile") -> list[dict[str, Any]]:
    """Of each of the grid's cells the last record."""
    keys = {grid.key(cell) for cell in grid.cells()}
    return list({record["key"]: record for record in records.records if record["key"] in keys}.values())


def _run(args: argparse.Namespace) -> int:
    from paceline.bench.run.load import Load
    from paceline.bench.run.provenance import provenance
    from paceline.bench.run.sweep import run_cell

    concurrency = args.concurrency if args.rate is not None else args.concurrency or 1
    load = Load(concurrency=concurrency, rate_per_s=args.rate)
    grid = make_grid(args, [args.setting], [load])
    cell = next(grid.cells())
    backend = backend_maker(args)(cell.setting)
    try:
        _, summary = run_cell(backend, grid, cell, run_options(args), _progress)
        described = backend.describe()
    finally:
        backend.close()
    record = {"cell": cell.describe(), "summary": summary, "backend": described, "provenance": provenance()}
    if not args.json:
        say("")
        print(format_table(_summary_rows(summary)))
    print(json.dumps(record))
    return 1 if summary["num_failed"] else 0


def _progress(done: int, total: int) -> None:
    print(f"\r{done}/{total} answered", end="", file=sys.stderr, flush=True)


def _summary_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, value in summary.items():
        if isinstance(value, dict) and "p50" in value:
            rows.append({"figure": name, "value": value["p50"], "p95": value["p95"], "p99": value["p99"]})
        elif isinstance(value, int | float):
            rows.append({"figure": name, "value": value, "p95": None, "p99": None})
    for name, value in (summary.get("speculation") or {}).items():
        if isinstance(value, int | float):
            rows.append({"figure": name, "value": value, "p95": None, "p99": None})
    return rows


def _sweep(args: argparse.Namespace) -> int:
    from paceline.bench.analyse.cells import analyse, table

    settings = [*args.setting, *(f"{method}:{k}" for method in args.method for k in args.k)]
    records = sweep_to_records(args, settings)
    analysis = analyse(records)
    rows = table(analysis)
    print(json.dumps(rows) if args.json else format_table(rows))
    for record in analysis.failed:
        say(f"failed and left out: {record['cell']['setting']}, {record['error']}")
    say(f"records: {args.out}; pictures: paceline bench report {args.out}")
    return 1 if analysis.failed else 0
