"""`paceline VERB ...`: one file per verb, loaded only when it is called, so that `--help` is instant.

A verb's file has `add_arguments(parser)` and `run(args) -> exit code`, and imports what is heavy inside functions. One
that takes options from a file has `expand_arguments(arguments)` too, which writes them out.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from paceline.core.progress import show_bars
from paceline.errors import PacelineError

VERBS = {
    "demo": "plain decoding beside speculation, live, on prompts of different kinds",
    "generate": "complete a prompt",
    "chat": "talk to the model in the terminal",
    "verify": "prove that speculation changes nothing but the speed, on this machine with this model",
    "bench": "measure: methods, lengths, temperatures, loads; report and recommend",
    "lab": "the economics of speculation: expected tokens, speedup, cost",
    "serve": "an OpenAI-compatible server",
    "cluster": "many workers behind one server: start, look, stop; or simulate a load on one",
    "tune": "search settings that need measuring, such as the layers that self-speculation skips",
    "train": "train a drafter for a model: eagle3, eagle, medusa, dflash, draft or a pool",
    "export": "write an EAGLE-3 drafter as a folder that vLLM loads",
    "quantize": "write a model as a quantized folder: awq, gptq, fp8 or int8, with a report on what it lost",
    "models": "the models that are known by name, and which are on this disk",
    "doctor": "what this machine has, which kernels run, and what a pass of 1 to 64 rows costs",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_bars(False)  # verbs show their own progress
    try:
        args = _parser(arguments[0] if arguments else None).parse_args(_expanded(arguments))
        return int(args.run(args))
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _expanded(arguments: list[str]) -> list[str]:
    if not arguments or arguments[0] not in VERBS:
        return arguments
    expand = getattr(importlib.import_module(f"paceline.cli.{arguments[0]}"), "expand_arguments", None)
    return arguments if expand is None else [arguments[0], *expand(arguments[1:])]


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    from paceline import __version__

    parser = argparse.ArgumentParser(
        prog="paceline", description="LLM inference built around exact speculative decoding."
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, summary in VERBS.items():
        description = summary[0].upper() + summary[1:] + "."
        # No abbreviations: what looks for --config before this parser does would not see them.
        verb = verbs.add_parser(name, help=summary, description=description, allow_abbrev=False)
        if name == chosen:
            module = importlib.import_module(f"paceline.cli.{name}")
            module.add_arguments(verb)
            verb.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
