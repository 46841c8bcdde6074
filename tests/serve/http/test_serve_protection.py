"""What the server refuses, how it says so, and what it keeps to itself."""

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from paceline.errors import InvalidOptionError
from paceline.serve.config import ServerConfig
from paceline.serve.http import server
from paceline.serve.http.logs import JsonLines
from tests.serve import fake
from tests.serve.conftest import Running, running, wait_until

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({}, "messages", "required"),
        ({"messages": MESSAGES, "temprature": 1}, "temprature", "Did you mean 'temperature'"),
        ({"messages": MESSAGES, "temperature": "hot"}, "temperature", "valid number, got 'hot'"),
        ({"messages": MESSAGES, "temperature": -1}, None, "temperature must be between 0"),
        ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": MESSAGES, "max_tokens": 9999}, "max_tokens", "ask for at most"),
        ({"messages": MESSAGES, "n": 200}, "n", "less than or equal to 128"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools", "function: field required"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice", "give tools"),
        ({"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format", "'json_schema'"),
        ({"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs", "logprobs: true"),
        ({"messages": MESSAGES, "stream_options": {}}, "stream_options", "stream: true"),
        ({"messages": MESSAGES, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "without stream"),
        ({"messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "differ"),
        ({"messages": MESSAGES, "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"messages": MESSAGES, "speculative": {"methd": "ngram"}}, None, "methd"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool_call_id go together"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "'system'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "text"),
        (
            {"messages": MESSAGES, "prediction": {"content": "x"}, "speculative": {"prediction": "y"}},
            "prediction",
            "twice",
        ),
    ],
)
def test_refusals_name_the_field_and_the_remedy(http: httpx.Client, body: Any, param: str | None, words: str) -> None:
    error = error_of(http.post(CHAT, json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


def test_bodies_that_are_no_json_object_are_refused(http: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    assert error_of(http.post(CHAT, content=b"{", headers=headers), 400)["code"] == "invalid_json"
    assert error_of(http.post(CHAT, content=b"[1]", headers=headers), 400)
    assert error_of(http.post(CHAT, content=b'{"messages": 1}', headers={"content-type": "text/plain"}), 400)
    for field in (b'"stop"', b'"bad_words"', b'"user"', b'"model"', b'"\\ud800"'):
        half_a_pair = b'{"prompt": "x", ' + field + b': "\\ud800"}'
        error = error_of(http.post("/v1/completions", content=half_a_pair, headers=headers), 400)
        assert error["code"] == "invalid_unicode"
    assert error_of(http.post(CHAT, content=b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", headers=headers), 400)
    assert error_of(http.get("/v1/nothing"), 404)["type"] == "not_found_error"
    assert error_of(http.get(CHAT), 405)


def test_neutral_values_of_unsupported_fields_pass(http: httpx.Client) -> None:
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False, "audio": None}
    http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 2} | neutral).raise_for_status()


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [257], "x" * 4096, [[1], []]], ids=["no text", "none", "no ids", "unknown", "long", "one"]
)
def test_prompts_that_cannot_be_served_are_refused(http: httpx.Client, prompt: Any) -> None:
    error_of(http.post("/v1/completions", json={"prompt": prompt}), 400)


def test_unknown_model_is_not_found(http: httpx.Client) -> None:
    error = error_of(http.post(CHAT, json={"model": "gpt-4", "messages": MESSAGES}), 404)
    assert error["code"] == "model_not_found" and "fake" in error["message"]
    error_of(http.get("/v1/models/gpt-4"), 404)


def test_failures_inside_keep_their_details(http: httpx.Client) -> None:
    crash = [{"role": "user", "content": "CRASH"}]
    answer = http.post(CHAT, json={"messages": crash, "max_tokens": 20})
    assert error_of(answer, 500)["code"] == "internal"
    assert "secret" not in answer.text and "Traceback" not in answer.text
    assert answer.headers["x-request-id"] in answer.text
    fail = [{"role": "user", "content": "FAIL"}]
    assert "not finite" in error_of(http.post(CHAT, json={"messages": fail, "max_tokens": 20}), 500)["message"]


@pytest.mark.parametrize(("word", "code"), [("FAIL", "request_failed"), ("CRASH", "internal")])
def test_a_failing_stream_ends_with_an_error_event(http: httpx.Client, word: str, code: str) -> None:
    body = {"messages": [{"role": "user", "content": word}], "max_tokens": 20, "stream": True}
    lines = [line for line in http.post(CHAT, json=body).text.splitlines() if line]
    assert "choices" in json.loads(lines[0].removeprefix("data: "))
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == code
    assert lines[-1] == "data: [DONE]"
    assert not any("secret" in line for line in lines)


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    """Everything that can be limited, limited."""
    options = {"api_keys": ("right-key", "other"), "max_body_bytes": 2000, "max_prompt_tokens": 100}
    limits = {"max_tokens_limit": 50, "max_choices": 4, "cors_origins": ("http://page.example",)}
    with running(fake.FakeBackend(), **options, **limits) as handle:
        yield handle


@pytest.fixture
def keyed(strict: Running) -> Iterator[httpx.Client]:
    with strict.client(headers={"Authorization": "Bearer right-key"}) as client:
        yield client


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer right-ke", "Basic right-key", "right-key", "Bearer"])
@pytest.mark.parametrize("path", [CHAT, "/metrics", "/api/live", "/tokenize"])
def test_a_request_without_the_right_key_is_refused(strict: Running, header: str | None, path: str) -> None:
    with strict.client(headers={} if header is None else {"Authorization": header}) as client:
        answer = client.get(path)
        assert error_of(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        for open_path in ("/", "/health", "/ready"):
            assert client.get(open_path).status_code == 200


def test_every_key_is_accepted(strict: Running) -> None:
    for key in ("right-key", "other"):
        with strict.client(headers={"Authorization": f"Bearer {key}"}) as client:
            assert client.get("/v1/models").status_code == 200


def test_large_bodies_are_refused_by_length_and_as_they_come(keyed: httpx.Client) -> None:
    large = json.dumps({"prompt": "x" * 3000}).encode()
    headers = {"content-type": "application/json"}
    assert error_of(keyed.post("/v1/completions", content=large, headers=headers), 413)
    pieces = (large[i : i + 500] for i in range(0, len(large), 500))  # chunked: no length is announced
    assert error_of(keyed.post("/v1/completions", content=pieces, headers=headers), 413)["code"] == "body_too_large"


@pytest.mark.parametrize("dripping", [False, True], ids=["silent", "dripping"])
def test_a_body_that_does_not_come_is_not_waited_for(dripping: bool) -> None:
    with (
        running(fake.FakeBackend(), body_timeout_s=0.3) as handle,
        socket.create_connection(("127.0.0.1", handle.port), timeout=0.02) as connection,
    ):
        head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 9999"]
        connection.sendall("\r\n".join([*head, "", "{"]).encode())
        begin_s, answer = time.monotonic(), b""
        while not answer:
            assert time.monotonic() - begin_s < 5
            if dripping:
                connection.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(4096)
        assert b" 408 " in answer.splitlines()[0]


def test_limits_on_prompt_tokens_and_choices(keyed: httpx.Client) -> None:
    assert error_of(keyed.post("/v1/completions", json={"prompt": "x" * 101}), 400)["code"] == "context_length_exceeded"
    assert (
        "limit of 50" in error_of(keyed.post("/v1/completions", json={"prompt": "x", "max_tokens": 51}), 400)["message"]
    )
    assert error_of(keyed.post("/v1/completions", json={"prompt": "x", "n": 5}), 400)["code"] == "too_many_choices"
    assert error_of(keyed.post("/v1/completions", json={"prompt": ["x"] * 5}), 400)["code"] == "too_many_choices"
    answer = keyed.post(CHAT, json={"messages": MESSAGES})  # no max_tokens: the limit, not the context
    assert answer.json()["usage"]["completion_tokens"] == 50


def test_cross_origin_pages_only_where_allowed(keyed: httpx.Client, http: httpx.Client) -> None:
    origin = {"Origin": "http://page.example"}
    assert keyed.get("/v1/models", headers=origin).headers["access-control-allow-origin"] == "http://page.example"
    assert "access-control-allow-origin" not in keyed.get("/v1/models", headers={"Origin": "http://evil"}).headers
    assert "access-control-allow-origin" not in http.get("/v1/models", headers=origin).headers


def test_a_full_queue_says_when_to_come_back() -> None:
    backend = fake.FakeBackend(step_s=0.02, max_num_seqs=1)
    body = {"prompt": "x", "max_tokens": 200, "speculative": {"off": True}}
    with running(backend, max_queue_len=1, drain_timeout_s=0) as handle, handle.client() as client:
        threads = [threading.Thread(target=_post_and_forget, args=(handle, body)) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(backend.running) == 2)
        answer = client.post("/v1/completions", json=body)
        assert error_of(answer, 429)["type"] == "rate_limit_error"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert error_of(client.post("/v1/completions", json=body | {"n": 3}), 400)["code"] == "too_many_choices"
        assert client.get("/health").status_code == 200
    for thread in threads:
        thread.join(10)


def _post_and_forget(handle: Running, body: dict[str, Any]) -> None:
    with handle.client() as client:
        assert client.post("/v1/completions", json=body).status_code == 503  # cut short by the shutdown


def test_requests_that_take_too_long_are_ended() -> None:
    backend = fake.FakeBackend(step_s=0.02)
    body = {"prompt": "x", "max_tokens": 1000}
    with running(backend, request_timeout_s=0.2) as handle, handle.client() as client:
        assert error_of(client.post("/v1/completions", json=body), 408)["code"] == "timeout"
        answer = client.post("/v1/completions", json=body | {"stream": True})
        if answer.status_code == 200:  # on a very slow machine the time is up before the first token: a plain 408
            lines = [line for line in answer.text.splitlines() if line]
            assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        else:
            assert error_of(answer, 408)["code"] == "timeout"
        assert not backend.running and len(backend.aborted) == 2


def test_the_death_of_the_engine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DEATH_GRACE_S", 60.0)
    backend = fake.FakeBackend()
    with running(backend) as handle, handle.client() as client:
        backend.die()
        assert error_of(client.post("/v1/completions", json={"prompt": "x"}), 503)["code"] == "engine_dead"
        error_of(client.get("/health"), 503)
        error_of(client.get("/ready"), 503)


def test_a_server_whose_engine_died_ends_for_its_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DEATH_GRACE_S", 0.1)
    backend = fake.FakeBackend()
    threading.Timer(0.5, backend.die).start()
    assert server.run_server(backend, ServerConfig(("fake",)), "127.0.0.1", 0) == 1


@pytest.mark.parametrize("log_prompts", [False, True])
def test_prompt_text_is_logged_only_when_asked(caplog: pytest.LogCaptureFixture, log_prompts: bool) -> None:
    caplog.set_level(logging.INFO, "paceline.serve")
    with running(fake.FakeBackend(), log_prompts=log_prompts) as handle, handle.client() as client:
        client.post("/v1/completions", json={"prompt": "my private words"}).raise_for_status()
        client.post("/v1/completions", json={"prompt": "my private words", "temperature": "x"})
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    requests = [line for line in lines if line["event"] == "request"]
    assert requests[0]["num_prompt_tokens"] == 16 and requests[0]["num_output_tokens"] == 16
    assert ("private" in json.dumps(lines)) == log_prompts


@pytest.mark.parametrize(
    "options",
    [{"model_names": ()}, {"max_body_bytes": 0}, {"max_queue_len": -1}, {"api_keys": ("",)}, {"max_tokens_limit": 0}],
)
def test_server_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        ServerConfig(**({"model_names": ("x",)} | options))
