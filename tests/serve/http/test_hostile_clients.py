"""Hostile clients: what each of them may cost is bounded, and others are not delayed."""

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

from paceline.serve.config import ServerConfig
from paceline.serve.http.app import create_app
from paceline.serve.http.body import MAX_ITEMS, TEXTS_OF_TOKENS, VALUES_BESIDE_TOKENS, BodyReader
from paceline.serve.http.errors import ApiError
from paceline.serve.http.limits import check_options
from paceline.serve.http.request_bodies import ChatCompletionRequest, CompletionRequest
from tests.serve import fake
from tests.serve.conftest import Running, running, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}


@contextlib.contextmanager
def connected(server: Running, timeout_s: float = 10.0) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=timeout_s) as connection:
        yield connection


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            received += data
    return received


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    """Connections that are slow are ended soon."""
    limits = {"header_timeout_s": 0.3, "body_timeout_s": 0.3, "read_timeout_s": 0.3}
    with running(fake.FakeBackend(), **limits) as handle:
        yield handle


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """Connections that send much are ended soon."""
    with running(fake.FakeBackend(), max_header_bytes=4096, max_body_bytes=65536) as handle:
        yield handle


# Connections


@pytest.mark.parametrize("piece", [b"x" * 1024, b"x: y\r\n" * 200], ids=["one long header", "many headers"])
def test_endless_headers_are_refused(small: Running, piece: bytes) -> None:
    with connected(small) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nEndless: ")
        with contextlib.suppress(ConnectionError, TimeoutError):
            for _ in range(100):
                connection.sendall(piece)
        assert status_of(until_closed(connection)) in (400, 431)  # 400: headers that cannot be parsed


def test_an_endless_first_line_is_refused(small: Running) -> None:
    with connected(small) as connection:
        connection.sendall(b"GET /")
        with contextlib.suppress(ConnectionError, TimeoutError):
            for _ in range(100):
                connection.sendall(b"x" * 1024)
        assert status_of(until_closed(connection)) == 431


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nHost:"], ids=["silent", "dripping"])
def test_a_connection_whose_headers_do_not_come_is_closed(guarded: Running, begin: bytes) -> None:
    begin_s = time.monotonic()
    with connected(guarded, timeout_s=0.02) as connection:
        received = b""
        connection.sendall(begin)
        while time.monotonic() - begin_s < 5:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                if begin:
                    connection.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                data = connection.recv(4096)
                received += data
                if not data:
                    break
        assert time.monotonic() - begin_s < 5
        assert (status_of(received) == 408) if begin else (received == b"")


def test_the_second_request_of_a_connection_has_the_same_time_limit(guarded: Running) -> None:
    with connected(guarded) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status_of(connection.recv(4096)) == 200
        connection.sendall(b"GET /health HTTP/1.1\r\nHo")
        assert status_of(until_closed(connection)) == 408


def test_endless_trailers_and_chunks_are_cut_off(small: Running) -> None:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Transfer-Encoding: chunked"]
    head = "\r\n".join([*lines, "", ""]).encode()
    for endless in (b"0\r\nx: " + b"y" * 65536, b"1;" + b"e" * 65536):
        with connected(small) as connection:
            connection.sendall(head)
            begin_s = time.monotonic()
            with contextlib.suppress(ConnectionError, TimeoutError):
                connection.sendall(endless)
                while time.monotonic() - begin_s < 8:
                    connection.sendall(b"z" * 65536)
            assert time.monotonic() - begin_s < 8


def test_an_early_answer_closes_the_connection_but_is_read(small: Running) -> None:
    with connected(small) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n\r\n" + b"x" * 9999)
        assert status_of(until_closed(connection)) == 413


def test_hanging_up_in_the_middle_of_a_body_is_no_error_of_ours(
    small: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline.serve")
    with connected(small) as connection:
        head = [f"POST {COMPLETIONS} HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 999"]
        connection.sendall("\r\n".join([*head, "", "{"]).encode())
        time.sleep(0.1)
    wait_until(lambda: any(getattr(record, "fields", {}).get("status") == "gone" for record in caplog.records))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 60_000, "stream": True}).encode()
    backend = fake.FakeBackend(max_model_len=65_536)
    with running(backend, read_timeout_s=0.3) as handle, connected(handle) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: backend.running)
        wait_until(lambda: backend.aborted, timeout_s=5)


