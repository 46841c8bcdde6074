"""`/v1/responses` through the official client, over an engine that says what it is told to say."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage
from pydantic import BaseModel

from tests.serve import fake
from tests.serve.conftest import Running, running
from tests.serve.generate.test_chat_tools import OSLO, TIME
from tests.serve.generate.test_openai_client import connect

TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": "Tells the weather", "strict": False,
     "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"type": "function", "name": "clock", "parameters": None, "strict": None},
]  # fmt: skip


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with connect(server) as client:
        yield client


def say(text: str) -> str:
    return f"SAY«{text}»"


def test_a_text_is_answered_with_a_message(client: openai.OpenAI, server: Running) -> None:
    answer = client.responses.create(model="fake", instructions="Be kind.", input=say("Hello"), metadata={"a": "b"})
    assert server.backend.prompts[-1] == f"<system>Be kind.\n<user>{say('Hello')}\n<assistant>"
    assert answer.output_text == "Hello" and answer.status == "completed" and answer.error is None
    assert answer.metadata == {"a": "b"} and answer.instructions == "Be kind." and answer.id.startswith("resp_")
    assert answer.usage is not None and answer.usage.output_tokens == 5
    assert answer.usage.total_tokens == answer.usage.input_tokens + 5
    Response.model_validate(answer.model_dump(), strict=True)


def test_an_answer_at_its_limit_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="x", max_output_tokens=4)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens" and len(answer.output_text) == 4
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_calls_are_items_of_their_own(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input=say(f"Let me see.\n{OSLO}\n{TIME}"), tools=TOOLS)
    message, weather, clock = answer.output
    assert isinstance(message, ResponseOutputMessage) and answer.output_text == "Let me see."
    assert isinstance(weather, ResponseFunctionToolCall) and isinstance(clock, ResponseFunctionToolCall)
    assert (weather.name, weather.arguments) == ("get_weather", '{"city": "Oslo"}')
    assert (clock.name, clock.arguments) == ("clock", "{}") and clock.call_id != weather.call_id


def test_events_follow_every_item_from_its_beginning_to_its_end(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="fake", input=say(f"Let me see.\n{OSLO}"), tools=TOOLS, stream=True)
    events: list[Any] = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    without_repeats = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    assert without_repeats == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    final = events[-1].response
    assert text == final.output_text == "Let me see."
    assert arguments == final.output[1].arguments == '{"city": "Oslo"}'
    assert kinds.count("function_call_arguments.delta") > 3
    for event in events:
        type(event).model_validate(event.model_dump(), strict=True)


def test_the_clients_own_stream_helper_follows(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input=say("Hello you"), tools=TOOLS) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(texts) == "Hello you"


class Answer(BaseModel):
    a: int


def test_a_format_reaches_the_engine(client: openai.OpenAI, server: Running) -> None:
    answer = client.responses.parse(model="fake", input=say('{"a": 7}'), text_format=Answer)
    assert answer.output_parsed == Answer(a=7)
    held = server.backend.params[-1].structured_outputs
    assert held is not None and held.json is not None and '"a"' in held.json
    client.responses.create(model="fake", input=say("x"), text={"format": {"type": "json_object"}})
    held = server.backend.params[-1].structured_outputs
    assert held is not None and held.json_object


def test_tool_choice_reaches_the_engine(client: openai.OpenAI, server: Running) -> None:
    choice: Any = {"type": "function", "name": "clock"}
    answer = client.responses.create(model="fake", input=say(TIME), tools=TOOLS, tool_choice=choice)
    held = server.backend.params[-1].structured_outputs
    assert held is not None and held.grammar is not None and "get_weather" not in held.grammar
    assert answer.tool_choice.name == "clock"  # type: ignore[union-attr]


def test_a_loop_goes_on_with_the_answers_own_items(client: openai.OpenAI, server: Running) -> None:
    first = client.responses.create(model="fake", input=say(OSLO), tools=TOOLS, store=False)
    call = first.output[0]
    assert isinstance(call, ResponseFunctionToolCall)
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        *(item.model_dump() for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": say("rain")},
    ]
    items[1] = {key: value for key, value in items[1].items() if value is not None}
    assert client.responses.create(model="fake", input=items, tools=TOOLS).output_text == "rain"
    told = f"<tool_response>\n{say('rain')}\n</tool_response>"
    assert server.backend.prompts[-1].endswith(f"<assistant>{OSLO}\n<user>{told}\n<assistant>")


def test_a_conversation_goes_on_by_its_id(client: openai.OpenAI, server: Running) -> None:
    first = client.responses.create(model="fake", instructions="Once.", input=say("one"))
    second = client.responses.create(model="fake", input=say("two"), previous_response_id=first.id)
    third = client.responses.create(model="fake", input=say("three"), previous_response_id=second.id, stream=True)
    assert [event.type for event in third][-1] == "response.completed"
    said = [f"<user>{say(text)}\n<assistant>" for text in ("one", "two", "three")]
    assert server.backend.prompts[-1] == said[0] + "one\n" + said[1] + "two\n" + said[2]
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == "one"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    again = client.responses.create(model="fake", input=say("x"), previous_response_id=second.id)
    assert again.output_text == "x", "a stored answer does not need those before it"


def test_what_is_not_to_be_stored_is_not_there(client: openai.OpenAI) -> None:
    first = client.responses.create(model="fake", input=say("one"), store=False)
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="send the conversation in input") as caught:
        client.responses.create(model="fake", input="x", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"


def test_tenants_see_their_own_responses_only_and_the_store_forgets() -> None:
    with (
        running(fake.FakeBackend(), api_keys=("a", "b"), max_stored_responses=2) as server,
        connect(server, "a") as one,
        connect(server, "b") as other,
    ):
        first = one.responses.create(model="fake", input=say("one"))
        assert one.responses.retrieve(first.id).output_text == "one"
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError):
            other.responses.create(model="fake", input="x", previous_response_id=first.id)
        for _ in range(2):
            one.responses.create(model="fake", input=say("more"))
        with pytest.raises(openai.NotFoundError):
            one.responses.retrieve(first.id)


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"background": True}, "background", "while the client waits"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "no reasoning"),
        ({"truncation": "auto"}, "truncation", "shorten it"),
        ({"include": ["message.output_text.logprobs"]}, "include", "nothing more"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'function'"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "letters"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "get_weather"),
        ({"tool_choice": "required"}, "tool_choice", "give tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "rm"}}, "tool_choice", "'rm'"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "'input_text'"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input", "'c'"),
        ({"max_output_tokens": 100_000}, "max_output_tokens", "ask for at most"),
        ({"max_output_tokens": 100_000}, "max_output_tokens", "and max_output_tokens is 100000"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"description": "x" * 1_000_000}}}}, "text",
         "text has 10"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input", "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 3}}}, "text", "dictionary"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text", "letters"),
        ({"temperatur": 3}, "temperatur", "unknown field"),
        ({"model": "gpt"}, "model", "not here"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(server: Running, options: Any, param: str, words: str) -> None:
    with server.client() as http:
        answer = http.post("/v1/responses", json={"input": "x"} | options)
        error = answer.json()["error"]
        assert answer.status_code in (400, 404) and error["param"] == param and words in error["message"], error
        assert http.get("/v1/responses/x?stream=true").status_code == 400


def test_a_failure_is_the_streams_last_event(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="fake", input="FAIL", max_output_tokens=20, stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None and "not finite" in events[-1].response.error.message
