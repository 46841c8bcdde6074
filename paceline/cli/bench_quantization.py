"""`paceline bench quantization MODEL...`: one model in several formats, with and without drafters, on one page."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import options
from paceline.cli.format_shelf import FormatShelf
from paceline.cli.lab import format_table, markdown_table

if TYPE_CHECKING:
    from paceline.bench.run.format_grid import Format, FormatPlan
    from paceline.llm import LLM


def add_verb(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from paceline.cli.bench import add_run_arguments

    verb = verbs.add_parser(
        "quantization", help="formats of one model: bytes, speed, quality, what drafters gain on each; one page"
    )
    verb.add_argument(
        "models", nargs="+", metavar="MODEL", help="MODEL, MODEL@float32 (or bfloat16, float16, int8), NAME=MODEL"
    )
    verb.add_argument("--reference", metavar="MODEL", help="full precision (default: the first model)")
    verb.add_argument("--users", type=int, nargs="+", default=[1, 8, 32])
    verb.add_argument(
        "--drafter",
        nargs="+",
        default=["ngram", "eagle3", "auto"],
        help="as METHOD, METHOD:K or NAME={JSON}; those that do not fit are left out",
    )
    verb.add_argument(
        "--drafter-size",
        nargs="+",
        choices=["default", "price"],
        default=["default"],
        help="of drafters named without one: the default size, what pays (as an engine on a CPU drafts), or both",
    )
    verb.add_argument(
        "--drafter-users", type=int, nargs="+", default=[1], help="where drafters are measured (default: 1)"
    )
    verb.add_argument("--workload", default="chat,code")
    verb.add_argument("--rounds", type=int, default=3, help="through all formats and drafters (default: %(default)s)")
    verb.add_argument("--held-out", metavar="FILE", help="text to compare on (default: prompts of ours, with answers)")
    verb.add_argument("--held-out-samples", type=int, default=16)
    verb.add_argument("--tasks", metavar="FILE", help="JSON lines: question, answer (default: 40 of arithmetic)")
    verb.add_argument("--dollars-per-hour", type=float, default=1.0, help="of this machine (default: %(default)s)")
    verb.add_argument(
        "--one-at-a-time", action="store_true", help="load a format for each run: slow, but in less memory"
    )
    verb.add_argument("--records", default="quantization.jsonl", help="a rerun goes on where it was")
    verb.add_argument("--out", default="quantization.html", help="the page (default: %(default)s)")
    verb.add_argument("--markdown", metavar="FILE", help="the tables, for a page of the docs")
    verb.add_argument("--plots", metavar="FOLDER", type=Path, help="the pictures as files too (extra plot)")
    add_run_arguments(verb)
    verb.set_defaults(bench_run=_quantization, max_tokens=48)


def _quantization(args: argparse.Namespace) -> int:
    from paceline.bench.analyse.format_advice import advice
    from paceline.bench.analyse.formats import different_outputs, drafter_rows, format_figures, matrix_rows
    from paceline.bench.analyse.formats_page import explanation, formats_page, save_charts

    formats = _formats(args)
    shelf = FormatShelf(args, formats, keep_all=not args.one_at_a_time)
    plan = _plan(args, formats, shelf)
    qualities = _qualities(args, formats, shelf)
    records = _measure(args, plan, shelf)
    price = args.dollars_per_hour
    title = f"Formats of {formats[0].model}"
    Path(args.out).write_text(formats_page(records, qualities, title, price), encoding="utf-8")
    figures = format_figures(records, qualities)
    rows, drafters, sentences = matrix_rows(figures, price), drafter_rows(figures), advice(figures)
    if args.plots:
        save_charts(figures, args.plots)
    if args.markdown:
        said = "".join(f"- {sentence}\n" for sentence in sentences)
        tables = f"{markdown_table(rows)}\n{markdown_table(drafters) if drafters else ''}"
        text = f"{explanation(qualities, price)}\n\n{tables}\n{said}"
        Path(args.markdown).write_text(text, encoding="utf-8")
    if args.json:
        print(json.dumps({"matrix": rows, "drafters": drafters, "advice": sentences, "page": args.out}))
    else:
        print(format_table(rows))
        print(format_table(drafters) if drafters else "")
        print("\n".join(sentences))
        print(f"page: {args.out}; records: {args.records}")
    return 1 if different_outputs(records) else 0


def _formats(args: argparse.Namespace) -> "list[Format]":
    from paceline.bench.run.format_grid import check_formats, parse_format
    from paceline.errors import InvalidOptionError

    if args.model != options.DEFAULT_MODEL:
        raise InvalidOptionError("`bench quantization` takes its models as arguments: leave --model out")
    if args.dtype != "auto" or args.quantization != "auto":
        raise InvalidOptionError("give a format's type with its name, as in MODEL@float32: leave --dtype out")
    formats = [parse_format(text) for text in args.models]
    if args.reference is not None:
        reference = parse_format(args.reference)
        formats = [reference, *(form for form in formats if form != reference)]
    check_formats(formats)
    if min([*args.users, *args.drafter_users, args.rounds, args.held_out_samples]) < 1:
        raise InvalidOptionError("users, rounds and samples must be 1 or more")
    if args.plots:
        from paceline.lab.charts import check_matplotlib

        check_matplotlib()
    return formats


def _plan(args: argparse.Namespace, formats: "list[Format]", shelf: FormatShelf) -> "FormatPlan":
    from paceline.bench.run.backend import Sampling
    from paceline.bench.run.format_grid import FormatPlan, parse_drafters

    drafters = parse_drafters(args.drafter, args.drafter_size)
    plan = FormatPlan(
        formats,
        {
            form.name: {name: config for name, config in drafters.items() if _fits(shelf, form.name, name, config)}
            for form in formats
        },
        sorted(set(args.users) | set(args.drafter_users)),
        sorted(set(args.drafter_users)),
        args.workload,
        args.rounds,
        Sampling(max_tokens=args.max_tokens, seed=args.seed, ignore_eos=not args.natural_end),
        args.requests,
    )
    for grid in plan.grids():
        grid.check()
    return plan


def _fits(shelf: FormatShelf, form: str, drafter: str, config: dict[str, Any]) -> bool:
    """Whether the drafter works on this format; a trained one may not exist for it."""
    from paceline.cli.bench import say
    from paceline.errors import PacelineError

    shelf.llm(form)  # what is wrong with the model itself is no matter of the drafter
    try:
        shelf.llm(form, config)
    except PacelineError as error:
        say(f"{drafter} is left out on {form}: {error}")
        return False
    return True


def _qualities(args: argparse.Namespace, formats: "list[Format]", shelf: FormatShelf) -> dict[str, dict[str, Any]]:
    """By format; the reference too, whose figures show what its own kernels round."""
    from paceline.bench.run.passages import HELD_OUT, passages
    from paceline.bench.run.quality import agreement, check_same_tokens, exact_matches, load_tasks
    from paceline.cli.bench import say

    tasks = load_tasks(args.tasks, args.seed)
    reference = shelf.llm(formats[0].name)
    text = passages(reference, args.held_out or HELD_OUT, args.held_out_samples, args.seed)
    found = {}
    for form in formats:
        llm = reference if form is formats[0] else shelf.llm(form.name)
        check_same_tokens(reference, llm, form.name)
        quality = agreement(reference, llm, text).to_dict()
        quality |= {"exact_match": exact_matches(llm, tasks), "bytes": _weight_bytes(llm)}
        found[form.name] = quality
        say(f"{form.name}: KL {quality['kl']:.5f}, same top {quality['same_top']:.2%}, {llm.engine.model.execution}")
    return found


def _weight_bytes(llm: "LLM") -> int:
    """What a pass reads, or about what the weights take where the decoder does not say."""
    from paceline.models.decoder import Decoder
    from paceline.models.memory import weight_bytes
    from paceline.models.native import NativeDecoder

    model = llm.engine.model
    if isinstance(model.decoder, NativeDecoder | Decoder):
        return model.decoder.weight_bytes
    if model.decoder.device.type == "cuda" and model.decoder.draws_tokens:
        from paceline.models.fused_decoder import FusedDecoder  # triton exists only where CUDA does

        assert isinstance(model.decoder, FusedDecoder)
        return model.decoder.base.weight_bytes
    return weight_bytes(model.path, model.config, model.decoder.dtype, None)


def _measure(args: argparse.Namespace, plan: "FormatPlan", shelf: FormatShelf) -> list[dict[str, Any]]:
    from paceline.bench.run.results import RecordFile
    from paceline.bench.run.sweep import run_sweep
    from paceline.cli.bench import run_options, say

    records = RecordFile(args.records)
    facts = {key: str(value) for key, value in vars(args).items() if not callable(value)}
    keys: set[str] = set()
    for grid in plan.grids():
        run_sweep(grid, shelf.backend, records, run_options(args), say, facts)
        keys |= {grid.key(cell) for cell in grid.cells()}
    return list({record["key"]: record for record in records.records if record["key"] in keys}.values())
