"""The server over the real engine: a toy target where behaviour is the point, the default model where text is."""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline import AsyncLLM
from paceline.models.loader import LoadedModel
from paceline.serve.generate.over_async_llm import OverAsyncLLM
from tests.serve.conftest import Running, running, wait_until
from tests.toy import ToyDecoder, ToyTokenizer

METHODS = ("ngram", "suffix", "prediction")


class ToyChatTokenizer(ToyTokenizer):
    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def chat_token_ids(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))


@pytest.fixture(scope="module")
def toy() -> Iterator[Running]:
    model = LoadedModel("toy", Path("."), ToyDecoder.config, ToyDecoder(), ToyChatTokenizer(), "toy")  # type: ignore[arg-type]
    options = {"max_num_seqs": 8, "num_kv_blocks": 64, "block_size": 16, "max_num_batched_tokens": 64}
    llm = AsyncLLM(model, {"method": "ngram", "node_budget": 4}, **options)
    backend = OverAsyncLLM(llm, METHODS)
    with running(backend, drain_timeout_s=1) as handle:  # type: ignore[arg-type]
        yield handle
    backend.shutdown()
    backend.check_integrity()
    assert backend.load().kv_usage == 0


@pytest.fixture
def http(toy: Running) -> Iterator[httpx.Client]:
    with toy.client() as client:
        yield client


def complete(http: httpx.Client, **options: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"prompt": "abcabc", "max_tokens": 60, "ignore_eos": True} | options)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_what_auto_decided_is_in_the_metrics_and_on_the_page() -> None:
    model = LoadedModel("toy", Path("."), ToyDecoder.config, ToyDecoder(), ToyChatTokenizer(), "toy")  # type: ignore[arg-type]
    backend = OverAsyncLLM(AsyncLLM(model, max_num_seqs=8, num_kv_blocks=64, max_num_batched_tokens=64), METHODS)
    with running(backend, drain_timeout_s=1) as server, server.client() as client:  # type: ignore[arg-type]
        complete(client, temperature=0)
        lines = client.get("/metrics").text.splitlines()
        decisions = client.get("/api/live").json()["speculation"]["auto"]["decisions"]
    backend.shutdown()
    counted = [line for line in lines if line.startswith("paceline:spec_decode_decisions_total{")]
    assert all('method="auto"' in line and 'decision="' in line and 'reason="' in line for line in counted)
    assert sum(float(line.split()[-1]) for line in counted) == decisions["steps"] > 0
    assert any('spec_decode_member_asked_total{member="suffix",method="auto",model_name="fake"}' in x for x in lines)
    suffix = decisions["members"]["suffix"]
    # Whether it is cheap, or pays, is measured: beside a toy model that takes no time it may be either.
    assert suffix["state"] in ("cheap", "trial", "pays", "skipped", "observes") and decisions["last_decision"]
    decided = ("on", "on trial", "off", "off, trial soon")
    assert suffix["reason"].startswith("suffix: o") and suffix["decided"].split(":")[0] in decided
    shown = 'spec_decode_member_reason_info{member="suffix",method="auto",model_name="fake",reason="'
    assert any(shown + suffix["decided"] in line for line in lines)
    assert any("spec_decode_member_gain_tokens{" in line for line in lines)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_seed_same_text_whatever_drafts(http: httpx.Client, temperature: float) -> None:
    choices = ({"off": True}, None, {"method": "ngram", "num_speculative_tokens": 7}, {"method": "suffix"})
    texts = [
        complete(http, seed=11, temperature=temperature, speculative=chosen)["choices"][0]["text"] for chosen in choices
    ]
    assert len(set(texts)) == 1 and len(texts[0]) > 50  # the end token has no text


