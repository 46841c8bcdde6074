"""A stream's chunk costs what its own tokens cost, however long the answer already is."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from paceline.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from paceline.core.sampling_params import SamplingParams
from paceline.serve.generate.call import Call
from paceline.serve.generate.event_stream import EventStream
from paceline.serve.http.request_bodies import ChatCompletionRequest
from tests.serve import fake
from tests.serve.conftest import Running, running

NUM_TOKENS = 2_000


class CountingTokenizer(fake.ByteTokenizer):
    num_decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)


def chat_call(**options: Any) -> Call:
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], stream=True, **options)  # type: ignore[list-item]
    params = SamplingParams(max_tokens=NUM_TOKENS, logprobs=1 if options.get("logprobs") else None)
    return Call("chatcmpl-1", "fake", body, [[120]], params)


def delta(token: int, logprobs: bool) -> RequestOutput:
    entries = [TokenLogprobs(token, -0.5, 1, {token: -0.5})] if logprobs else None
    output = CompletionOutput(0, chr(token), [token], token_logprobs=entries, token_sources=["draft"])
    return RequestOutput("chatcmpl-1", None, [120], [output], finished=False)


@pytest.mark.parametrize(
    "options", [{}, {"return_token_sources": True}, {"logprobs": True, "top_logprobs": 1}], ids=str
)
def test_the_last_chunk_of_a_long_answer_costs_what_the_second_does(options: dict[str, Any]) -> None:
    backend = fake.FakeBackend()
    backend.tokenizer = tokenizer = CountingTokenizer()
    sent: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(len(message["body"]))

    async def scenario() -> list[int]:
        stream = EventStream(chat_call(**options), backend, send)
        decoded = []
        for _ in range(NUM_TOKENS):
            tokenizer.num_decoded = 0
            await stream.take(0, delta(ord("a"), bool(options.get("logprobs"))))
            decoded.append(tokenizer.num_decoded)
        return decoded

    decoded = asyncio.run(scenario())
    assert len(sent) == NUM_TOKENS
    assert len(set(sent[1:])) == 1  # the first one has the role
    assert len(set(decoded[2:])) == 1


def test_one_prompt_that_fails_ends_the_others_and_is_the_answer() -> None:
    backend = fake.FakeBackend(step_s=0.005)
    with running(backend) as handle, handle.client() as client:
        body = {"prompt": ["a", "FAIL", "b"], "max_tokens": 1_000}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code >= 400 and "not finite" in answer.json()["error"]["message"]
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert "not finite" in lines[-2] and lines[-1] == "data: [DONE]"
    assert not backend.running and len(backend.aborted) == 6


def test_headers_come_first_when_many_prompts_begin_at_once(server: Running, http: httpx.Client) -> None:
    body = {"prompt": [chr(ord("a") + i) for i in range(20)], "max_tokens": 3, "stream": True}
    for _ in range(5):
        with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            ends = [line for line in answer.iter_lines() if '"finish_reason":"length"' in line]
        assert len(ends) == 20
