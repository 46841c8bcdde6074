"""Which family a model is of, by its template; and grammars that allow what its parser reads, and nothing wrong."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidOptionError
from paceline.serve.http.tool_bodies import Tool
from paceline.serve.tools.events import Arguments, CallBegin, Content, Out
from paceline.serve.tools.families import FAMILIES, NAME, family_name
from paceline.serve.tools.generic import PROMPT
from paceline.serve.tools.grammar import MAX_CALLS, calls_grammar
from paceline.serve.tools.parsers import parse
from paceline.serve.tools.plan import tool_format

TEMPLATES = {
    "hermes": "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}[TOOL_CALLS]",
    "llama3_json": "{% if tools is not none %}{{ tools }}{% endif %}<|python_tag|>",
    "generic": "{% for message in messages %}{{ message.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_shows_the_family(name: str) -> None:
    assert family_name(TEMPLATES[name]) == name
    assert family_name(None) == "generic"


def test_a_choice_by_name_wins_and_must_fit() -> None:
    unknown = "{{ tools }} and its own notation"
    with pytest.raises(InvalidOptionError, match="--tool-call-parser"):
        family_name(unknown)
    assert family_name(unknown, "mistral") == "mistral"
    assert family_name(TEMPLATES["hermes"], "llama3_json") == "llama3_json"
    with pytest.raises(InvalidOptionError, match="choose one of hermes, llama3_json"):
        family_name(unknown, "pythonic")
    with pytest.raises(InvalidOptionError, match="takes no tools"):
        family_name(TEMPLATES["generic"], "mistral")


class Words:
    """A tokenizer that has `[TOOL_CALLS]` as a special token, and `<tool_call>` as one that is text."""

    chat_template = TEMPLATES["mistral"]

    def vocabulary(self) -> dict[str, int]:
        return {"[TOOL_CALLS]": 5, "<tool_call>": 6}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "" if token_ids == [5] and skip_special_tokens else "text"


def test_a_marker_that_is_a_special_token_is_found_out() -> None:
    assert tool_format(Words(), None).special_id == 5  # type: ignore[arg-type]
    assert tool_format(Words(), "hermes").special_id is None  # type: ignore[arg-type]
    assert tool_format(Words(), "llama3_json").special_id is None  # type: ignore[arg-type]


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": SCHEMA}}),
    Tool.model_validate({"type": "function", "function": {"name": "g"}}),
]


def written(name: str, *calls: tuple[str, str]) -> str:
    family = FAMILIES[name]
    return (
        family.opening
        + family.separator.join(family.begin.replace(NAME, called) + given + family.end for called, given in calls)
        + family.closing
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_grammar_writes_its_parser_reads(name: str) -> None:
    parser = FAMILIES[name].parser({"f", "g"}, Out())
    text = written(name, ("f", '{"x": 1}'), ("g", "{}"))
    assert parse(parser, text) == [CallBegin(0, "f"), Arguments(0, '{"x": 1}'), CallBegin(1, "g"), Arguments(1, "{}")]


class Held:
    """Whether a grammar allows a text, by the library that the engine uses. Bytes are tokens, and 0xFF is special."""

    def __init__(self) -> None:
        llguidance = pytest.importorskip("llguidance")
        tokenizers = pytest.importorskip("tokenizers")
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        vocabulary = {char: i for i, char in enumerate(sorted(alphabet))}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        backend.add_special_tokens(["[TOOL_CALLS]", "</s>"])
        self.special_id: int = backend.token_to_id("[TOOL_CALLS]")
        self._backend = backend
        self._matcher = llguidance.LLMatcher
        self._tokenizer = llguidance.LLTokenizer(backend.to_str(), eos_token=backend.token_to_id("</s>"))

    def allows(self, grammar: str, text: str) -> bool:
        matcher = self._matcher(self._tokenizer, grammar, log_level=0)
        assert not matcher.get_error(), matcher.get_error()
        tokens = self._backend.encode(text, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.fixture(scope="module")
def held() -> Held:
    return Held()


def grammar(name: str, held: Held, **options: Any) -> str:
    special_id = held.special_id if name == "mistral" else None
    chosen = {"required": True, "parallel": True, "special_id": special_id} | options
    return calls_grammar(FAMILIES[name], TOOLS, **chosen)


RIGHT, WRONG = ("f", '{"x": 1}'), ("f", '{"x": "1"}')


@pytest.mark.parametrize("name", FAMILIES)
def test_required_calls_are_calls_with_arguments_of_their_schema(name: str, held: Held) -> None:
    rule = grammar(name, held)
    assert held.allows(rule, written(name, RIGHT))
    assert held.allows(rule, written(name, RIGHT, ("g", "{}")))
    for text in ("", "Hello", written(name, WRONG), written(name, ("h", "{}")), written(name, RIGHT)[:-1]):
        assert not held.allows(rule, text), text
    assert held.allows(rule, written(name, *[RIGHT] * MAX_CALLS))
    assert not held.allows(rule, written(name, *[RIGHT] * (MAX_CALLS + 1)))
    one = grammar(name, held, parallel=False)
    assert held.allows(one, written(name, RIGHT)) and not held.allows(one, written(name, RIGHT, RIGHT))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_strict_call_may_come_or_not_and_is_right_if_it_comes(name: str, held: Held) -> None:
    rule = grammar(name, held, required=False)
    assert held.allows(rule, "Hello, 1 < 2 [x]\n") and held.allows(rule, "")
    assert held.allows(rule, written(name, RIGHT, RIGHT))
    assert not held.allows(rule, written(name, WRONG)) and not held.allows(rule, written(name, ("h", "{}")))
    if FAMILIES[name].marker:
        assert held.allows(rule, "Let me see.\n" + written(name, RIGHT))
        assert not held.allows(rule, "Let me see.\n" + written(name, WRONG))


@pytest.mark.parametrize("name", FAMILIES)
def test_beside_a_format_an_answer_is_calls_or_of_that_format(name: str, held: Held) -> None:
    rule = grammar(name, held, required=False, content=SCHEMA)
    assert held.allows(rule, json.dumps({"x": 5})) and held.allows(rule, written(name, RIGHT))
    assert not held.allows(rule, "Hello") and not held.allows(rule, json.dumps({"y": 5}))


def test_text_before_a_call_is_content() -> None:
    parser = FAMILIES["mistral"].parser({"f"}, Out())
    assert parse(parser, "So: " + written("mistral", ("f", "{}")))[:2] == [Content("So:"), CallBegin(0, "f")]


def test_the_docs_show_the_parsers_and_the_generic_prompt() -> None:
    page = (Path(__file__).parents[3] / "docs" / "structured.md").read_text()
    for name in FAMILIES:
        assert f"| `{name}` |" in page
    shown = PROMPT.format(tools='{"name": "get_weather", "description": "...", "parameters": {...}}')
    assert f"```\n{shown}\n```" in page
    assert f"up to {MAX_CALLS - 1} more" in page