def test_a_true_prediction_is_accepted_and_counted(http: httpx.Client) -> None:
    truth = complete(http, temperature=0, speculative={"off": True})["choices"][0]["text"]
    body = complete(http, temperature=0, prediction={"type": "content", "content": truth}, return_speculation=True)
    assert body["choices"][0]["text"] == truth
    details = body["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 40
    assert body["speculation"]["num_accepted_tokens"] == details["accepted_prediction_tokens"]
    drafted = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert drafted == body["speculation"]["num_draft_tokens"]


def test_token_sources_agree_with_the_counts(http: httpx.Client) -> None:
    body = complete(http, temperature=0, return_token_sources=True, return_speculation=True)
    pieces = body["choices"][0]["token_sources"]
    assert "".join(piece["text"] for piece in pieces) == body["choices"][0]["text"]
    sources = [piece["source"] for piece in pieces]
    assert set(sources) <= {"ngram", "recovered", "bonus", "target"}
    assert sources.count("ngram") == body["speculation"]["num_accepted_tokens"]
    assert len(sources) - sources.count("ngram") == body["speculation"]["num_steps"]


def test_the_page_shows_the_last_tree(http: httpx.Client) -> None:
    complete(http, temperature=0)
    figures = http.get("/api/live").json()
    assert figures["speculation"]["ngram"]["num_drafts"] > 0
    tree = figures["trees"][-1]
    assert tree["method"] == "ngram" and len(tree["nodes"]) == tree["num_nodes"]
    assert all(-1 <= node["parent"] < i for i, node in enumerate(tree["nodes"]))
    text = http.get("/metrics").text
    assert 'paceline:spec_decode_num_drafts_total{method="ngram",model_name="fake"}' in text
    assert 'paceline:spec_decode_time_saved_seconds{method="ngram",model_name="fake"}' in text


def test_unknown_methods_are_refused_with_the_known_ones(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", "speculative": {"method": "ngramm"}})
    assert answer.status_code == 400 and "ngram" in answer.json()["error"]["message"]


async def _one_client(client: httpx.AsyncClient, rng: random.Random, truths: dict[str, str]) -> str:
    """A random client: reads to the end, hangs up on the way, or sends something wrong."""
    prompt = rng.choice(list(truths))
    chosen = rng.choice([None, {"off": True}, {"method": "suffix"}, {"prediction": truths[prompt]}])
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 40, "speculative": chosen}
    kind = rng.choice(["read", "read", "hang up", "wrong"])
    if kind == "wrong":
        assert (await client.post("/v1/completions", json=body | {"max_tokens": 10**6})).status_code == 400
        return kind
    text = ""
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
            if kind == "hang up" and len(text) > 5:
                return kind
    assert text == truths[prompt]
    return kind


def test_many_requests_that_end_or_are_aborted_leave_no_state(toy: Running, http: httpx.Client) -> None:
    prompts = ["abc", "bcd", "fedcba", "aaaa", "hijk" * 10]
    truths = {
        prompt: complete(http, prompt=prompt, temperature=0, max_tokens=40, speculative={"off": True})["choices"][0][
            "text"
        ]
        for prompt in prompts
    }

    async def crowd() -> list[str]:
        rng = random.Random(0)
        limits = httpx.Limits(max_connections=24)
        async with httpx.AsyncClient(base_url=toy.url, trust_env=False, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(_one_client(client, rng, truths) for _ in range(60)))

    assert set(asyncio.run(crowd())) == {"read", "hang up", "wrong"}
    backend: Any = toy.backend
    wait_until(lambda: backend.load().num_running == 0 and backend.load().kv_usage == 0, timeout_s=5)
    backend.check_integrity()


def test_hanging_up_gives_the_kv_back(toy: Running) -> None:
    backend: Any = toy.backend
    observers = backend._llm.engine.core.observers
    observers.append(lambda step: time.sleep(0.01))  # so that it still runs when the client looks
    with toy.client() as client:
        body = {"prompt": "abc", "max_tokens": 250, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            next(answer.iter_lines())
            assert backend.load().num_running == 1 and backend.load().kv_usage > 0
    wait_until(lambda: backend.load().num_running == 0, timeout_s=2)
    wait_until(lambda: backend.load().kv_usage == 0, timeout_s=1)
    observers.pop()


def test_the_default_model_answers_as_it_does_offline(smollm2_float32: LoadedModel) -> None:
    options: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 512}
    llm = AsyncLLM(smollm2_float32, {"method": "ngram", "node_budget": 4}, **options)
    body = {"messages": [{"role": "user", "content": "Say: one two three, one two three."}], "temperature": 0}
    body |= {"max_tokens": 24, "return_token_sources": True}
    backend = OverAsyncLLM(llm, METHODS)
    with running(backend) as handle, handle.client() as client:  # type: ignore[arg-type]
        answers = [
            client.post("/v1/chat/completions", json=body | {"speculative": chosen}).json()["choices"][0]
            for chosen in (None, {"off": True}, {"method": "merge"})
        ]
        tokens = client.post("/tokenize", json={"messages": body["messages"]}).json()["tokens"]
        plain = client.post("/v1/completions", json={"prompt": tokens, "temperature": 0, "max_tokens": 24}).json()
    backend.shutdown()
    texts = {answer["message"]["content"] for answer in answers} | {plain["choices"][0]["text"]}
    assert len(texts) == 1 and texts.pop().strip()
    assert {piece["source"] for piece in answers[1]["token_sources"]} == {"target"}
