"""The official client against the server: what its users do, and the exceptions they catch."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.serve import fake
from tests.serve.conftest import Running, running

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
PROMPT = list(b"<user>Hello\n<assistant>")


def connect(handle: Running, api_key: str = "none") -> openai.OpenAI:
    client = httpx.Client(trust_env=False)
    return openai.OpenAI(base_url=f"{handle.url}/v1", api_key=api_key, max_retries=0, timeout=20, http_client=client)


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with connect(server) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=8, seed=4)
    assert answer.choices[0].message.content == fake.expected_text(PROMPT, 4, 0, 8)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 8
    assert answer._request_id is not None and answer._request_id in answer.id


def test_a_conversation_goes_on_with_the_answers_own_message(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=8).choices[0].message
    again = client.chat.completions.create(model="fake", messages=[*MESSAGES, first, *MESSAGES], max_tokens=8)  # type: ignore[list-item]
    assert again.choices[0].message.content


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=30, seed=4, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, usage = ["", ""], None
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    assert texts == [fake.expected_text(PROMPT, 4, i, 30) for i in range(2)]
    assert usage is not None and usage.completion_tokens == 60


def test_the_stream_helper(client: openai.OpenAI) -> None:
    text = fake.expected_text(PROMPT, 4, 0, 40)
    stop = text[20:23]
    with client.chat.completions.stream(model="fake", messages=MESSAGES, max_tokens=40, seed=4, stop=[stop]) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == text[: text.find(stop)]


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["a", "b"], max_tokens=5, seed=2, n=2)
    assert [c.text for c in answer.choices] == [
        fake.expected_text([prompt], 2, sample, 5) for prompt in b"ab" for sample in (0, 1)
    ]
    pieces = [c.choices[0].text for c in client.completions.create(model="fake", prompt="a", seed=2, stream=True)]
    assert "".join(pieces) == fake.expected_text(list(b"a"), 2, 0, 16)


def test_logprobs(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2)
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2, 2]
    text = client.completions.create(model="fake", prompt="a", max_tokens=3, logprobs=2).choices[0].logprobs
    assert text is not None and text.token_logprobs == [-0.5] * 3


def test_stop(client: openai.OpenAI) -> None:
    text = fake.expected_text(PROMPT, 4, 0, 40)
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=40, seed=4, stop=[text[20:23]])
    assert answer.choices[0].message.content == text[: text.find(text[20:23])]
    assert answer.choices[0].finish_reason == "stop"


def test_same_seed_same_text_with_speculation_on_and_off(client: openai.OpenAI) -> None:
    texts = {
        client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=20, seed=9, temperature=1, extra_body={"speculative": spec}
        )
        .choices[0]
        .message.content
        for spec in ({"method": "ngram"}, {"off": True})
    }
    assert texts == {fake.expected_text(PROMPT, 9, 0, 20)}


def test_prediction(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=6, prediction={"type": "content", "content": "expected"}
    )
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 4
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 2


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "other-name"]
    assert client.models.retrieve("fake").owned_by == "paceline"


def test_functions_are_refused_clearly(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="use tools") as caught:
        client.chat.completions.create(model="fake", messages=MESSAGES, functions=[{"name": "f"}])
    assert caught.value.param == "functions" and caught.value.code == "unsupported_parameter"


def test_errors_are_the_clients_exceptions(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="temperature"):
        create(model="fake", messages=MESSAGES, temperature=-3)
    with pytest.raises(openai.NotFoundError, match="gpt"):
        create(model="gpt", messages=MESSAGES)
    with pytest.raises(openai.InternalServerError):
        create(model="fake", messages=[{"role": "user", "content": "CRASH"}], max_tokens=20)
    with pytest.raises(openai.APIError, match="not finite"):
        list(create(model="fake", messages=[{"role": "user", "content": "FAIL"}], max_tokens=20, stream=True))


def test_keys_and_a_full_queue_are_the_clients_exceptions() -> None:
    with running(
        fake.FakeBackend(step_s=1.0, max_num_seqs=1), api_keys=("k",), max_queue_len=0, drain_timeout_s=0
    ) as handle:
        with connect(handle, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with connect(handle, "k") as client:
            stream = client.completions.with_raw_response
            with pytest.raises(openai.APITimeoutError):
                stream.create(model="fake", prompt="x", max_tokens=100, timeout=0.2)
            handle.server._service.gate.num_sequences += 1  # as if one were running
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="fake", prompt="x")
            handle.server._service.gate.num_sequences -= 1
