"""`paceline lab`: the economics on the command line. No model, no engine (but for `expected --engine`).

paceline lab expected --acceptance .6 .7 .8 .9 --k 3 5 7
paceline lab accept   --acceptance 0.8 --trials 100000
paceline lab speedup  --acceptance 0.8 --draft-ms 0.5 --pass-cost curve.json --batch 1 8 32
paceline lab cost     --dollars-per-hour 0.40 --tokens-per-s 55 --speedup 1.8
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="lab_verb", required=True, metavar="expected|accept|speedup|cost")
    _add_expected(verbs.add_parser("expected", help="tokens per step: formula, simulator and, if asked, the engine"))
    _add_accept(verbs.add_parser("accept", help="play the accept/reject rule against the theory"))
    _add_speedup(verbs.add_parser("speedup", help="speedup over K, the best K, and the break-even acceptance"))
    _add_cost(verbs.add_parser("cost", help="dollars per million tokens, plain and speculative"))
    for verb in verbs.choices.values():
        verb.add_argument("--json", action="store_true", help="one JSON document instead of a table")
        verb.add_argument("--plot", metavar="FILE", help="draw it too: a .svg or .png file (extra plot)")
        verb.add_argument("--markdown", metavar="FILE", help="write the table there too, for a page of the docs")


def run(args: argparse.Namespace) -> int:
    handlers: dict[str, Callable[[argparse.Namespace], tuple[Rows, Any]]] = {
        "expected": _expected,
        "accept": _accept,
        "speedup": _speedup,
        "cost": _cost,
    }
    if args.plot:
        from paceline.lab.charts import check_plot

        check_plot(args.plot)
    rows, chart = handlers[args.lab_verb](args)
    print(json.dumps(rows) if args.json else format_table(rows))
    if args.markdown:
        Path(args.markdown).write_text(markdown_table(rows), encoding="utf-8")
    if args.plot:
        from paceline.lab.charts import save

        save(chart, args.plot)
    return 0


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Columns from the first row's keys, numbers to the right."""
    if not rows:
        return "(nothing to show)"
    header = list(rows[0])
    cells = [[_cell(row.get(key)) for key in header] for row in rows]
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """The same for a page of the docs."""
    header = list(rows[0]) if rows else ["(nothing to show)"]
    lines = [header, ["---"] * len(header), *([_cell(row.get(key)) for key in header] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _add_expected(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.6, 0.7, 0.8, 0.9], metavar="RATE")
    parser.add_argument("--k", type=int, nargs="+", default=[3, 5, 7], help="draft tokens per step")
    parser.add_argument("--steps", type=int, default=100_000, help="simulated steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", metavar="MODEL", help="also run the engine on MODEL with an oracle drafter")
    parser.add_argument("--engine-tokens", type=int, default=512, help="tokens per prompt in the engine's run")


def _expected(args: argparse.Namespace) -> tuple[Rows, Any]:
    from paceline.lab.charts import LineChart, Series
    from paceline.lab.expected import expected_tokens
    from paceline.lab.simulate import simulate_steps

    measured = {}
    if args.engine:
        from paceline.bench.claims.expected_tokens import measure_oracle

        measured = measure_oracle(args.engine, args.acceptance, args.k, args.engine_tokens, args.seed)
    rows: Rows = []
    for rate in args.acceptance:
        for k in args.k:
            simulated = simulate_steps(rate, k, args.steps, args.seed)
            row = {
                "acceptance": rate,
                "K": k,
                "formula": expected_tokens(rate, k),
                "simulator": simulated.tokens_per_step,
                "+-": 2 * simulated.standard_error,
            }
            if args.engine:
                tokens, error = measured[rate, k]
                row |= {"engine": tokens, "engine +-": 2 * error}
            rows.append(row)
    largest = max(args.k)
    series = [
        Series(f"acceptance {rate:g}", list(range(largest + 1)), [expected_tokens(rate, k) for k in range(largest + 1)])
        for rate in args.acceptance
    ]
    return rows, LineChart("Expected tokens per target pass", "draft tokens K", "tokens", series)


def _add_accept(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.6, 0.7, 0.8, 0.9], metavar="RATE")
    parser.add_argument("--target", type=float, nargs="+", help="p, as weights; with --draft instead of --acceptance")
    parser.add_argument("--draft", type=float, nargs="+", help="q, as weights")
    parser.add_argument("--vocab", type=int, default=16)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)


