"""Every route over the fake engine, whose right answers are known."""

import json
from typing import Any

import httpx
import pytest

from paceline.serve.http.response_bodies import ChatCompletion, Completion
from tests.serve import fake
from tests.serve.conftest import Running

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT_PROMPT = list(b"<user>Hello\n<assistant>")


def chat(http: httpx.Client, **options: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 10, "seed": 1} | options)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def complete(http: httpx.Client, **options: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"prompt": "Hello", "seed": 1} | options)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_chat_answers_with_the_engines_text(http: httpx.Client) -> None:
    body = chat(http)
    ChatCompletion.model_validate(body, strict=True)
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": fake.expected_text(CHAT_PROMPT, 1, 0, 10),
        "refusal": None,
    }
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == len(CHAT_PROMPT)
    assert body["usage"]["completion_tokens"] == 10
    assert body["usage"]["total_tokens"] == len(CHAT_PROMPT) + 10


def test_completions_take_every_form_of_prompt(http: httpx.Client) -> None:
    one, two = list(b"one"), list(b"two")
    for prompt in ("one", one, ["one"], [one]):
        body = complete(http, prompt=prompt)
        Completion.model_validate(body, strict=True)
        assert [c["text"] for c in body["choices"]] == [fake.expected_text(one, 1, 0, 16)]
    body = complete(http, prompt=["one", "two"], n=2, max_tokens=5)
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in body["choices"]] == [
        fake.expected_text(prompt, 1, sample, 5) for prompt in (one, two) for sample in (0, 1)
    ]
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("speculative", [None, {"off": True}])
def test_streams_add_up_to_the_whole_answer(http: httpx.Client, n: int, speculative: Any) -> None:
    options = {"messages": MESSAGES, "seed": 3, "max_tokens": 20, "n": n, "speculative": speculative}
    texts, ends, roles = [""] * n, [None] * n, [0] * n
    for event in events(http, "/v1/chat/completions", options):
        for choice in event["choices"]:
            index = choice["index"]
            assert ends[index] is None, "nothing may follow a choice's end"
            texts[index] += choice["delta"]["content"]
            roles[index] += "role" in choice["delta"]
            ends[index] = choice["finish_reason"]
    assert texts == [fake.expected_text(CHAT_PROMPT, 3, i, 20) for i in range(n)]
    assert ends == ["length"] * n and roles == [1] * n


def test_streamed_completions_of_several_prompts(http: httpx.Client) -> None:
    texts = {0: "", 1: "", 2: ""}
    for event in events(http, "/v1/completions", {"prompt": ["a", "b", "c"], "seed": 3, "max_tokens": 9}):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [fake.expected_text([prompt], 3, 0, 9) for prompt in b"abc"]


def test_stream_usage_comes_last_and_only_when_asked(http: httpx.Client) -> None:
    options = {"messages": MESSAGES, "max_tokens": 4}
    assert all("usage" not in event for event in events(http, "/v1/chat/completions", options))
    options |= {"stream_options": {"include_usage": True}}
    *chunks, last = events(http, "/v1/chat/completions", options)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    assert all("usage" not in event for event in chunks)
    options |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    counts = [event["usage"]["completion_tokens"] for event in events(http, "/v1/chat/completions", options)]
    assert counts == sorted(counts) and counts[-1] == 4


def test_stop_string_ends_the_text(http: httpx.Client) -> None:
    text = fake.expected_text(CHAT_PROMPT, 1, 0, 40)
    body = chat(http, max_tokens=40, stop=[text[12:15]])
    assert body["choices"][0]["message"]["content"] == text[: text.find(text[12:15])]
    assert body["choices"][0]["finish_reason"] == "stop"


def test_chat_logprobs(http: httpx.Client) -> None:
    content = chat(http, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    text = fake.expected_text(CHAT_PROMPT, 1, 0, 10)
    assert "".join(entry["token"] for entry in content) == text
    assert all(entry["bytes"] == list(entry["token"].encode()) for entry in content)
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    streamed = [
        entry
        for event in events(
            http, "/v1/chat/completions", {"messages": MESSAGES, "seed": 1, "max_tokens": 10, "logprobs": True}
        )
        for choice in event["choices"]
        for entry in choice["logprobs"]["content"]
    ]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]


