"""`paceline tune tree RECORDING`: the size and shape of a method's draft tree, from a recording, without a model.

    paceline bench record --workload all --out recording.jsonl
    paceline bench curve --out curve.json
    paceline tune tree recording.jsonl --method recycling --curve curve.json --out tuned.json
    paceline serve --config tuned.json

The table has a row for each size: what the measured chances promise (expected) and what the method then did with it on
requests that the chances do not come from (replayed).
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidOptionError

if TYPE_CHECKING:
    from paceline.bench.replay.tree_choice import TreeChoice, TunedTree

DEFAULT_NODES = (4, 8, 16, 32)
NEED_A_RECORDING = ("method", "curve", "nodes", "out")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recording", nargs="?", metavar="RECORDING", help="of `paceline bench record`; without: a model runs, recycling"
    )
    group = parser.add_argument_group("with a recording")
    group.add_argument("--method", metavar="NAME", help="ngram, suffix, recycling or merge, or JSON with its options")
    group.add_argument("--curve", metavar="FILE", help="pass cost, of `paceline bench curve`; without: rows are free")
    group.add_argument("--nodes", type=int, nargs="+", metavar="N", help=f"sizes (default: {DEFAULT_NODES})")
    group.add_argument("--out", metavar="FILE", help="write the configuration there, for `paceline serve --config`")


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what would be ignored."""
    given = [name for name in NEED_A_RECORDING if getattr(args, name) is not None]
    if args.recording is None and given:
        raise InvalidOptionError(
            f"--{given[0]} needs a recording: paceline tune tree RECORDING (make one with `paceline bench record`)"
        )
    for name, instead in (("data", "the prompts are in the recording"), ("max_nodes", "--nodes gives the sizes")):
        if args.recording is not None and getattr(args, name) is not None:
            raise InvalidOptionError(f"--{name.replace('_', '-')} is for a model that runs; here {instead}")


def run(args: argparse.Namespace) -> int:
    from paceline.bench.replay.recording import load_recording
    from paceline.bench.replay.tree_choice import choose_tree
    from paceline.lab.pass_cost import FREE, PassCost

    tuned = choose_tree(
        load_recording(args.recording),
        _method(args.method or "recycling"),
        args.nodes or DEFAULT_NODES,
        max_depth=args.max_depth,
        pass_cost=PassCost.load(args.curve) if args.curve else FREE,
    )
    config = {"method": "none"} if tuned.best is None else tuned.best.config
    if args.out:
        Path(args.out).write_text(json.dumps({"speculative_config": config}) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(_record(tuned, config)))
    else:
        _explain(args, tuned, config)
    return 0


def _method(text: str) -> dict[str, Any]:
    """A method's name, or its configuration as JSON."""
    if not text.lstrip().startswith("{"):
        return {"method": text}
    try:
        config: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidOptionError(f"--method is neither a name nor JSON: {error}") from error
    return config


def _row(choice: "TreeChoice", with_curve: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "nodes": len(choice.shape),
        "depth": len(choice.nodes_by_depth),
        "expected tokens/pass": round(choice.shape.expected_tokens, 3),
        "replayed tokens/pass": round(choice.replayed.counts.mean_acceptance_length, 3),
    }
    if with_curve:
        row["expected speedup"] = round(choice.expected_speedup, 3)
        row["replayed speedup"] = round(choice.replayed.speedup, 3)
    return row | {"nodes by depth": " ".join(map(str, choice.nodes_by_depth))}


def _record(tuned: "TunedTree", config: dict[str, Any]) -> dict[str, Any]:
    return {
        "speculative_config": config,
        "acceptance_by_depth_and_rank": tuned.counts.chances(),
        "steps_with_a_draft": tuned.counts.draft_share,
        "requests_learned_from": tuned.num_learned,
        "requests_judged_on": tuned.num_judged or tuned.num_learned,
        "choices": [
            {
                "nodes": len(choice.shape),
                "parents": choice.shape.parents,
                "ranks": choice.shape.ranks,
                "expected_tokens_per_pass": choice.shape.expected_tokens,
                "expected_speedup": choice.expected_speedup,
                "replayed_tokens_per_pass": choice.replayed.counts.mean_acceptance_length,
                "replayed_speedup": choice.replayed.speedup,
            }
            for choice in tuned.choices
        ],
    }


def _explain(args: argparse.Namespace, tuned: "TunedTree", config: dict[str, Any]) -> None:
    from paceline.cli.lab import format_table

    others = f"judged on {tuned.num_judged} others" if tuned.num_judged else "judged on the same: record more"
    print(
        f"chances from {tuned.num_learned} requests, {others}; {tuned.counts.draft_share:.0%} of the steps had a draft"
    )
    for depth, row in enumerate(tuned.counts.chances()[:3]):
        print(
            f"depth {depth + 1}: the 1st, 2nd, ... child is right with chances {', '.join(f'{p:.2f}' for p in row[:5])}"
        )
    print(format_table([_row(choice, args.curve is not None) for choice in tuned.choices]))
    if not args.curve:
        print("without --curve more rows cost nothing, so the largest tree wins: measure with `paceline bench curve`")
    if tuned.best is None:
        print("no tree pays: leave this method off")
        return
    if tuned.without_start is not None:
        [started] = [choice.replayed for choice in tuned.choices if len(choice.shape) == len(tuned.best.shape)]
        print(
            f"started with the recording's figures: {started.counts.mean_acceptance_length:.3f} tokens per pass; "
            f"without: {tuned.without_start.counts.mean_acceptance_length:.3f}"
        )
    if "credit" in config and not args.out:
        print("(the members' record is too long to show: keep it with --out FILE)")
        config = {key: value for key, value in config.items() if key != "credit"}
    print(f"best: {f'paceline serve --config {args.out}' if args.out else _as_option(config)}")


def _as_option(config: dict[str, Any]) -> str:
    return f"--speculative-config '{json.dumps(config)}'"