def test_connections_are_counted_by_client_and_in_all() -> None:
    with running(fake.FakeBackend(), max_connections_per_client=2) as handle:
        with connected(handle), connected(handle), connected(handle) as third:
            assert status_of(until_closed(third)) == 429
        time.sleep(0.1)
        with handle.client() as client:
            assert client.get("/health").status_code == 200  # a client that hung up no longer counts
    with running(fake.FakeBackend(), max_connections=1) as handle, connected(handle), connected(handle) as second:
        assert status_of(until_closed(second)) == 503


def test_pipelined_requests_are_answered_in_turn(small: Running) -> None:
    with connected(small) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert until_closed(connection).count(b"200 OK") == 21


# Bodies

MILLION = 250_000  # items that fit a body: as many as a test needs to see a cost that grows

HOSTILE_BODIES: dict[str, Any] = {
    "ids and a text": {"prompt": [1] * MILLION + ["x"]},
    "lists of ids and a text": {"prompt": [[1] * MILLION, "x"]},
    "negative ids": {"prompt": [-1] * MILLION},
    "allowed ids that are texts": {"prompt": "x", "allowed_token_ids": ["x"] * MILLION},
    "stop texts that are numbers": {"prompt": "x", "stop": [1] * MILLION},
    "stop strings": {"prompt": "x", "stop": [str(i) for i in range(MILLION)]},
    "bad words": {"prompt": "x", "bad_words": [str(i) for i in range(20_000)], "n": 32},
    "biases": {"prompt": "x", "logit_bias": {str(i): 1 for i in range(MILLION)}},
    "unknown fields": {"prompt": "x"} | {f"field {i}": 1 for i in range(MILLION)},
    "empty lists": {"prompt": "x", "metadata": [[]] * MILLION},
    "messages that are numbers": {"messages": [1] * MILLION},
    "parts that are numbers": {"messages": [{"role": "user", "content": [1] * MILLION}]},
    "a message of unknown fields": {"messages": [{f"field {i}": 1 for i in range(MILLION)}]},
    "speculative": {"prompt": "x", "speculative": {"prediction": [[]] * MILLION}},
}


@pytest.mark.parametrize("body", HOSTILE_BODIES.values(), ids=HOSTILE_BODIES)
def test_a_hostile_body_is_refused_without_looking_at_each_of_its_mistakes(body: dict[str, Any]) -> None:
    """Refusing takes about as long as reading the JSON, not seconds; the message stays short."""
    raw = json.dumps(body).encode()
    kind = ChatCompletionRequest if "messages" in body else CompletionRequest
    begin_s = time.thread_time()
    json.loads(raw)
    reading_s = time.thread_time() - begin_s
    app = create_app(fake.FakeBackend(max_model_len=4096), ServerConfig(("fake",)))
    service, reader = app.state.service, BodyReader(max_model_len=4096)
    begin_s = time.thread_time()
    with pytest.raises(ApiError) as refusal:
        check_options(reader.parse(raw, kind), service.config)
    assert time.thread_time() - begin_s < 3 * reading_s + 0.1
    assert refusal.value.status == 400 and len(str(refusal.value)) < 300


def test_large_token_lists_within_the_limits_are_taken() -> None:
    reader = BodyReader(max_model_len=8192)
    ids = [7] * 8000
    parsed = reader.parse(json.dumps({"prompt": [ids, ids], "allowed_token_ids": ids}).encode(), CompletionRequest)
    assert parsed.prompt == [ids, ids] and parsed.allowed_token_ids == ids
    text = "1,2,[3],{4}," * 20_000  # commas in a text are no values
    assert reader.parse(json.dumps({"prompt": text}).encode(), CompletionRequest).prompt == text
    strings = ["x"] * MAX_ITEMS
    assert reader.parse(json.dumps({"prompt": strings}).encode(), CompletionRequest).prompt == strings


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "logit_bias": {"' + b"9" * 5000 + b'": 1}}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "\xff\xfe"}',
        '{"prompt": "x"}'.encode("utf-16"),
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"",
        b"nonsense",
    ],
    ids=[
        "digits",
        "bias digits",
        "nan",
        "overflow",
        "infinity",
        "not utf-8",
        "utf-16",
        "deep",
        "deep objects",
        "none",
        "no json",
    ],
)
def test_bodies_that_broke_the_parser_are_answered_with_400(http: httpx.Client, body: bytes) -> None:
    answer = http.post(COMPLETIONS, content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert len(answer.json()["error"]["message"]) < 300


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "1e3", "0x10", ""])
def test_absurd_lengths_are_answered_with_400(server: Running, length: str) -> None:
    with connected(server) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}"
        connection.sendall(f"{head}\r\nConnection: close\r\n\r\n{{}}".encode())
        assert status_of(until_closed(connection)) in (400, 413)


