"""`paceline tune layer-skip`: find the layers of a model that draft best for it, and store them.

Afterwards `--spec-method layer_skip` uses them by itself."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import options
from paceline.errors import InvalidOptionError

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.spec.layer_search import Candidate


SAMPLE = "chat,code,extraction,summary,translation,maths"  # one of each kind in turn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(metavar="WHAT", dest="what", required=True)
    layer_skip = what.add_parser("layer-skip", help="search the layers that draft in self-speculation")
    layer_skip.add_argument("--data", metavar="FILE", help="prompts (JSONL); default: prompts of different kinds, ours")
    layer_skip.add_argument("--prompts", type=int, default=8, help="how many (default: %(default)s)")
    layer_skip.add_argument("--tokens", type=int, default=64, help="answer tokens of each (default: %(default)s)")
    layer_skip.add_argument("--evaluations", type=int, default=120, help="subsets measured (default: %(default)s)")
    layer_skip.add_argument("--seed", type=int, default=0)
    layer_skip.add_argument("--output", metavar="FILE", help="store the answer there instead of in the cache")
    layer_skip.add_argument("--json", action="store_true", help="one JSON object")
    options.add_model_arguments(layer_skip)


def run(args: argparse.Namespace) -> int:
    for name in ("prompts", "tokens", "evaluations"):
        if getattr(args, name) < 1:
            raise InvalidOptionError(f"--{name} must be at least 1, got {getattr(args, name)}")
    from paceline.llm import LLM

    llm = LLM(args.model, {"method": "none"}, **options.model_options(args))
    best, meter_positions = _search(args, llm)
    path = _store(args, llm, best, meter_positions)
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

    from paceline.spec.layer_search import AgreementMeter, search_layers

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
    from paceline.bench.workloads import take
    from paceline.core.sampling_params import SamplingParams

    prompts = take(args.data or SAMPLE, args.prompts)
    tokens = [llm.chat_prompt([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    outputs = llm.generate(list(tokens), params, on_step=on_step)
    return [([*o.prompt_token_ids, *o.outputs[0].token_ids], len(o.prompt_token_ids)) for o in outputs]


def _store(args: argparse.Namespace, llm: "LLM", best: "Candidate", num_positions: int) -> Path:
    from paceline.models.aliases import cache_dir
    from paceline.spec.layer_search import store, stored_path

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