def test_completion_logprobs_and_echo(http: httpx.Client) -> None:
    text = fake.expected_text(list(b"Hello"), 1, 0, 4)
    choice = complete(http, max_tokens=4, logprobs=1)["choices"][0]
    assert choice["logprobs"]["tokens"] == list(text)
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    choice = complete(http, max_tokens=4, logprobs=1, echo=True)["choices"][0]
    assert choice["text"] == "Hello" + text
    assert choice["logprobs"]["tokens"] == list("Hello" + text)
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == list(range(9))
    streamed = events(
        http, "/v1/completions", {"prompt": "Hello", "seed": 1, "max_tokens": 4, "logprobs": 1, "echo": True}
    )
    assert "".join(e["choices"][0]["text"] for e in streamed) == "Hello" + text
    assert [o for e in streamed for o in e["choices"][0]["logprobs"]["text_offset"]] == list(range(9))


def test_prompt_logprobs(http: httpx.Client) -> None:
    entries = complete(http, prompt_logprobs=1)["prompt_logprobs"]
    assert entries[0] is None and len(entries) == 5
    assert entries[1][str(ord("e"))] == {"logprob": -1.0, "rank": 1, "decoded_token": "e"}


def test_speculation_is_the_clients_choice(server: Running, http: httpx.Client) -> None:
    chosen = {"method": "ngram", "num_speculative_tokens": 8}
    spec = chat(http, speculative=chosen, return_speculation=True)["speculation"]
    assert server.backend.params[-1].speculative == chosen
    assert spec["mean_acceptance_length"] > 1.5
    assert sum(spec["acceptance_histogram"]) == spec["num_steps"]
    assert sum(k * count for k, count in enumerate(spec["acceptance_histogram"])) == spec["num_accepted_tokens"]
    plain = chat(http, speculative={"off": True}, return_speculation=True)["speculation"]
    assert plain["mean_acceptance_length"] == 1.0 and plain["num_drafts"] == 0
    assert "speculation" not in chat(http)
    *_, last = events(http, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "return_speculation": True})
    assert last["speculation"]["num_steps"] == 2


def test_prediction_becomes_a_draft_and_is_counted(server: Running, http: httpx.Client) -> None:
    body = chat(http, max_tokens=12, prediction={"type": "content", "content": [{"type": "text", "text": "expected"}]})
    assert server.backend.params[-1].speculative == {"prediction": list(b"expected")}
    details = body["usage"]["completion_tokens_details"]
    # four steps, each verifying a chain of three of which two hold
    assert details == {"accepted_prediction_tokens": 8, "rejected_prediction_tokens": 4}
    details = chat(http)["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def test_token_sources_name_the_drafter_of_every_token(http: httpx.Client) -> None:
    text = fake.expected_text(CHAT_PROMPT, 1, 0, 10)
    pieces = chat(http, return_token_sources=True)["choices"][0]["token_sources"]
    assert "".join(piece["text"] for piece in pieces) == text
    assert [piece["source"] for piece in pieces] == ["ngram", "ngram", "recovered"] * 3 + ["recovered"]
    streamed = [
        piece
        for event in events(
            http,
            "/v1/chat/completions",
            {"messages": MESSAGES, "seed": 1, "max_tokens": 10, "return_token_sources": True},
        )
        for piece in event["choices"][0]["token_sources"]
    ]
    assert streamed == pieces
    plain = chat(http, return_token_sources=True, speculative={"off": True})["choices"][0]["token_sources"]
    assert {piece["source"] for piece in plain} == {"target"}


def test_models_tokens_and_operations(http: httpx.Client) -> None:
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["fake", "other-name"]
    assert http.get("/v1/models/fake").json()["max_model_len"] == 4096
    assert chat(http, model="other-name")["model"] == "other-name"
    assert http.post("/tokenize", json={"prompt": "Hi"}).json()["tokens"] == [72, 105]
    assert http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"] == CHAT_PROMPT
    assert http.post("/detokenize", json={"tokens": [72, 105]}).json() == {"prompt": "Hi"}
    for path in ("/health", "/ready", "/version", "/openapi.json", "/docs", "/"):
        assert http.get(path).status_code == 200


def test_every_sampling_option_reaches_the_engine(server: Running, http: httpx.Client) -> None:
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "repetition_penalty": 1.1, "bad_words": ["x"], "allowed_token_ids": [1, 2], "seed": 5, "min_tokens": 2,
        "stop_token_ids": [9], "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False,
    }  # fmt: skip
    chat(http, **options, logit_bias={"65": 3.0}, stop="zzz")
    params = server.backend.params[-1]
    found = {name: getattr(params, name) for name in options}
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()} == options
    assert params.logit_bias == {65: 3.0} and params.stop_strings == ("zzz",) and params.max_tokens == 10


def test_chat_answers_up_to_the_context_by_default(server: Running, http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json={"messages": MESSAGES}).raise_for_status()
    assert server.backend.params[-1].max_tokens == 4096 - len(CHAT_PROMPT)
