"""Fields of other servers: neutral ones are taken, misspelt ones refused, others named in a header; none is silent."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from paceline.core.foreign_options import REQUEST
from tests.serve import fake
from tests.serve.conftest import Running, running

HEADER = "x-paceline-ignored-fields"
ASK: dict[str, Any] = {"prompt": "abc", "max_tokens": 3}


def post(http: httpx.Client, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return http.post(path, json=ASK | fields)


@pytest.mark.parametrize("name", [name for name in REQUEST if name != "echo"])
def test_values_that_ask_for_nothing_are_taken_and_others_refused_with_the_reason(
    http: httpx.Client, name: str
) -> None:
    option = REQUEST[name]
    neutral = [None, *(option.values if option.values is not None else ["anything"])]
    for value in neutral:
        answer = post(http, **{name: value})
        assert answer.status_code == 200 and HEADER not in answer.headers, (value, answer.text)
    if option.values is not None:
        answer = post(http, **{name: "something else"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name and option.reason in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["temprature", "max_token", "top_pp", "stop_token_id", "presence_penalti"])
def test_a_misspelt_field_is_refused_with_the_right_name(http: httpx.Client, name: str) -> None:
    answer = post(http, **{name: 1})
    assert answer.status_code == 400 and "Did you mean" in answer.json()["error"]["message"]


def test_a_field_that_nobody_knows_is_named_in_a_header_and_in_the_log(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "paceline.serve"):
        answer = post(http, mirostat_mode=2, **{"odd\r\nX-Evil: 1": True, "ü" * 100: 0})
        assert HEADER not in post(http).headers  # once it is answered, the line of the one before it is written
    assert answer.status_code == 200 and "x-evil" not in answer.headers
    named = answer.headers[HEADER].split(", ")
    assert named[:2] == ["mirostat_mode", "odd%0D%0AX-Evil%3A%201"] and len(named) == 3
    line = next(record for record in caplog.records if record.getMessage() == "request")
    assert line.fields["ignored_fields"] == answer.headers[HEADER]  # type: ignore[attr-defined]


def test_too_many_unknown_fields_are_refused(http: httpx.Client) -> None:
    assert post(http, **{f"zz{i}": 1 for i in range(17)}).status_code == 400


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    with running(fake.FakeBackend(), strict=True) as handle:
        yield handle


def test_a_strict_server_refuses_every_unknown_field(strict: Running) -> None:
    with strict.client() as http:
        answer = post(http, mirostat_mode=2)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "unknown_parameter"
        assert post(http, use_beam_search=False).status_code == 200


def test_a_prompt_is_echoed_alone(http: httpx.Client) -> None:
    answer = post(http, max_tokens=0, echo=True, logprobs=1).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert answer["usage"]["completion_tokens"] == 0
    streamed = http.post("/v1/completions", json=ASK | {"max_tokens": 0, "echo": True, "stream": True}).text
    assert '"text":"abc"' in streamed and streamed.count("data: {") == 1
    refused = post(http, max_tokens=0)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


def test_sampling_defaults_of_the_model_hold_where_a_request_says_nothing() -> None:
    backend = fake.FakeBackend()
    backend.default_sampling = {"temperature": 0.25, "top_k": 9, "max_tokens": 4}
    with running(backend) as handle, handle.client() as http:
        http.post("/v1/completions", json={"prompt": "abc", "top_k": 3}).raise_for_status()
    (params,) = backend.params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 3, 4)


def test_the_tokenizer_describes_itself(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["tokenizer_class"] == "bytes" and info["model_max_length"] == 4096 and info["eos_token"] is None


def test_chat_options_reach_the_template(server: Running, http: httpx.Client) -> None:
    seen: list[Any] = []
    make = server.backend.tokenizer.chat_token_ids

    def chat_token_ids(messages: Any, add_generation_prompt: bool = True, **options: Any) -> list[int]:
        seen.append((messages, add_generation_prompt, options))
        return make(messages, add_generation_prompt)

    server.backend.tokenizer.chat_token_ids = chat_token_ids  # type: ignore[method-assign]
    try:
        message = {"role": "assistant", "content": "Well", "reasoning": "Hm"}
        ask = {"messages": [message], "max_tokens": 2, "continue_final_message": True}
        ask["chat_template_kwargs"] = {"enable_thinking": False}
        http.post("/v1/chat/completions", json=ask).raise_for_status()
    finally:
        server.backend.tokenizer.chat_token_ids = make  # type: ignore[method-assign]
    (((given,), add, options),) = seen
    assert given == {"role": "assistant", "content": "Well", "reasoning_content": "Hm"} and not add
    assert options == {"continue_final_message": True, "template_options": {"enable_thinking": False}}


@pytest.mark.parametrize("name", ["user", "metadata", "safety_identifier", "prompt_cache_key"])
def test_a_label_changes_nothing(server: Running, http: httpx.Client, name: str) -> None:
    value: Any = {"a": "b"} if name == "metadata" else "someone"
    plain, labelled = post(http, seed=5), post(http, seed=5, **{name: value})
    assert plain.json()["choices"] == labelled.json()["choices"] and HEADER not in labelled.headers
    assert server.backend.params[-1] == server.backend.params[-2]


def test_the_start_of_a_server_shows_its_sampling_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.serve.config import ServerConfig
    from paceline.serve.http import server as http_server

    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(http_server, "log", lambda event, **fields: lines.append({"event": event} | fields))
    monkeypatch.setattr(http_server, "configure_logging", lambda level: None)
    monkeypatch.setattr(http_server.GracefulServer, "run", lambda self: None)
    backend = fake.FakeBackend()
    backend.default_sampling = {"temperature": 0.6}
    http_server.run_server(backend, ServerConfig(("fake",)), "127.0.0.1", 0)
    assert lines[0]["event"] == "starting" and lines[0]["sampling_defaults"] == {"temperature": 0.6}


def test_tools_of_a_plain_completion_are_refused_and_not_left_out(http: httpx.Client) -> None:
    answer = post(http, tools=[{"type": "function", "function": {"name": "clock"}}])
    assert answer.status_code == 400 and "/v1/chat/completions" in answer.json()["error"]["message"]
    neutral = post(http, tools=[], tool_choice="auto", parallel_tool_calls=True)
    assert neutral.status_code == 200 and HEADER not in neutral.headers


def test_responses_know_their_own_fields(http: httpx.Client) -> None:
    def ask(**fields: Any) -> httpx.Response:
        return http.post("/v1/responses", json={"input": "abc", "max_output_tokens": 3} | fields)

    assert ask(background=True).status_code == 400 and HEADER not in ask(background=False).headers
    assert ask(mirostat_mode=2).headers[HEADER] == "mirostat_mode"
