"""`paceline bench pair TARGET DRAFT`: a small model drafting for a larger one, measured and put on one page."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import options
from paceline.cli.lab import format_table, markdown_table

if TYPE_CHECKING:
    from paceline.bench.run.pair_grid import PairPlan
    from paceline.lab.pass_cost import PassCost

LARGEST_PASS = 128  # rows of the pass cost curve; beyond them its last slope goes on


def add_verb(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from paceline.cli.bench import add_run_arguments

    pair = verbs.add_parser(
        "pair", help="a small model drafting a larger one: K swept, trees, sampling rules, one page"
    )
    pair.add_argument("target", help="the larger model")
    pair.add_argument("draft", help="the smaller one")
    pair.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8], help="draft tokens to try")
    pair.add_argument(
        "--min-prob",
        type=float,
        nargs="*",
        default=[0.5],
        help="chains of the largest K that stop at less likely paths",
    )
    pair.add_argument(
        "--file-k", type=int, nargs="*", default=[], help="K with the draft model's weights as its file has them (CPU)"
    )
    pair.add_argument("--study", nargs="+", choices=["chains", "trees", "rules"], default=["chains", "trees", "rules"])
    pair.add_argument("--width", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="of trees at their first level")
    pair.add_argument("--depth", type=int, default=4, help="of the trees (default: %(default)s)")
    pair.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    pair.add_argument("--workload", nargs="+", default=["code", "chat"])
    pair.add_argument("--repeats", type=int, default=3)
    pair.add_argument("--records", default="pair.jsonl", help="a rerun goes on where it was (default: %(default)s)")
    pair.add_argument("--out", default="pair.html", help="the page (default: %(default)s)")
    pair.add_argument("--markdown", metavar="FILE", help="the tables, for a page of the docs")
    pair.add_argument("--plots", metavar="FOLDER", help="the pictures as files too (extra plot)")
    add_run_arguments(pair)
    pair.set_defaults(bench_run=_pair)


def _pair(args: argparse.Namespace) -> int:
    from paceline.bench.analyse.cells import analyse
    from paceline.bench.analyse.pair import category_rows, position_rows, sweet_spots, variant_rows, width_rows
    from paceline.bench.analyse.pair_page import pair_page, save_pair_charts

    plan = _plan(args)
    records = _measure(args, plan)
    curve = _curve(args)
    title = f"{plan.draft} drafting for {plan.target}"
    Path(args.out).write_text(pair_page(records, curve, title), encoding="utf-8")
    analysis = analyse(records)
    spots = [spot.row() for spot in sweet_spots(analysis, curve)]
    widths, variants = width_rows(analysis), variant_rows(analysis)
    if args.plots:
        save_pair_charts(records, curve, Path(args.plots))
    if args.markdown:
        tables = [spots, variants, position_rows(analysis), category_rows(analysis), widths]
        Path(args.markdown).write_text("\n".join(markdown_table(rows) for rows in tables if rows), encoding="utf-8")
    if args.json:
        print(json.dumps({"sweet_spots": spots, "ways": variants, "widths": widths, "page": args.out}))
    else:
        for rows in (spots, variants, widths):
            print(format_table(rows) if rows else "")
        print(f"page: {args.out}; records: {args.records}")
    return 1 if analysis.failed else 0


def _plan(args: argparse.Namespace) -> "PairPlan":
    from paceline.bench.run.backend import Sampling
    from paceline.bench.run.pair_grid import PairPlan
    from paceline.errors import InvalidOptionError

    if args.model != options.DEFAULT_MODEL:
        raise InvalidOptionError("`bench pair` takes its models as TARGET and DRAFT: leave --model out")
    args.model = args.target
    if min([*args.k, *args.file_k, *args.width, *args.users, args.depth]) < 1:
        raise InvalidOptionError("K, widths, depth and users must be 1 or more")
    if args.plots:
        from paceline.lab.charts import check_matplotlib

        check_matplotlib()
    sampling = Sampling(max_tokens=args.max_tokens, seed=args.seed, ignore_eos=not args.natural_end)
    plan = PairPlan(
        args.target,
        args.draft,
        sorted(set(args.k)),
        sorted(set(args.width)),
        args.depth,
        sorted(set(args.users)),
        args.workload,
        args.repeats,
        sampling,
        args.requests,
        sorted(set(args.min_prob)),
        sorted(set(args.file_k)),
        args.study,
    )
    for grid in plan.grids():
        grid.check()
    _check_vocabularies(args.target, args.draft)
    return plan


def _check_vocabularies(target: str, draft: str) -> None:
    """Trees and sampled drafts need one vocabulary: better said now than after the chains were measured."""
    from paceline.errors import InvalidOptionError
    from paceline.models.loading import load_tokenizer
    from paceline.models.resolve import resolve_model

    first, second = (load_tokenizer(resolve_model(name)).vocabulary() for name in (target, draft))
    if first != second:
        raise InvalidOptionError(
            f"{target} has {len(first)} tokens and {draft} has {len(second)}, not all the same: the lab of a pair "
            "needs two models with one vocabulary"
        )


def _measure(args: argparse.Namespace, plan: "PairPlan") -> list[dict[str, Any]]:
    """Run what is missing; the records of all three grids."""
    from paceline.bench.run.results import RecordFile
    from paceline.bench.run.sweep import run_sweep
    from paceline.cli.bench import backend_maker, run_options, say

    records = RecordFile(args.records)
    facts = {key: value for key, value in vars(args).items() if not callable(value)}
    make, keys = backend_maker(args), set()
    for grid in plan.grids():
        run_sweep(grid, make, records, run_options(args), say, facts)
        keys |= {grid.key(cell) for cell in grid.cells()}
    return list({record["key"]: record for record in records.records if record["key"] in keys}.values())


def _curve(args: argparse.Namespace) -> "PassCost":
    from paceline.bench.run.curve import DEFAULT_ROWS, measure_curve

    most = min(LARGEST_PASS, max(args.users) * (max(args.k) + 1))
    rows = [count for count in DEFAULT_ROWS if count <= most]
    return measure_curve(args.model, rows, num_rounds=2, **options.model_options(args))
