"""`paceline tune`: settings that are measured, not guessed.

layer-skip   the layers of a model that draft best for it; stored, so that `--spec-method layer_skip` uses them
tree         the draft tree of token recycling that is fastest here: acceptance by rank against the cost of a pass; or,
             from a recording and for more methods, without a model (tune_tree.py)
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import options, tune_tree
from paceline.errors import InvalidOptionError

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.spec.model.layer_search import Candidate


MAX_NODES, MAX_DEPTH = 64, 8
SAMPLE = "chat,code,extraction,summary,translation,maths"  # one of each kind in turn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(metavar="WHAT", dest="what", required=True)
    layer_skip = what.add_parser("layer-skip", help="search the layers that draft in self-speculation")
    layer_skip.add_argument("--evaluations", type=int, default=120, help="subsets measured (default: %(default)s)")
    layer_skip.add_argument("--seed", type=int, default=0)
    layer_skip.add_argument("--output", metavar="FILE", help="store the answer there instead of in the cache")
    tree = what.add_parser("tree", help="the fastest size and shape of a draft tree")
    tune_tree.add_arguments(tree)
    tree.add_argument("--max-nodes", type=int, help=f"without a recording (default: {MAX_NODES})")
    tree.add_argument("--max-depth", type=int, help=f"(default: {MAX_DEPTH}; with a recording the method's, if more)")
    for verb in (layer_skip, tree):
        verb.add_argument("--data", metavar="FILE", help="prompts (JSONL); default: prompts of different kinds, ours")
        verb.add_argument("--prompts", type=int, default=8, help="how many (default: %(default)s)")
        verb.add_argument("--tokens", type=int, default=64, help="answer tokens of each (default: %(default)s)")
        verb.add_argument("--json", action="store_true", help="one JSON object")
        options.add_model_arguments(verb)


def run(args: argparse.Namespace) -> int:
    for name in ("prompts", "tokens", "evaluations", "max_nodes", "max_depth"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise InvalidOptionError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.what == "layer-skip":
        return _tune_layers(args)
    tune_tree.check_arguments(args)
    return _tune_tree(args) if args.recording is None else tune_tree.run(args)


def _tune_tree(args: argparse.Namespace) -> int:
    from paceline.core.tree import DraftTree
    from paceline.lab.live_pass_cost import PassCostModel
    from paceline.spec.auto.cost import calibrate
    from paceline.spec.config.tree_shape import fastest_shape
    from paceline.spec.recycle.recycling import RecyclingProposer

    llm = _llm(args, "recycling")
    _texts(args, llm, lambda done, total: None)
    speculator = llm.engine.core.speculator
    proposer = speculator.proposers["recycling"]
    assert isinstance(proposer, RecyclingProposer)
    figures = speculator.stats()["recycling"]
    draft_s = figures["draft_s"] / max(1, figures["num_proposals"])
    cost = PassCostModel(calibrate(speculator.services))
    shape = fastest_shape(
        [proposer.acceptance],
        args.max_nodes or MAX_NODES,
        args.max_depth or MAX_DEPTH,
        verify_s=lambda nodes: cost.at(1 + nodes),
        draft_s=lambda depth: draft_s,
    )
    depths = DraftTree([0] * len(shape), shape.parents).depths()
    config = {"method": "recycling", "num_speculative_tokens": max(depths, default=0), "node_budget": len(shape)}
    speedup = shape.expected_tokens * cost.at(1) / (cost.at(1 + len(shape)) + (draft_s if len(shape) else 0.0))
    record = {
        "speculative_config": config if len(shape) else {"method": "none"},
        "parents": shape.parents,
        "ranks": shape.ranks,
        "expected_tokens_per_step": shape.expected_tokens,
        "estimated_speedup": speedup,
        "acceptance_by_rank": proposer.acceptance,
        "pass_cost_s": cost.table(),
    }
    if args.json:
        print(json.dumps(record))
    else:
        _explain_tree(record)
    return 0


def _explain_tree(record: dict[str, Any]) -> None:
    rates = ", ".join(f"{rate:.2f}" for rate in record["acceptance_by_rank"])
    costs = ", ".join(f"{rows}: {seconds * 1e3:.1f}" for rows, seconds in record["pass_cost_s"].items())
    print(f"the next token is the table's 1st, 2nd, ... choice with chances {rates}")
    print(f"a pass takes, by rows, {costs} ms")
    if record["speculative_config"]["method"] == "none":
        print("no tree pays on this machine: leave recycling off")
        return
    print(f"fastest tree: --speculative-config '{json.dumps(record['speculative_config'])}'")
    print(
        f"expected {record['expected_tokens_per_step']:.2f} tokens per step, {record['estimated_speedup']:.2f}x plain"
    )


def _llm(args: argparse.Namespace, method: str) -> "LLM":
    from paceline.llm import LLM
    from paceline.spec.config.speculative_config import at_default_size

    return LLM(args.model, at_default_size({"method": method}), **options.model_options(args))


def _tune_layers(args: argparse.Namespace) -> int:
    llm = _llm(args, "none")
    best, num_positions = _search(args, llm)
    path = _store(args, llm, best, num_positions)
    record = {
        "draft_layers": list(best.layers),
        "num_speculative_tokens": best.num_speculative_tokens,
        "agreement": best.agreement,
        "estimated_speedup": best.speedup,
        "stored": str(path),
    }
    if args.json:
        print(json.dumps(record))
    else:
        _explain(best, path)
    return 0


def _search(args: argparse.Namespace, llm: "LLM") -> "tuple[Candidate, int]":
    from rich.console import Console
    from rich.progress import Progress

    from paceline.spec.model.layer_search import AgreementMeter, search_layers

    console = Console(stderr=True, quiet=args.json)
    with Progress(console=console, transient=True) as progress:
        answers = progress.add_task("the model answers the sample prompts", total=args.prompts)
        texts = _texts(args, llm, lambda done, total: progress.update(answers, completed=done))
        decoder = llm.engine.model.decoder
        meter = AgreementMeter(decoder, texts)
        num_layers = decoder.config.num_layers
        whole_s, half_s = (meter.pass_seconds(range(n)) for n in (num_layers, max(1, num_layers // 2)))
        layer_s = max((whole_s - half_s) / (num_layers - max(1, num_layers // 2) or 1), 1e-9)
        subsets = progress.add_task("subsets of layers", total=args.evaluations)

        def show(done: int, found: "Candidate") -> None:
            text = f"best so far: {len(found.layers)} layers, agreement {found.agreement:.2f}"
            progress.update(subsets, completed=done, description=text)

        best = search_layers(
            meter.agreement,
            lambda n: min(1.0, (whole_s - (num_layers - n) * layer_s) / whole_s),
            num_layers,
            args.evaluations,
            args.seed,
            show,
        )
    return best, meter.num_positions


def _texts(args: argparse.Namespace, llm: "LLM", on_step: Callable[[int, int], None]) -> list[tuple[list[int], int]]:
    from paceline.bench.workloads.workload import take
    from paceline.core.sampling_params import SamplingParams

    prompts = take(args.data or SAMPLE, args.prompts)
    tokens = [llm.chat_prompt([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    outputs = llm.generate(list(tokens), params, on_step=on_step)
    return [([*o.prompt_token_ids, *o.outputs[0].token_ids], len(o.prompt_token_ids)) for o in outputs]


def _store(args: argparse.Namespace, llm: "LLM", best: "Candidate", num_positions: int) -> Path:
    from paceline.models.aliases import cache_dir
    from paceline.spec.model.layer_search import store, stored_path

    path = Path(args.output) if args.output else stored_path(cache_dir(), llm.engine.model.config)
    about = {"model": args.model, "agreement": best.agreement, "positions": num_positions, "seed": args.seed}
    store(path, best, about)
    return path


def _explain(best: "Candidate", path: Path) -> None:
    print(f"layers that draft: {', '.join(map(str, best.layers))}")
    print(f"they choose the model's own token {best.agreement:.1%} of the time")
    if best.speedup <= 1.0:
        print("no subset is fast and right enough to pay on this machine: leave layer_skip off", file=sys.stderr)
    else:
        print(f"estimated speedup {best.speedup:.2f}x with num_speculative_tokens {best.num_speculative_tokens}")
    print(f"stored in {path}")
