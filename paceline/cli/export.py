"""`paceline export DRAFTER --format speculators|eagle3`: an EAGLE-3 drafter as a folder that vLLM loads.

DRAFTER is a file that `paceline train eagle3` wrote, or `eagle3` for the one that is shipped with the model."""

import argparse
from pathlib import Path

from paceline.cli import options

LAYOUTS = ("speculators", "eagle3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", help="a drafter's file, or 'eagle3' for the shipped one")
    parser.add_argument("--format", choices=LAYOUTS, default="speculators", help="(default: %(default)s)")
    parser.add_argument("--output", metavar="FOLDER", type=Path, required=True)
    parser.add_argument("--spec-tokens", type=int, default=4, help="written into the config (default: %(default)s)")
    options.add_model_arguments(parser)


def public_name(model: str) -> str:
    """What others may call the target: an alias or Hub id, and of a path its last part only."""
    return Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else model


def run(args: argparse.Namespace) -> int:
    from paceline.models.drafters.export import export_eagle3
    from paceline.models.drafters.load import load_network
    from paceline.models.loader import load_model

    loaded = load_model(args.model, kernels="torch", device="cpu", quantization=None, quiet=True)
    model = None if args.drafter == "eagle3" else args.drafter
    network = load_network("eagle3", model, loaded.decoder)
    export_eagle3(network, loaded.config, public_name(args.model), args.output, args.format, args.spec_tokens)
    config = f'{{"method": "eagle3", "model": "{args.output}", "num_speculative_tokens": {args.spec_tokens}}}'
    print(f"{args.output}\nvLLM: LLM(TARGET, speculative_config={config})")
    return 0
