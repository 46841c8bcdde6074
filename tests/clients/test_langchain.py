"""langchain-openai on the default model."""

from typing import Any

import pytest

from tests.clients.conftest import MODEL
from tests.clients.shapes import QUESTION, Trip, Weather

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
langchain_openai = pytest.importorskip("langchain_openai", reason="needs langchain-openai: make test-clients")


@pytest.fixture(scope="module")
def chat(base_url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=base_url, api_key="none", model=MODEL, temperature=0, max_tokens=300, max_retries=0
    )


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_with_structured_output_gives_an_object_of_the_class(chat: Any, method: str) -> None:
    assert isinstance(chat.with_structured_output(Trip, method=method).invoke(QUESTION), Trip)


def test_json_mode_gives_json(chat: Any) -> None:
    bound = chat.bind(response_format={"type": "json_schema", "json_schema": {
        "name": "trip", "schema": Trip.model_json_schema()}})  # fmt: skip
    Trip.model_validate_json(bound.invoke(QUESTION).content)


@pytest.mark.parametrize("choice", ["any", "Weather"])
def test_bind_tools_gives_calls_whole_and_streamed(chat: Any, choice: str) -> None:
    bound = chat.bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False)
    (call,) = bound.invoke("How is the weather in Oslo?").tool_calls
    assert call["name"] == "Weather" and call["id"]
    Weather.model_validate(call["args"])
    chunks = list(bound.stream("How is the weather in Oslo?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [c["args"] for c in whole.tool_calls] == [call["args"]] and len(chunks) > 3


def test_a_tool_loop(chat: Any) -> None:
    messages = pytest.importorskip("langchain_core.messages")
    bound = chat.bind_tools([Weather], tool_choice="Weather")
    asked = messages.HumanMessage("How is the weather in Oslo?")
    called = bound.invoke([asked])
    result = messages.ToolMessage("Rain, 8 degrees.", tool_call_id=called.tool_calls[0]["id"])
    assert chat.bind_tools([Weather]).invoke([asked, called, result]).content


def test_the_responses_api_is_spoken_too(base_url: str) -> None:
    chat = langchain_openai.ChatOpenAI(
        base_url=base_url, api_key="none", model=MODEL, temperature=0, max_tokens=300, use_responses_api=True
    )
    assert isinstance(chat.with_structured_output(Trip, method="json_schema").invoke(QUESTION), Trip)
    (call,) = chat.bind_tools([Weather], tool_choice="Weather").invoke("Weather in Oslo?").tool_calls
    Weather.model_validate(call["args"])
