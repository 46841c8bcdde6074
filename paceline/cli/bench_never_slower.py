"""`paceline bench never-slower`: the claim for `auto`, measured on engines that take turns."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import options
from paceline.cli.lab import format_table, markdown_table

if TYPE_CHECKING:
    from paceline.bench.claims.never_slower import Mean, Verdict
    from paceline.bench.run.results import Record, RecordFile

FULL_ROUNDS, QUICK_ROUNDS = 6, 1
NOT_MEASURED = ("json", "plot", "markdown", "out")  # what is done with the figures


def add_verb(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from paceline.bench.claims.never_slower import CLAIMED
    from paceline.cli.bench import add_sweep_arguments

    never = verbs.add_parser("never-slower", help="auto against plain and the best fixed setting, in every cell")
    never.add_argument(
        "--setting",
        nargs="+",
        help="plain, auto and the fixed settings (default: n-gram and suffix at several K); on cold engines plain and "
        "auto only",
    )
    never.add_argument(
        "--start",
        choices=["warm", "cold", "both"],
        default="warm",
        help="warm: engines that have been running; cold: new ones, from their first request on (default: warm)",
    )
    never.add_argument(
        "--quick", action="store_true", help="fewer settings, shorter, one round: a look, not enough for a verdict"
    )
    add_sweep_arguments(never, **CLAIMED, out="never-slower.jsonl")
    never.add_argument("--plot", metavar="FILE", help="draw it: a .svg or .png file (extra plot)")
    never.add_argument("--markdown", metavar="FILE", help="write the tables there too, for a page of the docs")
    never.set_defaults(bench_run=run, repeats=None)


def run(args: argparse.Namespace) -> int:
    from paceline.bench.claims.never_slower import FAILS, HOLDS, OPEN, heat_map, worst
    from paceline.errors import InvalidOptionError
    from paceline.lab.charts import save

    args.repeats = args.repeats or (QUICK_ROUNDS if args.quick else FULL_ROUNDS)
    records, facts = _measured(args)
    found, over, failed = _judged(records, args)
    if not found:
        raise InvalidOptionError(
            "never-slower needs the settings plain and auto and at least one load with --concurrency"
        )
    if args.plot:
        save(heat_map(found), args.plot)
    claim = worst({*(verdict.holds for verdict in found), *(mean.holds for mean in over if mean.holds), *failed})
    text = {HOLDS: "holds", FAILS: "fails", OPEN: "open"}[claim]
    names = {HOLDS: "held", FAILS: "failed_cells", OPEN: "open"}
    counts = {name: sum(verdict.holds == said for verdict in found) for said, name in names.items()}
    summary = {"claim": text, "cells": len(found), **counts, "failed_runs": len(failed), **facts}
    _print(args, found, over, summary)
    return 0 if claim == HOLDS else 1


def _measured(args: argparse.Namespace) -> "tuple[list[Record], dict[str, Any]]":
    """The records of the grid, and what is to be said of them beside the verdicts."""
    from paceline.bench.claims.never_slower import (
        COLD_SETTINGS,
        DEFAULT_SETTINGS,
        QUICK_SETTINGS,
        QUICK_TOKENS,
        WITH_SHIPPED_DRAFTER,
        requests_for,
    )
    from paceline.bench.run.plan import check_plan, make_plan
    from paceline.bench.run.results import RecordFile
    from paceline.cli.bench import sweep_side_by_side

    settings = list(args.setting or (QUICK_SETTINGS if args.quick else DEFAULT_SETTINGS))
    if args.setting is None and args.model == options.DEFAULT_MODEL:
        settings += WITH_SHIPPED_DRAFTER
    if args.quick:
        args.max_tokens = min(args.max_tokens, QUICK_TOKENS)
    warm = settings if args.start != "cold" else []
    cold = [name for name in COLD_SETTINGS if name in settings] if args.start != "warm" else []
    said = {key: value for key, value in vars(args).items() if not callable(value) and key not in NOT_MEASURED}
    plan = make_plan(said | {"setting": warm, "cold_setting": cold})
    args.requests_for = requests_for
    records = RecordFile(args.out)
    check_plan(records, plan)
    found = sweep_side_by_side(args, warm, cold, records, plan)
    return found, {"rounds": args.repeats, "plan": plan, **_facts(found, records)}


def _facts(found: "list[Record]", records: "RecordFile") -> dict[str, Any]:
    from paceline.bench.analyse.intervals import median

    start_s: dict[str, list[float]] = {}
    for record in found:
        if "start_s" in record["summary"]:
            start_s.setdefault(record["cell"]["setting"], []).append(record["summary"]["start_s"])
    return {
        "commits": sorted({str(record["provenance"]["commit"]) for record in found}),
        "measured_again": len(records.records) - len(found),  # whole points, because a run failed or was stopped
        "start_up_s": {setting: round(median(all_of).value, 2) for setting, all_of in start_s.items()},
    }


def _judged(records: "list[Record]", args: argparse.Namespace) -> "tuple[list[Verdict], list[Mean], list[str]]":
    """Verdicts, means, and a failure for each run that failed."""
    from paceline.bench.analyse.cells import analyse
    from paceline.bench.claims.never_slower import CLAIMED, FAILS, means, verdicts

    is_claimed = all(sorted(set(getattr(args, name))) == sorted(values) for name, values in CLAIMED.items())
    found: list[Verdict] = []
    over: list[Mean] = []
    failed: list[str] = []
    for start in ("cold", "warm") if args.start == "both" else (args.start,):
        analysis = analyse(records, start)
        of_start = verdicts(analysis, args.repeats, start)
        found += of_start
        over += means(analysis, of_start, is_claimed)
        failed += [FAILS] * len(analysis.failed)
    return found, over, failed


def _print(args: argparse.Namespace, found: "list[Verdict]", over: "list[Mean]", summary: dict[str, Any]) -> None:
    """Tables and one line of JSON with everything in it."""
    from paceline.bench.claims.never_slower import AUTO
    from paceline.bench.run.provenance import provenance

    starts = list(dict.fromkeys(verdict.start for verdict in found))
    tables = [[verdict.row() for verdict in found if verdict.start == start] for start in starts]
    tables.append([mean.row() for mean in over])
    lines = [f"The claim {_sentence(summary)}."]
    start_up_s = summary["start_up_s"]
    if {AUTO, "plain"} <= set(start_up_s):
        lines.append(
            f"Before the first request, in no figure above: auto starts in {start_up_s[AUTO]} s, plain decoding in "
            f"{start_up_s['plain']} s, with the model loaded."
        )
    if not args.json:
        print("\n\n".join([*map(format_table, tables), "\n".join(lines)]))
    print(json.dumps({"rows": [row for rows in tables[:-1] for row in rows], "means": tables[-1], **summary,
                      "provenance": provenance()}))  # fmt: skip
    if args.markdown:
        Path(args.markdown).write_text("\n".join([*map(markdown_table, tables), *lines]) + "\n", encoding="utf-8")


def _sentence(summary: dict[str, Any]) -> str:
    from paceline.bench.analyse.intervals import least_count
    from paceline.bench.claims.never_slower import COVERAGE

    least = least_count(COVERAGE)
    if summary["claim"] == "open":
        if summary["rounds"] < least:
            why = f"{summary['rounds']} rounds have no intervals of {COVERAGE:.0%}, {least} have"
        else:
            why = "rounds are missing"
        return f"is open: {why}, and no geometric mean is below its bar"
    if summary["claim"] == "fails":
        cells = f"{summary['failed_cells']} of {summary['cells']} cells fail, {summary['open']} are open"
        return f"fails: {cells}, {summary['failed_runs']} runs failed; means below their bar are marked above"
    return f"holds in {summary['cells']} cells of {summary['rounds']} rounds each"