# Options


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": ["x" * 70_000]}, "stop"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"logit_bias": {str(i): 1 for i in range(1000)} | {"1" * 30: 1}}, "logit_bias"),
        ({"logprobs": 100, "n": 24, "max_tokens": 100}, "logprobs"),
        ({"prompt_logprobs": 100, "prompt": "x" * 1000}, "logprobs"),
        ({"echo": True, "logprobs": 100, "n": 24, "max_tokens": 1, "prompt": "x" * 100}, "logprobs"),
        ({"speculative": {"method": "ngram", "node_budget": 100}, "n": 10}, "speculative"),
        ({"speculative": {"num_speculative_tokens": 513}}, "speculative"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_options_that_would_cost_others_are_limited(http: httpx.Client, options: dict[str, Any], param: str) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "x"} | options)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_log_probabilities_within_the_limit_shorten_an_answer_of_no_stated_length() -> None:
    with running(fake.FakeBackend(), max_logprob_entries=210) as handle, handle.client() as client:
        body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
        answer = client.post(CHAT, json=body)
        assert answer.json()["usage"]["completion_tokens"] == 10
        assert client.post(CHAT, json=body | {"max_tokens": 11}).status_code == 400


@pytest.mark.parametrize("n", [1, 8, 128])
def test_a_stream_finishes_each_choice_once(n: int) -> None:
    """Choices that end early are not told again with every later state of the call."""
    with running(fake.FakeBackend(max_num_seqs=128)) as handle, handle.client() as client:
        body = {"prompt": "x", "n": n, "max_tokens": 60, "stop": ["e", "7"], "seed": 3, "stream": True}
        lines = client.post(COMPLETIONS, json=body).text.splitlines()
        whole = client.post(COMPLETIONS, json=body | {"stream": False}).json()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    finished = [choice["index"] for choice in choices if choice["finish_reason"] is not None]
    assert sorted(finished) == list(range(n))
    for expected in whole["choices"]:
        parts = [choice for choice in choices if choice["index"] == expected["index"]]
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert parts[-1]["finish_reason"] == expected["finish_reason"]
    if n > 1:
        ends = {len(choice["text"]) for choice in whole["choices"]}
        assert len(ends) > 1, "the test needs choices that end at different times"


def test_tokenize_lists_a_bounded_number_of_tokens() -> None:
    most = VALUES_BESIDE_TOKENS + TEXTS_OF_TOKENS * 100
    with running(fake.FakeBackend(max_model_len=100)) as handle, handle.client() as client:
        assert client.post("/tokenize", json={"prompt": "x" * most}).json()["count"] == most
        for body, param in (
            ({"prompt": "x" * (most + 1)}, "prompt"),
            ({"messages": [{"role": "user", "content": "x" * most}]}, "messages"),
        ):
            answer = client.post("/tokenize", json=body)
            error = answer.json()["error"]
            assert answer.status_code == 400 and (error["code"], error["param"]) == ("too_long", param)


# Others


def test_a_large_body_delays_no_other_client() -> None:
    """While one client's megabyte is parsed and tokenized, another's health check is answered."""

    class Slow(fake.ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            if len(text) > 10_000:
                time.sleep(1.5)  # holds the event loop for as long, if it runs there
            return super().encode(text, add_special_tokens)

    backend = fake.FakeBackend()
    backend.tokenizer = Slow()
    with running(backend) as handle, handle.client() as client, handle.client() as other:
        thread = threading.Thread(target=lambda: client.post(COMPLETIONS, json={"prompt": "x" * 500_000}))
        thread.start()
        waits = []
        while thread.is_alive():
            begin_s = time.monotonic()
            assert other.get("/health").status_code == 200
            waits.append(time.monotonic() - begin_s)
        assert len(waits) > 5 and max(waits) < 1.0
