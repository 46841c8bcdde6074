"""`paceline bench contributions [FULL QUANTIZED]`: what each part of serving adds, alone and among the others."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import options
from paceline.cli.format_shelf import FormatShelf
from paceline.cli.lab import format_table, markdown_table

if TYPE_CHECKING:
    from paceline.bench.run.contributions import ContributionPlan


def add_verb(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from paceline.cli.bench import add_run_arguments

    verb = verbs.add_parser(
        "contributions", help="batching, paging, prefix sharing, quantization, speculation: each alone, and together"
    )
    default = options.DEFAULT_MODEL
    verb.add_argument("full", nargs="?", default=f"{default}@float32", help="in full precision (default: %(default)s)")
    verb.add_argument("quantized", nargs="?", default=default, help="the same model, quantized (default: %(default)s)")
    verb.add_argument("--users", type=int, default=16)
    verb.add_argument("--rounds", type=int, default=2, help="through all combinations (default: %(default)s)")
    verb.add_argument("--records", default="contributions.jsonl", help="a rerun goes on where it was")
    verb.add_argument("--markdown", metavar="FILE", help="write the table there too, for a page of the docs")
    add_run_arguments(verb)
    verb.set_defaults(bench_run=_contributions, max_tokens=32)


def _contributions(args: argparse.Namespace) -> int:
    from paceline.bench.analyse.cells import analyse
    from paceline.bench.analyse.contributions import contribution_rows
    from paceline.bench.run.results import RecordFile
    from paceline.bench.run.sweep import run_sweep
    from paceline.cli.bench import run_options, say

    plan = _plan(args)
    grid, records = plan.grid(), RecordFile(args.records)
    facts = {key: str(value) for key, value in vars(args).items() if not callable(value)}
    shelf = FormatShelf(args, plan.formats())
    run_sweep(grid, shelf.backend, records, run_options(args), say, facts)
    keys = {grid.key(cell) for cell in grid.cells()}
    rows = contribution_rows(analyse([record for record in records.records if record["key"] in keys]))
    if args.markdown:
        Path(args.markdown).write_text(markdown_table(rows), encoding="utf-8")
    print(json.dumps({"rows": rows, "records": args.records}) if args.json else format_table(rows))
    return 0


def _plan(args: argparse.Namespace) -> "ContributionPlan":
    from paceline.bench.run.backend import Sampling
    from paceline.bench.run.contributions import ContributionPlan, prompt_lines
    from paceline.bench.run.format_grid import parse_format
    from paceline.errors import InvalidOptionError

    if args.model != options.DEFAULT_MODEL or args.dtype != "auto" or args.quantization != "auto":
        raise InvalidOptionError("`bench contributions` takes its models as FULL and QUANTIZED, as in MODEL@float32")
    if args.max_model_len is not None:
        raise InvalidOptionError("`bench contributions` sets the longest request itself: leave --max-model-len out")
    if min(args.users, args.rounds) < 1:
        raise InvalidOptionError("users and rounds must be 1 or more")
    requests = args.requests or 2 * args.users
    prompts = Path(args.records).with_suffix(".prompts.jsonl")
    prompts.write_text("\n".join(prompt_lines(2 * requests)) + "\n", encoding="utf-8")
    sampling = Sampling(max_tokens=args.max_tokens, seed=args.seed, ignore_eos=not args.natural_end)
    full, quantized = parse_format(args.full), parse_format(args.quantized)
    plan = ContributionPlan(full, quantized, args.users, str(prompts), args.rounds, sampling, requests)
    plan.grid().check()
    return plan
