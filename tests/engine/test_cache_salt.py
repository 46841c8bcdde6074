"""Requests with different salts learn nothing of each other: neither from cached prefixes nor from past outputs."""

from dataclasses import replace

import pytest

from paceline.core.request import Request
from paceline.engine.core import EngineCore
from paceline.engine.processor import Processor
from paceline.errors import InvalidRequestError
from paceline.spec.lookup.by_salt import MAX_SALTS, BySalt
from paceline.spec.methods import PROPOSERS
from tests.toy import toy_core, toy_request

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3]
REMEMBERING = ("suffix", "recycling")  # drafters that learn from one request for the next


def finish(core: EngineCore, request: Request) -> Request:
    core.add_request(request)
    while core.has_requests:
        core.step()
        core.check_integrity()
    return request


def salted(name: str, salt: str, **params: object) -> Request:
    request = toy_request(name, PROMPT, seed=1, temperature=0.0, max_tokens=12, ignore_eos=True, **params)
    return replace(request, cache_salt=salt)


def test_a_prefix_is_found_by_the_same_salt_only() -> None:
    core = toy_core()
    first = finish(core, salted("a", "alice"))
    assert first.num_cached_tokens == 0
    assert finish(core, salted("b", "bob")).num_cached_tokens == 0
    assert finish(core, salted("c", "")).num_cached_tokens == 0
    again = finish(core, salted("d", "alice"))
    assert again.num_cached_tokens > 0
    assert again.output_token_ids == first.output_token_ids


def first_drafts(core: EngineCore, request: Request) -> set[tuple[int, ...]]:
    """The paths drafted right after the prompt was read. Their confidence may be learned from all requests."""
    core.add_request(request)
    core.step()
    draft = request.draft
    while core.has_requests:
        core.step()
    return {tuple(draft.token_ids[i] for i in draft.ancestors(node)) for node in range(len(draft))}


@pytest.mark.parametrize("method", REMEMBERING)
def test_past_outputs_are_drafts_for_the_same_salt_only(method: str) -> None:
    def second_draft(first_salt: str, second_salt: str) -> set[tuple[int, ...]]:
        core = toy_core({"method": method})
        finish(core, salted("first", first_salt))
        return first_drafts(core, salted("second", second_salt))

    alone = first_drafts(toy_core({"method": method}), salted("second", "bob"))
    assert second_draft("alice", "bob") == alone
    assert second_draft("", "bob") == alone and second_draft("alice", "") == alone
    assert second_draft("bob", "bob") != alone  # what is kept apart is really used


def test_no_other_drafter_learns_from_one_request_for_the_next() -> None:
    """A drafter that remembers texts must keep them by salt and be listed above."""
    own_text = ("none", "ngram", "prediction", "lookahead")
    for method in own_text:
        core = toy_core({"method": method})
        alone = first_drafts(toy_core({"method": method}), salted("second", ""))
        finish(core, salted("first", ""))
        assert first_drafts(core, salted("second", "")) == alone, method
    assert set(own_text) | set(REMEMBERING) <= set(PROPOSERS)


def test_memory_of_salts_is_bounded_and_drops_the_least_recently_used() -> None:
    memories = BySalt(list[str])
    memories["kept"].append("x")
    for i in range(2 * MAX_SALTS):
        memories[f"salt {i}"].append("y")
        assert memories["kept"] == ["x"]
    assert len(memories) == MAX_SALTS and memories["salt 0"] == []


def test_a_prompt_carries_its_salt_under_vllms_name() -> None:
    class Letters:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [ord(letter) for letter in text]

        def decode(self, token_ids: object, skip_special_tokens: bool = True) -> str:
            return ""

    processor = Processor(Letters(), 256, (), 64, lambda params: None)
    params = toy_request("x", [1]).sampling_params
    for prompt in ({"prompt": "ab"}, {"prompt_token_ids": [97, 98]}):
        assert processor.job("1", prompt, params).requests[0].cache_salt == ""
        job = processor.job("2", {**prompt, "cache_salt": "mine"}, params)
        assert job.requests[0].cache_salt == "mine" and job.prompt_token_ids == [97, 98]
    for salt in ("", 7, ["x"]):
        with pytest.raises(InvalidRequestError, match="cache_salt"):
            processor.job("3", {"prompt": "ab", "cache_salt": salt}, params)
