"""Tools through the chat route, over an engine that says what it is told to say."""

import json
from typing import Any

import httpx
import pytest

from paceline.errors import InvalidOptionError
from paceline.serve.http.response_bodies import ChatCompletion
from paceline.serve.tools.families import FAMILIES
from tests.serve import fake
from tests.serve.conftest import Running, running
from tests.serve.generate.test_serve_routes import events

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
OSLO = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "clock"}\n</tool_call>'


def saying(text: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"SAY«{text}»"}], "tools": TOOLS} | options


def ask(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = ChatCompletion.model_validate(answer.json(), strict=True).model_dump()["choices"][0]
    return choice


def collected(chunks: list[dict[str, Any]]) -> tuple[str, list[dict[str, str]], list[str]]:
    """As OpenAI's clients do it: content, calls by index, finish reasons."""
    content, calls, ends = "", [], []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content") or ""
        for piece in choice["delta"].get("tool_calls") or ():
            if piece["index"] == len(calls):
                assert piece["id"] and piece["type"] == "function" and piece["function"]["name"]
                calls.append({"id": piece["id"], "name": piece["function"]["name"], "arguments": ""})
            else:
                assert "id" not in piece and "name" not in piece["function"]
            calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
        if choice["finish_reason"]:
            ends.append(choice["finish_reason"])
    return content, calls, ends


def test_calls_are_told_apart_from_content(http: httpx.Client) -> None:
    choice = ask(http, saying(f"Let me see.\n{OSLO}\n{TIME}"))
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
        {"name": "clock", "arguments": "{}"},
    ]
    assert len({call["id"] for call in calls}) == 2


def test_a_stream_of_calls_adds_up_to_the_whole_answer(http: httpx.Client) -> None:
    body = saying(f"Let me see.\n{OSLO}\n{TIME}")
    chunks = events(http, CHAT, body)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    content, calls, ends = collected(chunks)
    assert content == "Let me see." and ends == ["tool_calls"]
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("clock", "{}"),
    ]
    arguments = [c for c in chunks if (c["choices"][0]["delta"].get("tool_calls") or [{}])[0].get("index") == 0]
    assert len(arguments) > 3, "arguments come as they are made"


def test_a_stream_of_a_call_alone_has_no_content(http: httpx.Client) -> None:
    """As the whole answer, whose content is null: a client must not be told of an empty text."""
    deltas = [chunk["choices"][0]["delta"] for chunk in events(http, CHAT, saying(OSLO))]
    assert {delta.get("content") for delta in deltas} == {None}


def test_text_that_is_no_call_passes_unchanged(http: httpx.Client) -> None:
    text = "1 < 2, <tool_ is no call \n"
    choice = ask(http, saying(text))
    assert choice["message"]["content"] == text and choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"] is None
    assert collected(events(http, CHAT, saying(text))) == (text, [], ["stop"])


def test_a_call_that_was_cut_off_ends_by_length(http: httpx.Client) -> None:
    choice = ask(http, saying(OSLO, max_tokens=60))
    assert choice["finish_reason"] == "length"
    assert '{"city": "Oslo"}'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


def test_log_probabilities_and_sources_are_told_for_tokens_of_calls_too(http: httpx.Client) -> None:
    chunks = events(http, CHAT, saying(OSLO, logprobs=True, return_token_sources=True))
    told = [entry["token"] for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    sources = [piece["text"] for c in chunks for piece in c["choices"][0].get("token_sources") or ()]
    assert "".join(told) == "".join(sources) == OSLO


def test_without_leave_for_parallel_calls_only_the_first_is_told(http: httpx.Client) -> None:
    choice = ask(http, saying(f"{OSLO}\n{TIME}", parallel_tool_calls=False))
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]


def test_with_tool_choice_none_the_model_knows_of_no_tools(server: Running, http: httpx.Client) -> None:
    choice = ask(http, saying(OSLO, tool_choice="none"))
    assert choice["message"]["content"] == OSLO and choice["finish_reason"] == "stop"
    assert server.backend.params[-1].structured_outputs is None


