"""How families of models write their calls. Which one a model is of shows in its chat template."""

import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from paceline.errors import InvalidOptionError
from paceline.serve.tools.events import Out
from paceline.serve.tools.mistral import Mistral
from paceline.serve.tools.parsers import Hermes, Llama3Json, Parser

NAME: Final = "\N{SUBSTITUTE}"  # stands for the function's name in `Family.begin`


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's templates take ids of nine letters and digits only."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class Family:
    """`opening` call (`separator` call)* `closing`, where a call is `begin` arguments `end`."""

    parser: Callable[[Collection[str], Out], Parser]
    marker: str  # what calls begin with, in running text; "": the answer itself begins with one
    opening: str
    begin: str
    end: str
    separator: str
    closing: str
    new_id: Callable[[], str] = _long_id


_HERMES = Family(
    Hermes, "<tool_call>", "", f'<tool_call>\n{{"name": "{NAME}", "arguments": ', "}\n</tool_call>", "\n", ""
)

# vLLM's names; `generic` is for models that know no tools
FAMILIES: Final[dict[str, Family]] = {
    "hermes": _HERMES,
    "llama3_json": Family(Llama3Json, "", "", f'{{"name": "{NAME}", "parameters": ', "}", "; ", ""),
    "mistral": Family(
        Mistral, "[TOOL_CALLS]", "[TOOL_CALLS][", f'{{"name": "{NAME}", "arguments": ', "}", ", ", "]", _short_id
    ),
    "generic": _HERMES,
}

# what a template says -> the family of its model; the first one found
_SIGNS: Final = (("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama3_json"))


def takes_tools(template: str | None) -> bool:
    """Whether the template itself tells the model of tools."""
    return template is not None and "tools" in template


def family_name(template: str | None, chosen: str | None = None) -> str:
    """`chosen`: by `--tool-call-parser`."""
    if chosen is not None and chosen not in FAMILIES:
        raise InvalidOptionError(f"unknown tool call parser {chosen!r}: choose one of {', '.join(FAMILIES)}")
    if not takes_tools(template):
        if chosen not in (None, "generic", "hermes"):
            raise InvalidOptionError(
                f"the tool call parser {chosen!r} does not go with this model: its chat template takes no tools, so "
                "that it is told of them in the words of 'generic'"
            )
        return "generic"
    if chosen is not None:
        return chosen
    assert template is not None
    found = next((name for sign, name in _SIGNS if sign in template), None)
    if found is None:
        raise InvalidOptionError(
            "how this model writes tool calls does not show in its chat template: start the server with "
            f"--tool-call-parser and one of {', '.join(FAMILIES)}"
        )
    return found
