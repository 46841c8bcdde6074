"""`paceline chat`: a conversation in the terminal. It keeps its history; an answer can be stopped with Ctrl-C."""

import argparse
import sys
from typing import TYPE_CHECKING

from paceline.cli import options

if TYPE_CHECKING:
    from paceline.core.sampling_params import SamplingParams
    from paceline.llm import LLM

HELP = "/reset forgets the conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message for the whole conversation")
    options.add_model_arguments(parser)
    options.add_speculation_arguments(parser)
    options.add_sampling_arguments(parser, max_tokens=512)


def run(args: argparse.Namespace) -> int:
    params = options.sampling_params(args)
    llm = options.make_llm(args)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    print(f"{args.model}: {HELP}", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return 0
        if line == "/quit":
            return 0
        if line == "/reset":
            messages = list(opening)
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        elif line:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _answer(llm, messages, params)})


def _answer(llm: "LLM", messages: list[dict[str, str]], params: "SamplingParams") -> str:
    """Stream one answer; what was said until Ctrl-C is kept."""
    text = ""
    metrics = None
    try:
        for output in llm.stream(llm.chat_prompt(messages), params):
            new = output.outputs[0].text[len(text) :]
            text += new
            metrics = output.metrics
            print(new, end="", flush=True)
            if output.error is not None:
                raise output.error
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print()
    if metrics is not None:
        print(f"[{options.summary_line(metrics)}]", file=sys.stderr)
    return text