def test_tools_are_told_in_the_system_message_where_the_template_takes_none(server: Running) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]  # fmt: skip
    with server.client() as http:
        ask(http, {"messages": messages, "tools": TOOLS, "max_tokens": 4})
        with_tools = server.backend.prompts[-1]
        ask(http, {"messages": messages, "max_tokens": 4})
        without = server.backend.prompts[-1]
    assert with_tools.startswith("<system>Be kind.\n\nYou can call these functions")
    assert json.dumps(WEATHER["function"]) in with_tools and '"name": "clock"' in with_tools
    assert f"<assistant>{OSLO}\n" in with_tools
    assert with_tools.endswith("<user><tool_response>\nrain\n</tool_response>\n<assistant>")
    assert without.startswith("<system>Be kind.\n<user>") and without.endswith(with_tools.partition("Weather?")[2])


class TakesTools(fake.ByteTokenizer):
    """Of a model whose template tells it of tools, as Qwen's does."""

    chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}<tool_call>"

    def chat_token_ids(self, messages: Any, add_generation_prompt: bool = True, *, tools: Any = None) -> list[int]:
        return self.encode(json.dumps({"messages": messages, "tools": tools}, ensure_ascii=False))


def test_a_template_that_takes_tools_gets_them_and_the_history_as_objects() -> None:
    backend = fake.FakeBackend()
    backend.tokenizer = TakesTools()
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": [1]}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": "{oops"}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
    ]
    with running(backend) as server, server.client() as http:
        ask(http, {"messages": messages, "tools": TOOLS, "max_tokens": 4})
        asked = json.loads(backend.prompts[-1])
        tokens = http.post("/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
    assert bytes(tokens).decode() == backend.prompts[-1]
    assert asked["tools"][0] == WEATHER
    assert asked["tools"][1]["function"]["parameters"]["type"] == "object"
    first, second = asked["messages"][1]["tool_calls"]
    assert first["function"]["arguments"] == {"zone": [1]} and second["function"]["arguments"] == "{oops"
    assert asked["messages"][2] == {"role": "tool", "content": "noon", "tool_call_id": "c1"}


def test_a_parser_that_does_not_go_with_the_model_is_found_out_at_the_start() -> None:
    with (
        pytest.raises(InvalidOptionError, match="takes no tools"),
        running(fake.FakeBackend(), tool_call_parser="mistral"),
    ):
        pass
    backend = fake.FakeBackend()
    backend.tokenizer = TakesTools()
    with running(backend, tool_call_parser="llama3_json") as server, server.client() as http:
        assert server.service.tool_format.family is FAMILIES["llama3_json"]
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": [{"type": "function", "function": {"name": "not a name"}}]}, "tools", "letters, digits"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "letters, digits"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "'clock'"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "'function'"),
        ({"tools": [CLOCK | {"x": 1}]}, "tools", "unknown field"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools",
         "of an object"),
        ({"tools": [CLOCK] * 129}, "tools", "at most 128"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": "sometimes"}, "tool_choice", "'required'"),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice", "'rm'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "function"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
        ({"messages": [{"role": "tool", "tool_call_id": "c9", "content": "x"}]}, "messages", "'c9'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages", "tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [
            {"id": "c", "function": {"name": "f", "arguments": "{}"}}]}]}, "messages", "'assistant'"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "does not go with tools"),
    ],
)  # fmt: skip
def test_wrong_tools_are_refused_by_name(http: httpx.Client, change: Any, param: str, words: str) -> None:
    answer = http.post(CHAT, json=saying("x") | change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"], error


def test_plain_completions_call_no_tools(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x", "tools": TOOLS})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
    neutral = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True}
    assert http.post("/v1/completions", json={"prompt": "x", **neutral}).status_code == 200


def test_the_answers_own_message_goes_back_as_it_came(http: httpx.Client) -> None:
    body = saying(OSLO)
    message = http.post(CHAT, json=body).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "SAY«rain»"}
    again = ask(http, body | {"messages": [*body["messages"], message, result]})
    assert again["message"]["content"] == "rain"


def test_seeds_give_the_text_they_gave_without_tools(http: httpx.Client) -> None:
    """Where no tool is offered nothing changed: the engine's prompt is the template's."""
    message = [{"role": "user", "content": "Hello"}]
    choice = ask(http, {"messages": message, "seed": 3, "max_tokens": 9})
    assert choice["message"]["content"] == fake.expected_text(list(b"<user>Hello\n<assistant>"), 3, 0, 9)
