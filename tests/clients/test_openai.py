"""The official client on the default model: parsed answers, streamed calls, a tool loop, responses."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.clients.conftest import MODEL
from tests.clients.shapes import QUESTION, Trip, Weather

pytestmark = pytest.mark.slow

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_completion_tokens": 300}


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", http_client=httpx.Client(trust_env=False)) as client:
        yield client


def weather_tool(**options: Any) -> Any:
    return {"type": "function", "function": {
        "name": "get_weather", "description": Weather.__doc__, "parameters": Weather.model_json_schema(), **options
    }}  # fmt: skip


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(messages=MESSAGES, response_format=Trip, **GREEDY)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Trip) and answer.choices[0].finish_reason == "stop"
    plain = client.chat.completions.parse(
        messages=MESSAGES, response_format=Trip, **GREEDY, extra_body={"speculative": {"off": True}}
    )
    assert plain.choices[0].message.content == answer.choices[0].message.content, "speculation changes no text"


def test_streamed_calls_concatenate_to_arguments_of_the_schema(client: openai.OpenAI) -> None:
    options = {"tools": [weather_tool()], "tool_choice": "required", "parallel_tool_calls": False}
    name, arguments, finish = "", "", None
    for chunk in client.chat.completions.create(messages=MESSAGES, stream=True, **options, **GREEDY):
        choice = chunk.choices[0]
        assert not choice.delta.content
        for piece in choice.delta.tool_calls or ():
            assert piece.index == 0 and piece.function is not None
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
        finish = choice.finish_reason or finish
    assert name == "get_weather" and finish == "tool_calls"
    Weather.model_validate_json(arguments)
    whole = client.chat.completions.create(messages=MESSAGES, **options, **GREEDY)
    assert whole.choices[0].message.tool_calls[0].function.arguments == arguments


def test_the_stream_helper_parses_calls(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather)
    options: Any = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "Weather"}}}
    with client.chat.completions.stream(messages=MESSAGES, **options, **GREEDY) as stream:
        deltas = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, Weather)
    assert "".join(deltas) == call.function.arguments


def test_a_tool_loop(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    asked: Any = [{"role": "user", "content": "How is the weather in Oslo?"}]
    first = client.chat.completions.create(
        messages=asked, tools=[weather_tool(strict=True)], tool_choice=named, **GREEDY
    )
    message = first.choices[0].message
    call = message.tool_calls[0]
    Weather.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain, 8 degrees."}
    last = client.chat.completions.create(messages=[*asked, message, result], tools=[weather_tool()], **GREEDY)
    assert last.choices[0].message.content


def test_vllms_fields_hold_the_answer(client: openai.OpenAI) -> None:
    for extra in ({"guided_choice": ["rain", "snow"]}, {"structured_outputs": {"regex": "(rain|snow)"}}):
        answer = client.chat.completions.create(messages=MESSAGES, extra_body=extra, **GREEDY)
        assert answer.choices[0].message.content in ("rain", "snow")


RESPONSE: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 300}
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": Weather.model_json_schema(), "strict": True}


def test_responses_are_parsed_and_streamed(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(input=QUESTION, text_format=Trip, **RESPONSE)
    assert isinstance(parsed.output_parsed, Trip)
    with client.responses.stream(input=QUESTION, text_format=Trip, **RESPONSE) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    assert Trip.model_validate_json(text) == parsed.output_parsed


def test_a_tool_loop_over_stored_responses(client: openai.OpenAI) -> None:
    options = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    events = list(client.responses.create(input="How is the weather in Oslo?", stream=True, **options, **RESPONSE))
    first = events[-1].response
    call = first.output[0]
    told = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert call.type == "function_call" and call.arguments == told
    Weather.model_validate_json(call.arguments)
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "Rain, 8 degrees."}]
    last = client.responses.create(input=result, previous_response_id=first.id, tools=[TOOL], **RESPONSE)
    assert last.output_text
