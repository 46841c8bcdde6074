"""ngram, suffix and the oracle: what they draft, from where, and that it pays on repetitive text only."""

import random

import pytest

from paceline.core.tree import DraftTree
from paceline.spec.lookup.ngram_index import NgramIndex, copy_from
from paceline.spec.lookup.past_outputs import PastOutputs
from paceline.spec.proposer import StepContext
from tests.spec.replaying import accept, draft, replay, request, speculator, tokens_per_step

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def test_the_longest_match_wins_over_a_newer_one() -> None:
    #          1 2 3 -> 9       3 -> 8 is newer, but matches one token only
    tokens = [1, 2, 3, 9, 9, 9, 5, 3, 8, 8, 8, 1, 2, 3]
    assert draft(NGRAM, tokens).token_ids == [9, 9, 9]


def test_among_equal_matches_the_newest_wins() -> None:
    tokens = [1, 2, 7, 7, 7, 0, 1, 2, 8, 8, 8, 0, 1, 2]
    assert draft(NGRAM, tokens).token_ids == [8, 8, 8]


def test_shorter_than_the_minimum_is_no_match() -> None:
    tokens = [3, 9, 9, 1, 3]
    assert draft(NGRAM, tokens).token_ids == [9, 9, 1]
    assert not draft({**NGRAM, "prompt_lookup_min": 2}, tokens)


def test_a_loop_is_followed_past_the_end_of_the_text() -> None:
    assert draft({**NGRAM, "num_speculative_tokens": 7}, [4, 5, 4, 5, 4]).token_ids == [5, 4, 5, 4, 5, 4, 5]
    assert copy_from([1, 2, 3], 1, 5) == [2, 3, 2, 3, 2]


def test_further_matches_become_branches_of_one_trie() -> None:
    tokens = [1, 2, 7, 6, 5, 0, 1, 2, 7, 8, 9, 0, 1, 2]
    tree = draft({**NGRAM, "node_budget": 8}, tokens)
    paths = {tuple(tree.token_ids[i] for i in tree.ancestors(node)) for node in range(len(tree))}
    assert {(7, 8, 9), (7, 6, 5)} <= paths
    assert sum(token == 7 and parent == -1 for token, parent in zip(tree.token_ids, tree.parents, strict=True)) == 1


def test_a_chain_stays_a_chain_near_the_end_of_the_request() -> None:
    tokens = [1, 2, 7, 6, 5, 0, 1, 2, 8, 9, 3, 0, 1, 2]
    job = request(tokens, max_tokens=3)  # room for two more draft tokens
    [tree] = speculator({"method": "ngram", "num_speculative_tokens": 4}).propose(StepContext([job]))
    assert tree.is_chain and tree.token_ids == [8, 9]


def test_an_index_finds_what_a_search_finds() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(4) for _ in range(300)]
    index = NgramIndex([1, 2, 3, 5])
    for end in range(1, len(tokens) + 1):  # one token at a time, as a request grows
        index.extend(tokens[:end], end - 1)
    found = list(index.matches(tokens))
    for n, start in found:
        assert tokens[start - n : start] == tokens[-n:]
    every = {s for s in range(1, len(tokens)) if tokens[s - 1] == tokens[-1]}
    assert {start for _, start in found} == every
    assert [n for n, _ in found] == sorted((n for n, _ in found), reverse=True)


def test_suffix_follows_the_majority_and_keeps_the_minority_as_a_branch() -> None:
    tokens = [1, 2, 5, 90, 1, 2, 5, 91, 1, 2, 6, 92, 1, 2, 5, 93, 1, 2]
    tree = draft({"method": "suffix", "node_budget": 8}, tokens)
    tops = [token for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == -1]
    assert tops[0] == 5 and 6 in tops


def test_suffix_drafts_further_the_longer_the_match() -> None:
    rng = random.Random(2)
    phrase = [rng.randrange(1000, 2000) for _ in range(40)]
    config = {"method": "suffix", "suffix_decoding_max_spec_factor": 1.0, "suffix_decoding_min_token_prob": 0.0}
    short = draft(config, [*phrase, 1, 2, phrase[9]])
    long = draft(config, [*phrase, 1, 2, *phrase[:10]])
    assert len(short) == 1 and len(long) >= 8


