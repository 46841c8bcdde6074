"""A tree is chosen from a recording: chances as they are, the size that pays, and nothing where nothing pays."""

from dataclasses import replace
from typing import Any

import pytest

from paceline.bench.replay.tree_choice import RankCounts, choose_tree, halves
from paceline.core.tree import DraftTree
from paceline.errors import InvalidOptionError
from paceline.lab.pass_cost import PassCost
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.merge.credit import START_GUESSES
from tests.bench.made_up import recording

RECYCLING = {"method": "recycling", "recycling_top_k": 2}
CHEAP = PassCost.linear(0.1, 0.001)


def test_children_are_counted_by_rank_where_their_parent_was_right() -> None:
    #  5 - 7      the output goes 6, 9, 8: the second child, then its first, then nothing was offered
    #  6 - 9
    counts = RankCounts(max_depth=4)
    counts.count(DraftTree([5, 6, 7, 9], [-1, -1, 0, 1]), [6, 9, 8, 1, 1])
    counts.count(DraftTree([5], [-1]), [4])
    counts.count(DraftTree(), [4])
    assert dict(counts.reached) == {0: 2, 1: 1, 2: 1} and dict(counts.hits) == {(0, 1): 1, (1, 0): 1}
    assert counts.draft_share == pytest.approx(2 / 3)
    first, second, third = counts.chances()
    assert first == [0.0, pytest.approx(1 / 3)]
    assert second[0] > 0.5 > third[0] > 0.4  # one trial each: both stay near the average of the two


def test_nodes_at_the_greatest_depth_count_no_children() -> None:
    counts = RankCounts(max_depth=2)
    counts.count(DraftTree.chain([1, 2]), [1, 2, 3, 4])
    assert dict(counts.reached) == {0: 1, 1: 1}


def test_each_category_is_in_both_halves() -> None:
    recorded = [replace(one, category="ab"[i % 2]) for i, one in enumerate(recording(0.5, 4, 2))]
    learned, judged = halves(recorded)
    assert [one.category for one in learned] == [one.category for one in judged] == ["a", "b"]
    assert not {one.prompt_id for one in learned} & {one.prompt_id for one in judged}
    assert halves(recorded[:2]) == (recorded[:2], recorded[:2])


def test_the_chances_of_a_known_target_are_found_and_predict_the_replay() -> None:
    """0.7 and 0.3 by construction, at every depth; 400 trials or more: 4 standard deviations are 0.09."""
    tuned = choose_tree(recording(0.7, num_tokens=1500), RECYCLING, [2, 6, 12], max_depth=6)
    assert tuned.counts.reached[1] > 400
    chances = tuned.counts.chances()
    assert chances[0] == [pytest.approx(0.7, abs=0.1), pytest.approx(0.3, abs=0.1)]
    assert chances[1] == [pytest.approx(0.7, abs=0.1), pytest.approx(0.3, abs=0.1)]
    assert [len(choice.shape) for choice in tuned.choices] == [2, 6, 12]
    for choice in tuned.choices:
        assert choice.replayed.counts.mean_acceptance_length == pytest.approx(choice.shape.expected_tokens, rel=0.12)
        assert sum(choice.nodes_by_depth) == len(choice.shape)
    assert (tuned.num_learned, tuned.num_judged) == (2, 2)


def test_expensive_rows_give_a_smaller_tree() -> None:
    recorded = recording(0.7, num_tokens=400)
    cheap = choose_tree(recorded, RECYCLING, [2, 12], pass_cost=CHEAP)
    expensive = choose_tree(recorded, RECYCLING, [2, 12], pass_cost=PassCost.linear(0.1, 0.03))
    losing = choose_tree(recorded, RECYCLING, [2, 12], pass_cost=PassCost.linear(0.0, 0.1))
    assert cheap.best is not None and len(cheap.best.shape) == 12
    assert cheap.best.expected_speedup == pytest.approx(cheap.best.replayed.speedup, rel=0.12)
    assert expensive.best is not None and len(expensive.best.shape) < 12
    assert losing.best is None


