"""Parsers: the calls of well-formed texts are found, and how a text is cut into pieces never changes what is found."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serve.tools.events import Arguments, CallBegin, Content, Event, Out, joined
from paceline.serve.tools.mistral import Mistral
from paceline.serve.tools.parsers import Hermes, Llama3Json, Parser, feed, finish, parse

NAMES = ("get_weather", "get", "add")
PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": lambda: Hermes(NAMES, Out()),
    "llama3_json": lambda: Llama3Json(NAMES, Out()),
    "mistral": lambda: Mistral(NAMES, Out()),
}
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
PIECES = (
    *MARKERS, "<tool", "_call>", "[TOOL", "</", "<", "[", "]", "{", "}", ",", ";", "\n", " ", '"', "\\", ":",
    "null", "12",
    '"name"', '"arguments"', '"parameters"', '"type"', '"get"', '"add"', '{"x": 1}', "get", "add", "Hello", "é😀",
    '{"name": "get", "arguments": {"city": "}\\" {"}}', '{"arguments": {}, "name": "add"}', '{"answer": 4}',
)  # fmt: skip


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def in_pieces(parser: Parser, pieces: list[str]) -> list[Event]:
    return joined([*(event for piece in pieces for event in feed(parser, piece)), *finish(parser)])


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.sampled_from(PIECES), max_size=12), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_any_text_cut_anywhere_gives_the_events_of_the_whole(name: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = joined(parse(PARSERS[name](), text))
    assert in_pieces(PARSERS[name](), pieces_of(text, cuts)) == whole
    assert in_pieces(PARSERS[name](), list(text)) == whole
    content = "".join(event.text for event in whole if isinstance(event, Content))
    assert set(content) <= set(text)
    if not any(isinstance(event, CallBegin) for event in whole) and "[TOOL_CALLS]" not in text:
        assert content == text, "what is no call is content, character for character"


ARGUMENTS = st.dictionaries(
    st.text(max_size=6),
    st.recursive(st.none() | st.integers() | st.text(max_size=8), st.lists, max_leaves=4),
    max_size=3,
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


def hermes(calls: list[tuple[str, str]], text: str) -> str:
    return text + "".join(f'\n<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in calls)


def llama3(calls: list[tuple[str, str]], text: str) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls)


def mistral(calls: list[tuple[str, str]], text: str) -> str:
    return text + "[TOOL_CALLS][" + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in calls) + "]"


def mistral_new(calls: list[tuple[str, str]], text: str) -> str:
    return text + "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls)


FORMS = [("hermes", hermes), ("llama3_json", llama3), ("mistral", mistral), ("mistral", mistral_new)]


@pytest.mark.parametrize(("name", "write"), FORMS, ids=lambda x: x if isinstance(x, str) else x.__name__)
@settings(max_examples=60, deadline=None)
@given(calls=CALLS, text=st.sampled_from(["", "Let me see.", "1 < 2 and [TOOL"]), cut=st.integers(0, 500))
def test_what_a_family_writes_is_read_back(
    name: str, write: Any, calls: list[tuple[str, dict[str, Any]]], text: str, cut: int
) -> None:
    written = [(n, json.dumps(a)) for n, a in calls]
    events = in_pieces(PARSERS[name](), pieces_of(write(written, text), [cut]))
    if text and name != "llama3_json":
        assert events.pop(0) == Content(text)
    expected: list[Event] = []
    for index, (called, arguments) in enumerate(written):
        expected += [CallBegin(index, called), Arguments(index, arguments)]
    assert events == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>", None),  # not offered
        ("hermes", '<tool_call>{"name": "get"', None),
        ("hermes", '<tool_call>nothing</tool_call>', None),
        ("hermes", 'a <', None),
        ("hermes", '  \n', None),
        ("hermes", '<tool_call>{"name": "get"}</tool_call> \n', [CallBegin(0, "get"), Arguments(0, "{}")]),
        ("hermes", '<tool_call>{"name": "get", "arguments": "{\\"a\\": 1}"}',
         [CallBegin(0, "get"), Arguments(0, '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "get", "arguments": {"a', [CallBegin(0, "get"), Arguments(0, '{"a')]),
        ("hermes", '<tool_call><tool_call>{"name": "get"}',
         [Content("<tool_call>"), CallBegin(0, "get"), Arguments(0, "{}")]),
        ("llama3_json", '{"city": "Oslo"}', None),
        ("llama3_json", 'Sure: {"name": "get", "parameters": {}}', None),
        ("llama3_json", '<|python_tag|>print(1)', None),
        ("llama3_json", '<|python_tag|>{"type": "function", "name": "get", "parameters": {}}',
         [CallBegin(0, "get"), Arguments(0, "{}")]),
        ("mistral", "[TOOL_CALLS]rm[ARGS]{}", None),
        ("mistral", "[TOOL_CALLS] [", None),
        ("mistral", 'x[TOOL_CALLS]get_weather{"a": 1} and',
         [Content("x"), CallBegin(0, "get_weather"), Arguments(0, '{"a": 1}'), Content(" and")]),
    ],
)  # fmt: skip
def test_texts_that_are_nearly_calls(name: str, text: str, expected: list[Event] | None) -> None:
    assert joined(parse(PARSERS[name](), text)) == ([Content(text)] if expected is None else expected)


def test_no_beginning_of_a_marker_is_told_before_it_is_known_to_be_none() -> None:
    parser = PARSERS["hermes"]()
    assert feed(parser, "Yes.\n<tool_") == [Content("Yes.")]
    assert feed(parser, 'call>\n{"name": "ge') == []
    assert feed(parser, 't", "arguments": {"a"') == [CallBegin(0, "get"), Arguments(0, '{"a"')]
    assert feed(parser, ": 1}}\n</tool_c") == [Arguments(0, ": 1}")]
    assert [*feed(parser, "all>"), *finish(parser)] == []


@pytest.mark.parametrize("text", ["Yes.\n<tool_", 'Yes.\n<tool_call>\n{"name": "ge', "Yes."])
def test_a_call_that_a_limit_cuts_off_before_its_name_is_not_told(text: str) -> None:
    parser = PARSERS["hermes"]()
    (told,) = joined([*feed(parser, text), *finish(parser, cut_off=True)])
    assert isinstance(told, Content) and told.text.rstrip() == "Yes."
    parser = PARSERS["hermes"]()
    assert joined([*feed(parser, text), *finish(parser)]) == [Content(text)]


def test_more_calls_than_wanted_are_left_out() -> None:
    parser = Hermes(NAMES, Out(max_calls=1))
    text = hermes([("get", "{}"), ("add", '{"a": 1}')], "Hi")
    assert joined(parse(parser, text)) == [Content("Hi"), CallBegin(0, "get"), Arguments(0, "{}")]
