"""Tools for a model whose chat template knows none: they are told of in the system message, and calls in a history are
written as text. The notation is Hermes', so that the same parser and the same grammar serve.

docs/structured.md shows the prompt.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.serve.tools.parsers import Hermes

PROMPT = """You can call these functions, one JSON object per line:
{tools}

To call a function, answer with its name and its arguments as JSON between two tags, like this:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
Results come in messages between <tool_response> and </tool_response>. If no function helps, answer in plain text."""


def generic_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with plain messages only."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    told = PROMPT.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [_written(call["function"]) for call in message.get("tool_calls", ())]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": "\n".join([*([content] if content else []), *calls])}


def _written(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{Hermes.BEGIN}\n{json.dumps(call, ensure_ascii=False)}\n{Hermes.END}"
