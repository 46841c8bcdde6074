"""`paceline verify`: prove on this machine, with this model, that speculation changes the speed and nothing else."""

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from paceline.cli.options import add_model_arguments, model_options
from paceline.errors import InvalidOptionError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.verify.check import Check
    from paceline.verify.plan import Plan
    from paceline.verify.verdict import Verdict

NUMBERS = {  # option -> field of the plan
    "prompts": "num_prompts",
    "max_tokens": "max_tokens",
    "long_prompts": "num_long_prompts",
    "long_tokens": "num_long_tokens",
    "samples": "num_samples",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="about a minute")
    size.add_argument("--thorough", action="store_true", help="hours: every method, tree, batch size and chunking")
    group = parser.add_argument_group("what to look at (lists are separated by commas)")
    group.add_argument("--methods", metavar="NAMES", help="besides oracle trees: drafting methods, or 'all' or 'none'")
    group.add_argument("--shapes", metavar="SHAPES", help="oracle trees: chain, random, or widths such as 4x2x1")
    group.add_argument("--batch-sizes", metavar="SIZES", help="requests that run together, such as 1,8,32")
    group.add_argument(
        "--chunks", metavar="SIZES", help="tokens per pass that prompts are cut to; 'whole' for no limit"
    )
    group.add_argument("--settings", metavar="NAMES", help="sampling settings by name; an unknown name lists them")
    group.add_argument("--rules", metavar="NAMES", help="verification rules whose samples are tested on the model")
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        action="append",
        default=[],
        help="a configuration of your own; repeatable",
    )
    group.add_argument("--prompts", type=int, metavar="N", help="how many prompts")
    group.add_argument("--max-tokens", type=int, metavar="N", help="tokens of each output")
    group.add_argument("--long-prompts", type=int, metavar="N", help="how many prompts get long answers, in one batch")
    group.add_argument("--long-tokens", type=int, metavar="N", help="tokens of each long answer")
    group.add_argument("--samples", type=int, metavar="N", help="samples of each distribution test")
    parser.add_argument(
        "--allow-rounding",
        action="store_true",
        help="pass where answers differ within rounding, on kernels that are not batch invariant",
    )
    parser.add_argument("--json", metavar="FILE", dest="json_file", help="write every figure to this file")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from paceline.models.loader import load_model
    from paceline.verify.plan import check_configs
    from paceline.verify.verdict import make_verdict

    plan = make_plan(args)
    check_configs(plan)
    console = Console(width=None if sys.stdout.isatty() else 180)
    begin_s = time.perf_counter()
    model = load_model(args.model, **{k: v for k, v in model_options(args).items() if k != "max_model_len"})
    checks = _run_checks(plan, model, console, begin_s)
    seconds = time.perf_counter() - begin_s
    verdict = make_verdict(checks, promised=model.decoder.batch_invariant, allow_rounding=args.allow_rounding)
    _print_table(console, checks)
    failed = sum(not check.passed for check in checks)
    how = "found differences" if verdict.passed else "FAILED"
    result = f"{failed} of {len(checks)} checks {how}" if failed else f"all {len(checks)} checks passed"
    _print_line(console, f"{args.model} ({model.execution}): {result} in {seconds:.0f} s")
    state = "proved" if verdict.passed else "FAILED"
    _print_line(console, f"{state}: {verdict.proved}. {verdict.explanation}")
    if args.json_file:
        _write_json(args, checks, verdict, model.execution, seconds)
    return 0 if verdict.passed else 1


def _run_checks(plan: "Plan", model: Any, console: "Console", begin_s: float) -> "list[Check]":
    from paceline.verify.plan import run_plan

    checks: list[Check] = []
    with console.status("starting") as status:

        def note(what: str) -> None:
            failures = sum(not check.passed for check in checks)
            state = f"{len(checks)} checks done, {failures} failed, {time.perf_counter() - begin_s:.0f} s"
            if console.is_terminal:
                status.update(f"{state}: {what}")
            else:
                print(f"[{state}] {what}", file=sys.stderr, flush=True)

        for check in run_plan(plan, model, note):
            checks.append(check)
            if not check.passed:
                console.print(f"{_mark(check)} {check.kind}: {_escaped(check.case)}: {check.finding}")
    return checks


