"""A model that thinks and calls tools, or is held to a format: thoughts, content and calls are told apart."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve import fake
from tests.serve.conftest import running
from tests.serve.generate.test_chat_tools import CHAT, OSLO, TOOLS, ask, collected, saying
from tests.serve.generate.test_serve_routes import events

THOUGHTS = f"Hm. {OSLO} would do."  # a call that is only thought of is none
JSON = {"response_format": {"type": "json_object"}, "tools": []}


@pytest.fixture(scope="module")
def thinking() -> Iterator[httpx.Client]:
    """Over a parser for which every text begins with thoughts."""
    with running(fake.FakeBackend(), reasoning_parser="deepseek_r1") as handle, handle.client() as http:
        yield http


def test_thoughts_come_apart_from_content_and_calls(thinking: httpx.Client) -> None:
    choice = ask(thinking, saying(f"{THOUGHTS}</think>So: {OSLO}"))
    assert choice["message"]["reasoning"] == THOUGHTS and choice["message"]["content"].strip() == "So:"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["finish_reason"] == "tool_calls"


def test_a_stream_of_thoughts_and_calls_adds_up_to_the_whole_answer(thinking: httpx.Client) -> None:
    chunks = events(thinking, CHAT, saying(f"{THOUGHTS}</think>{OSLO}"))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant" and "reasoning" in deltas[0]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == THOUGHTS
    content, calls, ends = collected(chunks)
    assert content == "" and [call["arguments"] for call in calls] == ['{"city": "Oslo"}'] and ends == ["tool_calls"]


def test_thoughts_are_left_out_where_they_are_not_asked_for(thinking: httpx.Client) -> None:
    message = ask(thinking, saying(f"Hm.</think>{OSLO}", include_reasoning=False))["message"]
    assert message["reasoning"] is None and message["content"] is None and len(message["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("options", "content"),
    [
        (JSON, '{"a": 1}'),
        ({"structured_outputs": {"regex": "[a-z]+"}, "tools": []}, "yes"),
        ({"response_format": {"type": "json_object"}}, '{"a": 1}'),
    ],
)
def test_an_answer_that_is_held_to_a_format_is_content(
    thinking: httpx.Client, options: dict[str, Any], content: str
) -> None:
    message = ask(thinking, saying(content) | options)["message"]
    assert (message["reasoning"], message["content"]) == (None, content)


def test_a_call_that_must_come_is_no_thought(thinking: httpx.Client) -> None:
    message = ask(thinking, saying(OSLO, tool_choice="required"))["message"]
    assert message["reasoning"] is None and len(message["tool_calls"]) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"structured_outputs": {"regex": "[a-z]+</think>[a-z]+"}, "tools": []},
        {"tools": [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]},  # type: ignore[dict-item]
    ],
)
def test_a_format_that_leaves_room_for_thoughts_has_them(thinking: httpx.Client, options: dict[str, Any]) -> None:
    message = ask(thinking, saying("hm</think>yes") | options)["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "yes")


def test_responses_leave_thoughts_out(thinking: httpx.Client) -> None:
    answer = thinking.post("/v1/responses", json={"input": "SAY«Hm.</think>Paris»"}).raise_for_status().json()
    assert [part["text"] for item in answer["output"] for part in item["content"]] == ["Paris"]
