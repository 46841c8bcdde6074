"""`paceline demo`: the same prompts plainly and with speculation, side by side, and a table at the end.

Both sides run on one engine with one copy of the weights; a request says for itself whether it is drafted for. They
take turns, so that a slow moment of the machine does not always hit the same side.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.cli import options

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from paceline.core.outputs import RequestOutput
    from paceline.llm import LLM

PROMPTS = {
    "chat": "What should I pack for three days of hiking in the rain? Answer with a short list.",
    "code": "Write a Python class Stack with push, pop, peek and is_empty, each with a one-line docstring.",
    "edit": (
        "Rename the variable total to amount in this code and print the whole code again.\n\n"
        "def invoice(items):\n    total = 0\n    for item in items:\n        total = total + item.price * item.count\n"
        "    if total > 100:\n        total = total * 0.9\n    return total\n"
    ),
    "extract": (
        "Copy every line about a train, exactly as it stands.\n\n"
        "Train 12 leaves Aberdeen at 07:05 from platform 3.\nThe cafe opens at 06:30.\n"
        "Train 31 leaves Stirling at 08:40 from platform 1.\nTickets are sold in the main hall.\n"
        "Train 58 leaves Inverness at 09:15 from platform 7.\n"
    ),
    "story": "Tell me a short story about a lighthouse keeper who finds a letter in a bottle.",
}


@dataclass(slots=True)
class Side:
    """One prompt, one way: what came out, and how fast."""

    token_ids: list[int]
    decode_tok_s: float
    acceptance_length: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=96, help="per answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each side; medians are shown")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", action="store_true", help="only one JSON line at the end")
    options.add_model_arguments(parser)
    options.add_speculation_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from paceline.llm import LLM

    console = Console(stderr=args.json, highlight=False)
    if not console.is_terminal:
        console.width = 120  # a log file wraps nothing
    best = "eagle3" if args.model == options.DEFAULT_MODEL else "auto"  # as measured: docs/methods_table.md
    config = options.speculative_config(args) or {"method": best}
    args.speculative_config, args.spec_method, args.spec_model, args.spec_tokens = json.dumps(config), None, None, None
    console.print(f"[bold]paceline demo[/bold]  {args.model}, drafting with {config['method']}")
    plain_llm = options.make_llm(_plainly(args))
    plain_llm.generate("Warm up.", _params(args))
    rows: dict[str, tuple[list[Side], list[Side]]] = {kind: ([], []) for kind in PROMPTS}
    for turn in range(args.rounds):
        # A new engine in every round: a drafter that remembers answers must not have seen this one.
        sides = {True: plain_llm, False: LLM(plain_llm.engine.model, config, max_model_len=args.max_model_len)}
        sides[False].generate("Warm up.", _params(args))
        for i, (kind, text) in enumerate(PROMPTS.items()):
            order = (True, False) if (i + turn) % 2 == 0 else (False, True)
            outputs = _show(console, sides, args, kind, text, order, live=turn == 0)
            for plain, output in outputs.items():
                rows[kind][0 if plain else 1].append(_side(output))
    results = [_result(kind, *sides) for kind, sides in rows.items()]
    console.print()
    console.print(_table(results))
    console.print(_verdict(results))
    if args.json:
        print(json.dumps({"model": args.model, "speculative_config": config, "results": results}))
    return 0 if all(result["identical"] for result in results) else 1


def _plainly(args: argparse.Namespace) -> argparse.Namespace:
    """The same arguments without speculation."""
    return argparse.Namespace(**{**vars(args), "speculative_config": json.dumps({"method": "none"})})


def _params(args: argparse.Namespace) -> Any:
    from paceline.core.sampling_params import SamplingParams

    return SamplingParams(temperature=args.temperature, seed=7, max_tokens=args.max_tokens)


def _show(
    console: "Console",
    sides: "dict[bool, LLM]",  # plain or not -> engine
    args: argparse.Namespace,
    kind: str,
    text: str,
    order: tuple[bool, bool],
    live: bool,
) -> "dict[bool, RequestOutput]":
    """Run both sides one after the other; the first time they write into two columns while they run."""
    from rich.live import Live

    prompt = sides[True].chat_prompt([{"role": "user", "content": text}])
    outputs: dict[bool, RequestOutput] = {}
    with Live(console=console, auto_refresh=False, transient=not live) as screen:
        for plain in order:
            for output in sides[plain].stream(prompt, _params(args)):
                outputs[plain] = output
                if output.error is not None:
                    raise output.error
                if live and (console.is_terminal or output.finished):
                    screen.update(_columns(kind, outputs), refresh=console.is_terminal)
    return outputs


def _columns(kind: str, outputs: "dict[bool, RequestOutput]") -> "RenderableType":
    from rich.columns import Columns
    from rich.panel import Panel
    from rich.text import Text

    panels = []
    for plain, title in ((True, f"{kind}: plain"), (False, f"{kind}: speculative")):
        output = outputs.get(plain)
        body = Text(output.outputs[0].text if output else "")
        subtitle = options.summary_line(output.metrics) if output and output.metrics else None
        panels.append(Panel(body, title=title, subtitle=subtitle, expand=True))
    return Columns(panels, equal=True, expand=True)


def _side(output: "RequestOutput") -> Side:
    metrics = output.metrics
    assert metrics is not None
    speed = 1 / metrics.tpot_s if metrics.tpot_s else 0.0
    return Side(output.outputs[0].token_ids, speed, metrics.mean_acceptance_length)


def _result(kind: str, plain: list[Side], speculative: list[Side]) -> dict[str, Any]:
    plain_speed = statistics.median(side.decode_tok_s for side in plain)
    speculative_speed = statistics.median(side.decode_tok_s for side in speculative)
    return {
        "kind": kind,
        "num_tokens": len(plain[0].token_ids),
        "plain_tok_s": plain_speed,
        "speculative_tok_s": speculative_speed,
        "mean_acceptance_length": statistics.median(side.acceptance_length for side in speculative),
        "speedup": speculative_speed / plain_speed if plain_speed else 0.0,
        "identical": all(side.token_ids == plain[0].token_ids for side in [*plain, *speculative]),
    }


def _table(results: list[dict[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table(title="decode speed, median of the timed runs")
    for name in ("prompt", "tokens", "plain tok/s", "speculative tok/s", "tokens per pass", "speedup", "same tokens"):
        table.add_column(name, justify="left" if name == "prompt" else "right")
    for r in results:
        colour = "green" if r["speedup"] >= 1 else "red"
        table.add_row(
            r["kind"],
            str(r["num_tokens"]),
            f"{r['plain_tok_s']:.1f}",
            f"{r['speculative_tok_s']:.1f}",
            f"{r['mean_acceptance_length']:.2f}",
            f"[{colour}]{r['speedup']:.2f}x[/{colour}]",
            "yes" if r["identical"] else "[red]NO[/red]",
        )
    return table


def _verdict(results: list[dict[str, Any]]) -> str:
    plain_s = sum(r["num_tokens"] / r["plain_tok_s"] for r in results if r["plain_tok_s"])
    speculative_s = sum(r["num_tokens"] / r["speculative_tok_s"] for r in results if r["speculative_tok_s"])
    overall = plain_s / speculative_s if speculative_s else 0.0
    slower = [r["kind"] for r in results if r["speedup"] < 1]
    verdict = f"Over all prompts speculation ran at [bold]{overall:.2f}x[/bold] the plain speed"
    verdict += f"; it lost on: {', '.join(slower)}." if slower else "; it lost on none."
    if any(not r["identical"] for r in results):
        verdict += "\n[red]Outputs differ: that is a bug. Please report it with this output.[/red]"
    else:
        verdict += " Every answer was the same, token for token."
    return verdict
