"""The verbs of `paceline bench` behind single claims: each prints its table and writes its figures."""

import argparse
import json
from pathlib import Path
from typing import Any

from paceline.cli import options
from paceline.cli.lab import format_table, markdown_table

LEAST_PREDICTED = 0.9  # of the cells, within analyse/predict.py's TOLERANCE


def add_verbs(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    adapt = verbs.add_parser("adapt", help="random, then repetitive, then random text in one running engine")
    adapt.add_argument("--setting", nargs="+", default=["plain", "ngram:4", "suffix:8", "suffix:16"])
    adapt.add_argument("--concurrency", type=int, default=1)
    adapt.add_argument("--max-tokens", type=int, default=400)
    options.add_model_arguments(adapt)
    adapt.set_defaults(bench_run=_adapt)

    predict = verbs.add_parser(
        "predict",
        help="a sweep's speedups: predicted by the lab's model from other cells, and explained from the cell itself",
    )
    predict.add_argument("records", nargs="+")
    predict.add_argument(
        "--curve", nargs="+", required=True, metavar="[T=]FILE", help="from bench curve, by temperature"
    )
    predict.set_defaults(bench_run=_predict)

    overhead = verbs.add_parser("overhead", help="the controller's own time as a share of the step")
    overhead.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    overhead.add_argument("--workload", nargs="+", default=["chat", "repetitive"])
    overhead.add_argument("--max-tokens", type=int, default=64)
    options.add_model_arguments(overhead)
    overhead.set_defaults(bench_run=_overhead)

    curve = verbs.add_parser("curve", help="what a step of n rows costs")
    curve.add_argument("--rows", type=int, nargs="+")
    curve.add_argument("--temperature", type=float, default=0.0)
    curve.add_argument("--rounds", type=int, default=3)
    curve.add_argument("--context", type=int, default=128, help="tokens before each row (default: 128)")
    options.add_model_arguments(curve)
    curve.set_defaults(bench_run=_curve)

    record = verbs.add_parser("record", help="keep what the target says, for replay")
    record.add_argument("--workload", default="all")
    record.add_argument("--requests", type=int, default=32)
    record.add_argument("--temperature", type=float, default=0.0)
    record.add_argument("--max-tokens", type=int, default=128)
    options.add_model_arguments(record)
    record.set_defaults(bench_run=_record)

    replay = verbs.add_parser("replay", help="any method, K or tree on a recording, without the model")
    replay.add_argument("recording")
    replay.add_argument("--setting", nargs="+", default=["ngram:4", "suffix:8", "recycling", "merge", "auto"])
    replay.add_argument("--concurrency", type=int, default=1)
    replay.add_argument("--curve", metavar="FILE", help="pass cost, for the expected speedup")
    replay.add_argument("--live", metavar="MODEL", help="also run the engine, and compare the acceptance")
    replay.set_defaults(bench_run=_replay)
    for verb in (adapt, predict, overhead, curve):
        verb.add_argument("--plot", metavar="FILE", help="draw it: a .svg or .png file (extra plot)")
    for verb in (adapt, predict, overhead, curve, replay):
        verb.add_argument("--markdown", metavar="FILE", help="write the table there too, for a page of the docs")
    for verb in (adapt, predict, overhead, curve, record, replay):
        verb.add_argument("--out", metavar="FILE", required=verb is record, help="write the figures there, as JSON")


def _finish(
    args: argparse.Namespace,
    rows: list[dict[str, Any]],
    holds: bool = True,
    *,
    errors: list[dict[str, Any]] | None = None,  # a table of its own, before the other
    **more: Any,
) -> int:
    """Tables, JSON with provenance, and the exit code: 1 where the claim did not hold."""
    from paceline.bench.run.provenance import provenance

    tables = [rows] if errors is None else [errors, rows]
    result = {"rows": rows, **({} if errors is None else {"errors": errors}), **more, "provenance": provenance()}
    if not args.json:
        print("\n\n".join(map(format_table, tables)))
    print(json.dumps(result))
    if args.markdown:
        Path(args.markdown).write_text("\n".join(map(markdown_table, tables)), encoding="utf-8")
    if getattr(args, "out", None):
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if holds else 1


def _adapt(args: argparse.Namespace) -> int:
    from paceline.bench.claims.adapt import measure_adaptation
    from paceline.bench.run.backend import Sampling

    found = measure_adaptation(
        args.model,
        args.setting,
        concurrency=args.concurrency,
        sampling=Sampling(max_tokens=args.max_tokens),
        **options.model_options(args),
    )
    return _finish(args, [phase.row() for phase in found], all(phase.holds for phase in found))


def _predict(args: argparse.Namespace) -> int:
    from paceline.bench.analyse.cells import analyse
    from paceline.bench.analyse.predict import (
        chart,
        error_table,
        explained_of,
        predicted_of,
        predictions,
        share_within,
    )
    from paceline.bench.run.results import read_records
    from paceline.errors import InvalidOptionError
    from paceline.lab.charts import save
    from paceline.lab.pass_cost import PassCost

    curves = {}
    for text in args.curve:
        temperature, separator, path = text.partition("=")
        curves[float(temperature) if separator else 0.0] = PassCost.load(path if separator else text)
    found = predictions(analyse(read_records(args.records)), curves)
    if not found:
        raise InvalidOptionError("no cell of the records has a plain run beside it and the engine's own figures")
    if args.plot:
        save(chart(found), args.plot)
    shares = {"predicts": share_within(predicted_of(found)), "explains": share_within(explained_of(found))}
    errors = error_table(found)
    if shares["predicts"] is None and not args.json:
        print("Nothing could be predicted, only explained: a prediction needs cells with other numbers of users.")
    judged = shares["explains"] if shares["predicts"] is None else shares["predicts"]
    holds = judged is not None and judged >= LEAST_PREDICTED
    return _finish(args, [one.row() for one in found], holds, share_within_tolerance=shares, errors=errors)


def _overhead(args: argparse.Namespace) -> int:
    from paceline.bench.claims.overhead import measure_overhead

    rows = measure_overhead(args.model, args.batch, args.workload, args.max_tokens, **options.model_options(args))
    return _finish(args, rows, all(row["holds"] == "yes" for row in rows))


def _curve(args: argparse.Namespace) -> int:
    from paceline.bench.run.curve import DEFAULT_ROWS, measure_curve
    from paceline.lab.charts import LineChart, Series, save

    rows = args.rows or DEFAULT_ROWS
    given = options.model_options(args)
    given |= {"temperature": args.temperature, "num_rounds": args.rounds, "context": args.context}
    curve = measure_curve(args.model, rows, **given)
    points = list(zip(curve.rows, curve.seconds, strict=True))
    if args.plot:
        series = [Series(args.model, list(curve.rows), [1e3 * seconds for seconds in curve.seconds])]
        save(LineChart("Cost of a step", "rows in the pass", "ms", series), args.plot)
    printed = [
        {
            "rows": int(count),
            "ms": 1e3 * seconds,
            "of one row": seconds / curve.seconds[0],
            "ms/row": 1e3 * seconds / count,
        }
        for count, seconds in points
    ]
    return _finish(args, printed, pass_cost={str(int(count)): seconds for count, seconds in points})


def _record(args: argparse.Namespace) -> int:
    from paceline.bench.replay.recording import RECORDED_WITH, joined, record, save_recording
    from paceline.bench.run.backend import Sampling
    from paceline.bench.workloads.workload import take
    from paceline.llm import LLM
    from paceline.spec.config.speculative_config import at_default_size

    sampling = Sampling(max_tokens=args.max_tokens, temperature=args.temperature)
    model: Any = args.model
    found = []
    for method in RECORDED_WITH:
        llm = LLM(model, at_default_size({"method": method}), **options.model_options(args) | {"max_num_seqs": 1})
        model = llm.engine.model
        found.append(record(llm, take(args.workload, args.requests), sampling))
    recorded = [joined(all_of) for all_of in zip(*found, strict=True)]
    save_recording(recorded, args.out)
    num_tokens = sum(len(one.output_token_ids) for one in recorded)
    print(json.dumps({"file": args.out, "requests": len(recorded), "tokens": num_tokens}))
    return 0


def _replay(args: argparse.Namespace) -> int:
    from paceline.bench.replay.check_live import REPLAY_TOLERANCE, live_acceptance_length
    from paceline.bench.replay.recording import load_recording
    from paceline.bench.replay.replay import Replay
    from paceline.bench.run.grid import parse_setting
    from paceline.lab.pass_cost import FREE, PassCost

    recorded = load_recording(args.recording)
    cost = PassCost.load(args.curve) if args.curve else FREE
    loaded: Any = args.live
    rows, errors = [], []
    for text in args.setting:
        config = parse_setting(text).config
        result = Replay(recorded, config, concurrency=args.concurrency, pass_cost=cost).run()
        row: dict[str, Any] = {
            "setting": text,
            "tokens/pass": round(result.counts.mean_acceptance_length, 4),
            "accepted": round(result.counts.draft_acceptance_rate, 4),
            "drafted/pass": round(result.counts.num_draft_tokens / result.counts.num_steps, 2),
        }
        if args.curve:
            row["expected speedup"] = round(result.speedup, 3)
        if args.live:
            live, loaded = live_acceptance_length(loaded, config, recorded, args.concurrency)
            error = result.counts.mean_acceptance_length / live - 1
            errors.append(error)
            row |= {"live tokens/pass": round(live, 4), "error": f"{error:+.2%}"}
        rows.append(row)
    return _finish(args, rows, all(abs(error) <= REPLAY_TOLERANCE for error in errors))
