"""Calls that cannot be wrong: a Lark grammar of what a family writes, each call's arguments held to their schema.

start: calls                            tool_choice "required", or a named function
start: calls | content                  "auto" beside a response_format
start: text | text_and_marker ...       "auto" with a strict tool: calls may follow any text
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from paceline.serve.http.tool_bodies import Tool
from paceline.serve.tools.families import NAME, Family

# In one answer. A choice: small models repeat a call until something ends them; at half of it some that ask for many
# things at once would be cut short.
MAX_CALLS: Final = 16
# One spelling of JSON, the one that templates show: models that know no better otherwise write spaces without end.
_SPELLING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Literals are cut like JSON is. A longer one would swallow the beginning of a JSON object that may stand in its place.
_LEXEMES: Final = re.compile(r'"\w[^"]*"|[{}\[\]]|[^"{}\[\]]+|"')

# Text to a Lark expression. A marker that is a special token is no text: it must be named by its id.
Literal = Callable[[str], str]


def literal(marker: str, special_id: int | None) -> Literal:
    def write(text: str) -> str:
        if special_id is None or not text.startswith(marker):
            return " ".join(json.dumps(part) for part in _LEXEMES.findall(text))
        return f"<[{special_id}]> {write(text.removeprefix(marker))}"

    return write


def calls_grammar(
    family: Family,
    tools: Sequence[Tool],
    *,
    required: bool,
    parallel: bool,
    content: dict[str, Any] | None = None,
    special_id: int | None = None,
) -> str:
    """`content`: the schema that an answer without calls is held to. `special_id`: of the family's marker."""
    write = literal(family.marker, special_id)
    if required:
        start = ["start: calls"]
    elif content is not None:
        start = ["start: calls | content", f"content: {_json(content)}"]
    elif not family.marker:
        start = ["start: calls | TEXT", r"TEXT: /([^{\s](.|\n)*)?/"]
    else:
        return "\n".join([*_after_text(family, write, parallel, special_id), *_rules(family, tools, write, True)])
    return "\n".join([*start, _calls(family, write, parallel), *_rules(family, tools, write, False)])


def _more(family: Family, write: Literal, parallel: bool) -> str:
    return f"({write(family.separator)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""


def _calls(family: Family, write: Literal, parallel: bool) -> str:
    more = _more(family, write, parallel)
    return f"calls: {write(family.opening)} call {more} {write(family.closing)}"


def _after_text(family: Family, write: Literal, parallel: bool, special_id: int | None) -> list[str]:
    """The marker is what ends the text, so the first call is written without it."""
    more = _more(family, write, parallel)
    opening = write(family.opening.removeprefix(family.marker))
    lines = [f"start: TEXT | lead {opening} first {more} {write(family.closing)}", r"TEXT: /(.|\n)*/"]
    if special_id is not None:
        return [*lines, f"lead: TEXT <[{special_id}]>"]
    return [*lines, f"lead[lazy]: TEXT {json.dumps(family.marker)}"]


def _rules(family: Family, tools: Sequence[Tool], write: Literal, with_first: bool) -> list[str]:
    numbers = range(len(tools))
    lines = ["call: " + " | ".join(f"call_{i}" for i in numbers)]
    if with_first:
        lines.append("first: " + " | ".join(f"first_{i}" for i in numbers))
    for i, tool in enumerate(tools):
        begin = family.begin.replace(NAME, tool.function.name)
        lines.append(f"call_{i}: {write(begin)} arguments_{i} {write(family.end)}")
        if with_first:
            lines.append(f"first_{i}: {write(begin.removeprefix(family.marker))} arguments_{i} {write(family.end)}")
        lines.append(f"arguments_{i}: {_json(tool.schema_of_arguments)}")
    return lines


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _SPELLING}, ensure_ascii=False)
