"""Formats and tools through the server to the real engine, on the default model: what is asked for holds, and what
cannot be is refused by name and in time, beside streams that go on."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from paceline import AsyncLLM
from paceline.serve.generate.over_async_llm import OverAsyncLLM
from tests.serve.conftest import Running, running
from tests.serve.generate.test_chat_tools import CHAT, collected
from tests.serve.generate.test_serve_routes import events
from tests.structured.processor_time import end_processes_of_gone_engines, trial_s

MESSAGES = [{"role": "user", "content": "How is the weather in Oslo?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}
REQUIRED = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
REFUSED_WITHIN_S = 1.0  # of a processor, whatever else the machine does
ON_A_BUSY_MACHINE_S = 30.0  # on the clock, where the process that tries grammars gets a thirtieth of a processor


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    llm = AsyncLLM("smollm2-135m", {"method": "ngram", "node_budget": 4}, max_num_seqs=8, num_kv_blocks=512)
    llm.prepare_structured_outputs()  # as `paceline serve` does
    backend = OverAsyncLLM(llm, ("ngram",))
    # A body of 10 MB is to be refused for its schema. By default it is refused before it is read (413).
    with running(backend, drain_timeout_s=1, max_body_bytes=16 << 20) as handle:  # type: ignore[arg-type]
        yield handle
    backend.shutdown()
    backend.check_integrity()


def ask(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post(CHAT, json={"max_tokens": 120} | body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, pytest.param({"temperature": 1, "seed": 7}, marks=pytest.mark.slow)]
)
def test_required_calls_are_of_their_schema_and_the_same_with_speculation_off(
    http: httpx.Client, sampling: dict[str, Any]
) -> None:
    whole = ask(http, **REQUIRED, **sampling)
    (call,) = whole["message"]["tool_calls"]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    plain = ask(http, **REQUIRED, **sampling, speculative={"off": True})
    assert plain["message"]["tool_calls"][0]["function"] == call["function"]
    content, calls, ends = collected(events(http, CHAT, REQUIRED | sampling | {"max_tokens": 120}))
    assert content == "" and ends == ["tool_calls"]
    assert [(c["name"], c["arguments"]) for c in calls] == [("get_weather", call["function"]["arguments"])]


def test_a_named_function_is_called_once(http: httpx.Client) -> None:
    clock = {"type": "function", "function": {"name": "clock"}}
    chosen = {"type": "function", "function": {"name": "clock"}}
    choice = ask(http, messages=MESSAGES, tools=[WEATHER, clock], tool_choice=chosen, temperature=0)
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "clock", "arguments": "{}"}]


@pytest.mark.slow
def test_with_a_format_and_tools_the_answer_is_one_of_the_two(http: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    for seed in range(3):
        message = ask(
            http, messages=MESSAGES, tools=[WEATHER], response_format=form, seed=seed, parallel_tool_calls=False
        )["message"]
        calls = message.get("tool_calls")
        text = calls[0]["function"]["arguments"] if calls else message["content"]
        jsonschema.validate(json.loads(text), SCHEMA)


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
UNKNOWN = SCHEMA | {"unevaluatedProperties": False}

PATTERNS = {
    "allOf": [{"type": "string", "pattern": f"(.|\n)*[a-{chr(98 + i % 20)}]x{i}(.|\n)*"} for i in range(30)]
}  # an intersection that takes hours to compute


def schema_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


BAD: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "recursion without end": (schema_format(ENDLESS), "response_format", "without end"),
    "unknown keyword": (schema_format(UNKNOWN), "response_format", "unevaluatedProperties"),
    "many values": (schema_format({"enum": [str(i) for i in range(10_000)]}), "response_format", "10000 items"),
    "too many to be read": (schema_format({"enum": [str(i) for i in range(100_000)]}), None, "values"),
    "regex": ({"guided_regex": "a(?=b)"}, "guided_regex", "look-around"),
    "patterns without end": (schema_format(PATTERNS), "response_format", "took more than"),
    "grammar": ({"guided_grammar": "start: nothing"}, "guided_grammar", "cannot be used"),
    "tool's schema": (
        {"tools": [WEATHER, tool("f", UNKNOWN)], "tool_choice": "required"},
        "tools",
        "the parameters of 'f' cannot be used",
    ),
    "tool's recursion without end": (
        {"tools": [WEATHER, tool("f", ENDLESS)], "tool_choice": "required"},
        "tools",
        "the parameters of 'f' cannot be used: the JSON schema asks for recursion without end",
    ),
    "recursion without end of a tool that need not be called": (
        {"tools": [WEATHER, tool("f", ENDLESS)]},
        "tools",
        "the parameters of 'f' cannot be used: the JSON schema asks for recursion without end",
    ),
    "tool's pattern without end": (
        {"tools": [tool("f", {"properties": {"a": PATTERNS}})], "tool_choice": "required"}, "tools", "took more than",
    ),
    "tool's name": ({"tools": [tool("get weather!", SCHEMA)]}, "tools", "must be 1 to 64 letters"),
    "tool_choice without tools": ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    "tool_choice of another tool": (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "'f'",
    ),
    "10 MB": (schema_format({"type": "string", "description": "x" * 10_000_000}), "response_format",
              "response_format has 10"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_refusal_takes_less_than_a_second_of_a_processor(server: Running, name: str) -> None:
    """Of the server, the client that writes the body, and the process that tries grammars, with its start."""
    fields, param, words = BAD[name]
    grammars = server.backend._llm.engine.core.grammars  # type: ignore[attr-defined]
    end_processes_of_gone_engines()
    with server.client() as http:
        begin_s = time.process_time() + trial_s(grammars)
        answer = http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 20} | fields)
        took_s = time.process_time() + trial_s(grammars) - begin_s
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"], error
    assert took_s < REFUSED_WITHIN_S


@pytest.mark.parametrize("regex", ["(a?){1000}a{1000}", r"(\w{1,50}\s?[a-z]{1,30}){50,100}"])
def test_a_regex_that_takes_too_much_for_a_step_is_the_clients_fault(http: httpx.Client, regex: str) -> None:
    """It compiles; what it takes shows when tokens are chosen."""
    asked = {"messages": MESSAGES, "max_tokens": 40, "seed": 3, "guided_regex": regex}
    answer = http.post(CHAT, json=asked)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "guided_regex" and error["code"] == "invalid_value", error
    assert "guided_regex cannot be used" in error["message"] and "simpler patterns" in error["message"]
    assert http.post(CHAT, json=asked | {"stream": True}).json()["error"] == error  # before the first event


def test_what_cannot_be_held_is_refused_by_name_beside_a_stream_that_goes_on(server: Running) -> None:
    body = {"prompt": "One, two,", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    texts: list[str] = []

    def follow() -> None:
        with server.client() as http:
            chunks = events(http, "/v1/completions", body)
            texts.append("".join(chunk["choices"][0]["text"] for chunk in chunks))

    follow()
    streams = [threading.Thread(target=follow) for _ in range(2)]
    for stream in streams:
        stream.start()
    with server.client() as http:
        for name, (fields, param, words) in BAD.items():
            begin_s = time.monotonic()
            answer = http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 20} | fields)
            seconds = time.monotonic() - begin_s
            error = answer.json()["error"]
            assert answer.status_code == 400, (name, answer.text[:400])
            assert error["param"] == param and words in error["message"], (name, error)
            assert seconds < ON_A_BUSY_MACHINE_S, (name, seconds)
    for stream in streams:
        stream.join()
    assert len(texts) == 3 and len(set(texts)) == 1
