"""instructor, pydantic-ai and litellm on the default model."""

from typing import Any

import httpx
import openai
import pytest

from tests.clients.conftest import MODEL
from tests.clients.shapes import QUESTION, Trip, Weather

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor_gives_an_object_of_the_class(base_url: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason="needs instructor: make test-clients")
    with openai.OpenAI(base_url=base_url, api_key="none", http_client=httpx.Client(trust_env=False)) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        trip = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_model=Trip, max_retries=0, temperature=0, max_tokens=300
        )
    assert isinstance(trip, Trip)


def agent(base_url: str, **options: Any) -> Any:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="needs pydantic-ai: make test-clients")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=base_url, api_key="none"))
    settings = {"temperature": 0, "max_tokens": 300, "parallel_tool_calls": False}
    return pydantic_ai.Agent(model, model_settings=settings, **options)


def test_pydantic_ai_gives_an_object_of_the_class(base_url: str) -> None:
    assert isinstance(agent(base_url, output_type=Trip).run_sync(QUESTION).output, Trip)
    from pydantic_ai import NativeOutput

    # the class itself is known to pydantic-ai's own checks only: an answer that were not of it would be asked again
    assert isinstance(agent(base_url, output_type=NativeOutput(Trip), retries=0).run_sync(QUESTION).output, Trip)


def test_pydantic_ai_streams_an_object(base_url: str) -> None:
    import asyncio

    async def last() -> Any:
        async with agent(base_url, output_type=Trip).run_stream(QUESTION) as run:
            return await run.get_output()

    assert isinstance(asyncio.run(last()), Trip)


def test_litellm_parses_and_calls(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it asks the network for prices
    litellm = pytest.importorskip("litellm", reason="needs litellm: make test-clients")
    options: Any = {
        "model": f"openai/{MODEL}", "api_base": base_url, "api_key": "none", "messages": MESSAGES, "temperature": 0,
        "max_tokens": 300,
    }  # fmt: skip
    answer = litellm.completion(**options, response_format=Trip)
    Trip.model_validate_json(answer.choices[0].message.content)
    tool = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}
    options |= {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    whole = litellm.completion(**options).choices[0]
    assert whole.finish_reason == "tool_calls"
    arguments = ""
    for chunk in litellm.completion(**options, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            arguments += piece.function.arguments or ""
    assert arguments == whole.message.tool_calls[0].function.arguments
    Weather.model_validate_json(arguments)