def test_a_size_that_only_the_model_proposes_is_among_the_candidates() -> None:
    """Rows are free up to 6, then expensive: a tree of 5 nodes, a size that was not asked for."""
    cliff = PassCost.of({1: 0.1, 6: 0.1001, 7: 0.5, 8: 0.9})
    tuned = choose_tree(recording(0.7), RECYCLING, [2, 12], pass_cost=cliff)
    assert [len(choice.shape) for choice in tuned.choices] == [2, 5, 12]
    assert tuned.best is not None and len(tuned.best.shape) == 5


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_repetitive_text_gets_a_long_chain(method: str) -> None:
    tuned = choose_tree(recording(1.0), {"method": method}, [2, 8], pass_cost=CHEAP)
    assert tuned.best is not None
    assert tuned.best.config == {"method": method, "num_speculative_tokens": 8, "node_budget": 8}
    assert tuned.best.nodes_by_depth == [1] * 8 and tuned.without_start is None
    assert tuned.best.replayed.speedup > 3


def test_a_merged_tree_starts_with_its_members_record() -> None:
    config = {"method": "merge", "members": ["ngram", "recycling"]}
    tuned = choose_tree(recording(0.7), config, [8], max_depth=4, pass_cost=CHEAP)
    [choice] = [choice for choice in tuned.choices if len(choice.shape) == 8]
    rates = {member: [0.0, 0.0] for member in ("ngram", "recycling")}
    for member, rank, _, depth, hits, guesses in choice.config["credit"]:
        if (rank, depth) == (0, 1):
            rates[member][0] += hits
            rates[member][1] += guesses
    assert rates["recycling"][1] < START_GUESSES
    assert rates["recycling"][0] / rates["recycling"][1] == pytest.approx(0.7, abs=0.15)
    assert SpeculativeConfig.parse(choice.config) is not None and tuned.without_start is not None


def test_a_start_is_kept_only_where_it_is_faster() -> None:
    """With 2 nodes recycling makes the chain by itself; with 4, on a text this short, it forks until it knows."""
    same = choose_tree(recording(0.7), RECYCLING, [2]).best
    better = choose_tree(recording(1.0), RECYCLING, [4])
    assert same is not None and same.config == RECYCLING | {"num_speculative_tokens": 2, "node_budget": 2}
    assert better.best is not None and len(better.best.config["recycling_acceptance"]) == 8
    assert better.without_start is not None and better.without_start.speedup < better.best.replayed.speedup


@pytest.mark.parametrize(
    ("config", "sizes", "options", "says"),
    [
        ({"method": "eagle3"}, [8], {}, "not of 'eagle3': a replay runs without a model"),
        ({"method": "auto"}, [8], {}, "ngram, suffix, recycling, merge"),
        ({}, [8], {}, "not of None"),
        ({"method": "ngram"}, [], {}, "1 to 512 nodes"),
        ({"method": "ngram"}, [0], {}, "1 to 512 nodes"),
        ({"method": "ngram"}, [8], {"max_depth": 1000}, "depth of a tree is 1 to 128"),
        ({"method": "ngram", "prompt_lookup_min": 0}, [8], {}, "prompt_lookup_min"),
    ],
    ids=str,
)
def test_a_method_that_cannot_be_tuned_is_refused_with_a_reason(
    config: Any, sizes: list[int], options: Any, says: str
) -> None:
    with pytest.raises(InvalidOptionError, match=says):
        choose_tree(recording(0.5, 2, 8), config, sizes, **options)


@pytest.mark.parametrize("num_requests", [0, 2])
def test_a_recording_without_answers_is_refused(num_requests: int) -> None:
    with pytest.raises(InvalidOptionError, match="holds no answers"):
        choose_tree(recording(0.5, num_requests, 0), {"method": "ngram"}, [8])