def _accept(args: argparse.Namespace) -> tuple[Rows, Any]:
    from paceline.errors import InvalidOptionError
    from paceline.lab.charts import BarChart
    from paceline.lab.simulate import as_distribution, simulate_rule, toy_pair

    if (args.target is None) != (args.draft is None):
        raise InvalidOptionError("--target and --draft belong together: give both distributions, or neither")
    if args.target is not None:
        pairs = [(as_distribution(args.target), as_distribution(args.draft))]
    else:
        pairs = [toy_pair(args.vocab, rate, args.seed) for rate in args.acceptance]
    rows: Rows = []
    for p, q in pairs:
        result = simulate_rule(p, q, args.trials, args.seed)
        rows.append(
            {
                "sum min(p,q)": result.accepted_theory,
                "accepted": result.accepted,
                "+-": 2 * result.standard_error,
                "distance of output to p": result.distance,
                "expected by chance": result.distance_by_chance,
            }
        )
    p, q = pairs[-1]
    emitted = [float(share) for share in simulate_rule(p, q, args.trials, args.seed).emitted]
    bars = [("target p", p.tolist()), ("draft q", q.tolist()), ("emitted", emitted)]
    title = "What comes out is distributed as the target"
    return rows, BarChart(title, "probability", [str(i) for i in range(p.size)], bars)


def _add_speedup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.6, 0.7, 0.8, 0.9], metavar="RATE")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="requests that share a pass")
    parser.add_argument("--draft-ms", type=float, default=0.0, help="time of one more draft token")
    parser.add_argument("--pass-cost", metavar="FILE", help="measured curve (paceline bench curve); default: free rows")
    parser.add_argument("--target-ms", type=float, default=10.0, help="time of a pass, without --pass-cost")
    parser.add_argument("--max-k", type=int, default=12)


def _speedup(args: argparse.Namespace) -> tuple[Rows, Any]:
    from paceline.lab.charts import LineChart, Series
    from paceline.lab.pass_cost import PassCost
    from paceline.lab.speedup import Speculation, best_k, break_even_acceptance, speedup

    curve = PassCost.load(args.pass_cost) if args.pass_cost else PassCost.of({1: args.target_ms / 1e3})
    rows: Rows = []
    series, marks = [], []
    for batch in args.batch:
        for rate in args.acceptance:
            point = Speculation(rate, args.draft_ms / 1e3, pass_cost=curve, batch=batch)
            best = best_k(point, args.max_k)
            needed = break_even_acceptance(point, max(1, best.num_draft_tokens))
            rows.append(
                {
                    "acceptance": rate,
                    "batch": batch,
                    "best K": best.num_draft_tokens,
                    "speedup": best.speedup,
                    "break-even acceptance": needed,
                    "advice": "turn it off" if best.num_draft_tokens == 0 else f"K = {best.num_draft_tokens}",
                }
            )
            ks = list(range(args.max_k + 1))
            series.append(Series(f"acceptance {rate:g}, batch {batch}", ks, [speedup(point, k) for k in ks]))
            marks.append((best.num_draft_tokens, best.speedup, f"K={best.num_draft_tokens}"))
    return rows, LineChart("Speedup over plain decoding", "draft tokens K", "speedup", series, level=1.0, marks=marks)


def _add_cost(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dollars-per-hour", type=float, required=True)
    parser.add_argument("--tokens-per-s", type=float, nargs="+", required=True, help="measured plain speeds")
    parser.add_argument("--speedup", type=float, nargs="+", default=[1.0, 1.5, 2.0, 3.0])
    parser.add_argument("--utilization", type=float, default=1.0, help="busy part of each hour")


def _cost(args: argparse.Namespace) -> tuple[Rows, Any]:
    from paceline.lab.charts import LineChart, Series
    from paceline.lab.money import dollars_per_million_tokens

    def dollars(speed: float, factor: float) -> float:
        return dollars_per_million_tokens(args.dollars_per_hour, speed * factor, args.utilization)

    rows: Rows = [
        {"plain tokens/s": speed, "speedup": factor, "$ per million tokens": dollars(speed, factor)}
        for speed in args.tokens_per_s
        for factor in args.speedup
    ]
    series = [
        Series(f"{speed:g} tokens/s plain", args.speedup, [dollars(speed, factor) for factor in args.speedup])
        for speed in args.tokens_per_s
    ]
    return rows, LineChart("Cost of a million tokens", "speedup", "$", series)
