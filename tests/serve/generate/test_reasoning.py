"""What a model thinks is a field of its own, whole and streamed, wherever the text is cut."""

import itertools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.outputs import RequestOutput
from paceline.core.sampling_params import SamplingParams
from paceline.serve.generate.reasoning import ReasoningSplitter
from tests.serve import fake
from tests.serve.conftest import running

CASES = [
    # (text, begins inside, thoughts, answer)
    ("<think>Hm.</think>Yes", False, "Hm.", "Yes"),
    ("\n<think>a < b</think>\n\nYes </think>", False, "a < b", "\n\nYes </think>"),
    ("Hm.</think>Yes", True, "Hm.", "Yes"),
    ("<think>Hm.</think>Yes", True, "Hm.", "Yes"),
    ("Yes <think>", False, "", "Yes <think>"),
    ("<think>never ends </thin", False, "never ends </thin", ""),
    ("<thi", False, "", "<thi"),
    ("", True, "", ""),
]


@given(st.sampled_from(CASES), st.lists(st.integers(0, 40), max_size=6))
def test_thoughts_and_answer_are_the_same_however_the_text_is_cut(
    case: tuple[str, bool, str, str], cuts: list[int]
) -> None:
    text, inside, thoughts, answer = case
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    splitter = ReasoningSplitter(inside)
    parts = [splitter.feed(piece, last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    assert ("".join(a for a, _ in parts), "".join(b for _, b in parts)) == (thoughts, answer)


class Thinking(fake.FakeBackend):
    """Says what it is told to, in two pieces."""

    said = ("Let me see</th", "ink>Paris")

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str, cache_salt: str
    ) -> AsyncIterator[RequestOutput]:
        async for output in super().generate(token_ids, replace(params, max_tokens=6), request_id, cache_salt):
            output.outputs[0].text = self.said[output.finished]
            yield output


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
def test_a_message_has_both_and_chunks_have_what_is_new(parser: str) -> None:
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "Capital?"}]}
    with running(Thinking(), reasoning_parser=parser) as handle, handle.client() as http:
        message = post(http, ask)["choices"][0]["message"]
        hidden = post(http, ask | {"include_reasoning": False})["choices"][0]["message"]
        lines = http.post("/v1/chat/completions", json=ask | {"stream": True}).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    text = {name: "".join(delta.get(name, "") for delta in deltas) for name in ("reasoning", "content")}
    if parser == "deepseek_r1":
        assert (message["reasoning"], message["content"]) == ("Let me see", "Paris")
        assert text == {"reasoning": "Let me see", "content": "Paris"}
        assert (hidden["reasoning"], hidden["content"]) == (None, "Paris")
        assert "content" not in deltas[0] and deltas[0]["role"] == "assistant"
    else:  # neither the prompt nor the text opens a block
        assert (message["reasoning"], message["content"]) == (None, "Let me see</think>Paris")
        assert text == {"reasoning": "", "content": "Let me see</think>Paris"}


def test_a_prompt_that_opens_the_block_is_seen() -> None:
    ask = {"messages": [{"role": "assistant", "content": "<think>\n"}], "add_generation_prompt": False}
    with running(Thinking(), reasoning_parser="qwen3") as handle, handle.client() as http:
        message = post(http, ask)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Let me see", "Paris")


def test_without_a_parser_the_message_is_as_ever() -> None:
    with running(Thinking()) as handle, handle.client() as http:
        message = post(http, {"messages": [{"role": "user", "content": "Capital?"}]})["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Let me see</think>Paris", "refusal": None}


def post(http: httpx.Client, body: dict[str, Any]) -> Any:
    return http.post("/v1/chat/completions", json=body).raise_for_status().json()
