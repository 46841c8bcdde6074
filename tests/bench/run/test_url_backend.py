"""The client against a small server that speaks OpenAI's stream, misbehaves on demand, and counts like vLLM."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from paceline.bench.run.backend import Sampling
from paceline.bench.run.server_counters import speculation_counts
from paceline.bench.run.url_backend import UrlBackend, _events
from paceline.bench.workloads.workload import Prompt
from paceline.errors import InvalidOptionError

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 6.0
vllm:request_success_total{engine="0"} 3.0
"""


class Handler(BaseHTTPRequestHandler):
    asked: list[tuple[str, dict[str, Any]]]
    silence: threading.Event  # set: end it

    def do_GET(self) -> None:
        pages = {"/v1/models": json.dumps({"data": [{"id": "tiny"}]}), "/metrics": METRICS}
        body = pages.get(self.path, "").encode()
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body))
        text = body.get("prompt") or body["messages"][0]["content"]
        if text == "silence":
            self.silence.wait(10)
            return
        if text == "cut":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\ndata: {")
            return
        if text == "refuse":
            self.send_error(400, "no")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for piece in ("One", " two three\u2028"):  # the second event holds two tokens, and a separator of lines
            choice = {"text": piece} if "prompt" in body else {"delta": {"content": piece}}
            self._event({"choices": [choice]})
            if text == "break off":
                return
        if text == "error inside":
            self._event({"error": {"message": "out of memory"}})
            return
        self._event({"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 7}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(b": a comment\n" + f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    handler = type("Once", (Handler,), {"asked": [], "silence": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    handler.silence.set()
    server.shutdown()
    thread.join()
    server.server_close()


def ask(backend: UrlBackend, text: str, chat: bool = True) -> Any:
    return asyncio.run(backend.generate(Prompt("p", "chat", text, chat), Sampling(max_tokens=5, seed=3), 4))


def test_tokens_are_counted_by_the_server_and_times_by_events(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    backend = UrlBackend(url + "/v1")
    answer = ask(backend, "hello")
    assert answer.error is None
    assert (answer.num_output_tokens, answer.num_prompt_tokens, len(answer.event_s)) == (3, 7, 2)
    path, body = handler.asked[0]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["seed"], body["max_tokens"], body["stream"]) == ("tiny", 7, 5, True)
    same = ask(backend, "hello", chat=False)
    assert handler.asked[1][0] == "/v1/completions" and same.output_hash == answer.output_hash
    backend.close()


def test_a_history_and_a_schema_are_sent_and_the_answer_may_end(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    backend = UrlBackend(url)
    prompt = Prompt("p", "tool_loop", "hello", history=(("system", "be short"),), schema='{"type": "object"}')
    asyncio.run(backend.generate(prompt, Sampling(), 0))
    body = handler.asked[0][1]
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"} and body["ignore_eos"] is False
    backend.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("refuse", "HTTP 400"),
        ("break off", "broke off before its end"),
        ("error inside", "out of memory"),
        ("cut", "RemoteProtocolError"),
        ("silence", "ReadTimeout"),
    ],
)
def test_a_failed_request_carries_its_error(server: tuple[str, type[Handler]], text: str, message: str) -> None:
    backend = UrlBackend(server[0], timeout_s=0.5)
    answer = ask(backend, text)
    assert message in answer.error
    backend.close()


def test_vllm_counters_are_read_from_the_metrics_page(server: tuple[str, type[Handler]]) -> None:
    backend = UrlBackend(server[0])
    counts = backend.counts()
    assert counts is not None
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (10, 40, 15)
    assert counts.accepted_per_position == [9, 6]
    backend.close()


def test_counters_are_found_under_any_prefix_and_none_where_there_are_none() -> None:
    counts = speculation_counts("paceline_spec_decode_num_drafts_total 4\npaceline:spec_decode_num_drafts 3\n")
    assert counts is not None and counts.num_drafts == 7
    assert speculation_counts("vllm:request_success_total 3\n") is None


def test_requests_run_at_once_each_on_a_connection_of_its_own(server: tuple[str, type[Handler]]) -> None:
    backend = UrlBackend(server[0])

    async def all_of_them() -> list[Any]:
        prompts = [Prompt(str(i), "chat", "silence" if i == 0 else "hello", True) for i in range(8)]
        running = [asyncio.ensure_future(backend.generate(prompt, Sampling(max_tokens=5), 0)) for prompt in prompts]
        quick = await asyncio.gather(*running[1:])
        assert not running[0].done()
        server[1].silence.set()
        return [*quick, await running[0]]

    *quick, silent = asyncio.run(all_of_them())
    assert [answer.error for answer in quick] == [None] * 7 and silent.error is not None
    backend.close()


def test_text_is_cut_into_lines_at_newlines_alone() -> None:
    """U+2028 and others end a line for Python, and stand unescaped in JSON strings."""
    chunks = [b"da", "ta: a\u2028b\r\n".encode(), b"data: c\n", b"\ndata: d"]
    assert list(_events(chunks)) == ["a\u2028b\nc", "d"]


def test_without_httpx_the_error_names_the_extra() -> None:
    blocked = "import sys; sys.modules['httpx'] = None; import paceline.bench.run.url_backend"
    ran = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)
    assert "measuring a server needs httpx: pip install 'paceline[bench]'" in ran.stderr


def test_a_server_that_does_not_answer_and_a_bad_url_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="no OpenAI-compatible server answers"):
        UrlBackend("http://127.0.0.1:9")
    with pytest.raises(InvalidOptionError, match="such as http://localhost:8000"):
        UrlBackend("ftp://x")
    with pytest.raises(InvalidOptionError, match="such as http://localhost:8000"):
        UrlBackend("http://localhost:port")