def make_plan(args: argparse.Namespace) -> "Plan":
    """The chosen size, overlaid with what was asked for."""
    import dataclasses

    from paceline.spec.methods import PROPOSERS
    from paceline.verifiers import VERIFIERS
    from paceline.verify.plan import QUICK, THOROUGH, USUAL
    from paceline.verify.workload import SETTINGS

    plan = QUICK if args.quick else THOROUGH if args.thorough else USUAL
    changes: dict[str, Any] = {}
    if args.methods is not None:
        groups = {"none": (), "all": USUAL.methods}
        named = args.methods in groups
        changes["methods"] = groups[args.methods] if named else _names(args.methods, "--methods", PROPOSERS)
    if args.settings is not None:
        changes["settings"] = _names(args.settings, "--settings", SETTINGS)
    if args.rules is not None:
        exact = [name for name in VERIFIERS if name not in ("typical", "spechub")]
        changes["rules"] = _names(args.rules, "--rules", exact)
    if args.shapes is not None:
        changes["shapes"] = tuple(_shape(text) for text in args.shapes.split(",") if text)
    if args.batch_sizes is not None:
        changes["batch_sizes"] = tuple(_number(text, "--batch-sizes") for text in args.batch_sizes.split(","))
    if args.chunks is not None:
        sizes = [None if text == "whole" else _number(text, "--chunks") for text in args.chunks.split(",")]
        changes["chunks"] = tuple(sizes)
    for option, field in NUMBERS.items():
        if getattr(args, option) is not None:
            changes[field] = _number(str(getattr(args, option)), "--" + option.replace("_", "-"))
    changes["extra"] = tuple(_config(text) for text in args.speculative_config)
    return dataclasses.replace(plan, **changes)


def _names(text: str, option: str, known: Any) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidOptionError(f"{option}: unknown {', '.join(map(repr, unknown))}; choose from {' | '.join(known)}")
    return names


def _number(text: str, option: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise InvalidOptionError(f"{option} takes whole numbers from 1 up, got {text!r}")
    return int(text)


def _shape(text: str) -> str | tuple[int, ...]:
    if text in ("chain", "random"):
        return text
    return tuple(_number(width, "--shapes (widths such as 4x2x1)") for width in text.split("x"))


def _config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidOptionError(f"--speculative-config is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidOptionError('--speculative-config must be a JSON object such as {"method": "ngram"}')
    return config


def _print_table(console: "Console", checks: "list[Check]") -> None:
    from rich import box
    from rich.table import Table

    table = Table("", "check", "case", "finding", "s", box=box.SIMPLE)
    for check in checks:
        table.add_row(_mark(check), check.kind, _escaped(check.case), check.finding, f"{check.seconds:.1f}")
    console.print(table)


def _print_line(console: "Console", line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _mark(check: "Check") -> str:
    if check.passed:
        return "[green]ok[/]"
    return "[yellow]DIFFERS[/]" if check.explained_by_rounding else "[bold red]FAILED[/]"


def _escaped(case: str) -> str:
    return case.replace("[", r"\[")


def _write_json(
    args: argparse.Namespace, checks: "list[Check]", verdict: "Verdict", execution: str, seconds: float
) -> None:
    import dataclasses

    from paceline.bench.run.provenance import provenance

    arguments = {name: value for name, value in vars(args).items() if not callable(value)}
    record = {
        **provenance(arguments),
        "model": args.model,
        "execution": execution,
        "seconds": seconds,
        "passed": verdict.passed,
        "verdict": dataclasses.asdict(verdict),
        "checks": [dataclasses.asdict(check) for check in checks],
    }
    with open(args.json_file, "w") as file:
        json.dump(record, file, indent=1)
