"""`paceline generate PROMPT`: complete a prompt, streaming to the terminal."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from paceline.cli import options
from paceline.errors import InvalidRequestError

if TYPE_CHECKING:
    from paceline.core.outputs import RequestOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the text to complete; left out or -: read standard input")
    parser.add_argument("--chat", action="store_true", help="ask it as a question, through the chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object: text, token ids, figures")
    options.add_model_arguments(parser)
    options.add_speculation_arguments(parser)
    options.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    text = sys.stdin.read() if args.prompt in (None, "-") else args.prompt
    if not text:
        raise InvalidRequestError("the prompt is empty: give some text")
    params = options.sampling_params(args)
    llm = options.make_llm(args)
    prompt = llm.chat_prompt([{"role": "user", "content": text}]) if args.chat else text
    shown = 0
    output: RequestOutput | None = None
    for output in llm.stream(prompt, params):
        if not args.json:
            new = output.outputs[0].text[shown:]
            shown += len(new)
            print(new, end="", flush=True)
    assert output is not None and output.metrics is not None
    if output.error is not None:
        raise output.error
    if args.json:
        print(json.dumps(_record(output)))
    else:
        print(f"\n\n[{options.summary_line(output.metrics)}]", file=sys.stderr)
    return 0


def _record(output: "RequestOutput") -> dict[str, object]:
    assert output.metrics is not None
    completion = output.outputs[0]
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "token_sources": completion.token_sources,
        "metrics": output.metrics.to_dict(),
    }