def test_suffix_remembers_past_outputs() -> None:
    rng = random.Random(3)
    answer = [rng.randrange(50_000) for _ in range(60)]
    spec = speculator({"method": "suffix"})
    first = replay(spec, [1, 2, 3], answer, "first")
    second = replay(spec, [1, 2, 3], answer, "second")
    assert tokens_per_step(first) < 1.2 and tokens_per_step(second) > 6.0
    forgetful = speculator({"method": "suffix", "suffix_decoding_max_cached_requests": 0})
    replay(forgetful, [1, 2, 3], answer, "first")
    assert tokens_per_step(replay(forgetful, [1, 2, 3], answer, "second")) < 1.2


def test_past_outputs_stay_inside_their_bound_and_go_oldest_first() -> None:
    past = PastOutputs(lambda: NgramIndex([1, 2]), max_tokens=400, max_outputs=10**9)
    for i in range(100):
        past.add([10_000 + i] * 30)
        assert past.num_tokens <= 400
    assert past.num_tokens > 200, "the bound is there to be used"
    kept = {token for chunk in past.chunks for token in chunk.text if token >= 0}
    assert 10_099 in kept and 10_000 not in kept
    past.add(list(range(5000)))  # longer than everything: its end is kept
    assert past.num_tokens <= 400 and past.chunks[-1].text[-2] == 4999


def test_past_outputs_are_bounded_by_their_number_too() -> None:
    past = PastOutputs(lambda: NgramIndex([1]), max_tokens=10**6, max_outputs=8)
    for i in range(50):
        past.add([i])
        assert past.num_outputs <= 8
    nothing = PastOutputs(lambda: NgramIndex([1]), max_tokens=0, max_outputs=8)
    nothing.add([1, 2, 3])
    assert nothing.num_tokens == 0


def test_no_match_runs_from_one_past_output_into_the_next() -> None:
    spec = speculator({"method": "suffix"})
    replay(spec, [1], [700, 701, 702], "first")
    replay(spec, [1], [800, 801, 802], "second")
    [tree] = spec.propose(StepContext([request([5, 701, 702])]))
    assert not tree, "702 was the last token there was"


@pytest.mark.parametrize("shape", ["chain", (2, 2, 1), "random"])
def test_the_oracle_is_right_as_often_as_it_says(shape: str | tuple[int, ...]) -> None:
    """4,000 first positions at accuracy 0.7: off by more than 4 standard deviations once in 16,000 runs."""
    rng = random.Random(4)
    truth = [rng.randrange(50_000) for _ in range(4_004)]
    config = {"method": "oracle", "sequences": [truth], "accuracy": 0.7, "shape": shape, "num_speculative_tokens": 3}
    spec, job = speculator(config), request(truth[:1])
    hits = drafts = 0
    for position in range(1, 4_001):
        job.token_ids = truth[:position]
        [tree] = spec.propose(StepContext([job]))
        if tree:
            drafts += 1
            hits += bool(accept(tree, truth[position:])[0])
    assert drafts > 2_000
    assert abs(hits / drafts - 0.7) < 4 * (0.7 * 0.3 / drafts) ** 0.5


def test_the_oracle_knows_nothing_of_other_requests() -> None:
    config = {"method": "oracle", "sequences": [[1, 2, 3, 4]]}
    assert draft(config, [1, 2]).token_ids[:2] == [3, 4]
    assert not draft(config, [1, 9])


@pytest.mark.parametrize(
    ("method", "repetitive_at_least", "random_at_most"),
    [("ngram", 3.0, 1.05), ("suffix", 6.0, 1.05), ("merge", 6.0, 1.05)],
)
def test_repetitive_text_pays_and_random_text_does_not(
    method: str, repetitive_at_least: float, random_at_most: float
) -> None:
    rng = random.Random(5)
    phrase = [rng.randrange(50_000) for _ in range(25)]
    noise = [rng.randrange(50_000) for _ in range(400)]
    config = {"method": "merge", "members": ["ngram", "suffix"]} if method == "merge" else {"method": method}
    assert tokens_per_step(replay(speculator(config), phrase, phrase * 12)) > repetitive_at_least
    assert tokens_per_step(replay(speculator(config), phrase, noise)) < random_at_most


def test_nothing_is_drafted_for_a_request_without_room() -> None:
    job = request([1, 2, 1, 2, 1], max_tokens=1)
    assert speculator(NGRAM).propose(StepContext([job])) == [DraftTree()]
