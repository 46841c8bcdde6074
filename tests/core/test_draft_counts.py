"""One type for draft counts: a pass is counted once, and totals are sums of passes."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.draft_counts import DraftCounts
from paceline.core.outputs import RequestMetrics
from paceline.core.tree import EMPTY_TREE, DraftTree

MEMBERS = ("ngram", "suffix", "eagle")


@st.composite
def passes(draw: st.DrawFn) -> tuple[DraftTree, list[int], int]:
    """A verified tree, its accepted path, and how many tokens joined the output: fewer where a stop cut them short."""
    size = draw(st.integers(0, 8))
    names = st.lists(st.sampled_from(MEMBERS), min_size=1, unique=True).map(tuple)
    parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    tree = DraftTree([1] * size, parents, members=[draw(names) for _ in range(size)])
    accepted = tree.ancestors(draw(st.integers(-1, size - 1)))
    return tree, accepted, draw(st.integers(1, len(accepted) + 1))


def counted(parts: Sequence[tuple[DraftTree, list[int], int]]) -> DraftCounts:
    counts = DraftCounts()
    for part in parts:
        counts.count(*part)
    return counts


def test_a_pass_counts_its_nodes_for_every_member_that_drafted_them() -> None:
    tree = DraftTree([1, 2, 3], [-1, 0, 0], members=[("ngram", "suffix"), ("ngram",), ("suffix",)])
    counts = counted([(tree, [0, 2], 3), (tree, [], 1)])
    assert (counts.num_steps, counts.num_drafts, counts.num_emitted_tokens) == (2, 2, 4)
    assert (counts.num_draft_tokens, counts.num_accepted_tokens, counts.num_wasted_tokens) == (6, 2, 4)
    assert counts.accepted_per_position == [1, 1]
    assert counts.draft_acceptance_rate == pytest.approx(1 / 3) and counts.mean_acceptance_length == 2.0
    assert counts.by_member == {
        "ngram": DraftCounts(4, 1, [1], num_drafts=2),
        "suffix": DraftCounts(4, 2, [1, 1], num_drafts=2),
    }


def test_a_member_may_have_only_the_deeper_of_the_accepted_nodes() -> None:
    tree = DraftTree([1, 2], [-1, 0], members=[("ngram",), ("suffix",)])
    assert counted([(tree, [0, 1], 3)]).by_member["suffix"] == DraftCounts(1, 1, [0, 1], num_drafts=1)


def test_a_step_without_a_draft_counts_as_a_step() -> None:
    assert counted([(EMPTY_TREE, [], 1)]) == DraftCounts(num_steps=1, num_emitted_tokens=1)


def test_nodes_past_a_stop_are_not_accepted() -> None:
    counts = counted([(DraftTree.chain([1, 2, 3]).by("ngram"), [0, 1, 2], 2)])
    assert (counts.num_accepted_tokens, counts.num_wasted_tokens, counts.accepted_per_position) == (2, 1, [1, 1])
    assert counts.by_member["ngram"].num_accepted_tokens == 2


def test_nothing_counted_has_no_rates() -> None:
    assert DraftCounts().draft_acceptance_rate == DraftCounts().mean_acceptance_length == 0.0


@given(st.lists(passes(), max_size=6))
def test_counts_of_passes_agree_with_their_nodes_one_by_one(parts: list[tuple[DraftTree, list[int], int]]) -> None:
    counts = counted(parts)
    assert counts.num_draft_tokens == sum(len(tree) for tree, _, _ in parts)
    assert counts.num_accepted_tokens == sum(counts.accepted_per_position)
    for name in MEMBERS:
        drafted = sum(name in names for tree, _, _ in parts for names in tree.members or ())
        joined = [
            position
            for tree, accepted, num_tokens in parts
            for position, node in enumerate(accepted[:num_tokens])
            if name in (tree.members or ())[node]
        ]
        member = counts.by_member.get(name, DraftCounts())
        assert (member.num_draft_tokens, member.num_accepted_tokens) == (drafted, len(joined))
        positions = range(len(member.accepted_per_position))
        assert member.accepted_per_position == [joined.count(position) for position in positions]


@given(st.lists(passes(), max_size=6), st.integers(0, 6))
def test_totals_are_sums_of_passes_and_readings_can_be_subtracted(
    parts: list[tuple[DraftTree, list[int], int]], split: int
) -> None:
    earlier, later = counted(parts[:split]), counted(parts[split:])
    both = DraftCounts.total([earlier, later])
    assert both == counted(parts) == DraftCounts.total(counted([part]) for part in parts)
    before = DraftCounts.total([earlier])
    between = both.since(earlier)
    assert DraftCounts.total([between, earlier]) == both and between.to_dict()["num_draft_tokens"] == sum(
        len(tree) for tree, _, _ in parts[split:]
    )
    assert earlier == before and both == counted(parts), "neither reading is changed"


def test_a_total_is_a_copy() -> None:
    counts = counted([(DraftTree.chain([1]).by("ngram"), [0], 2)])
    total = DraftCounts.total([counts])
    total.add(counts)
    assert counts == counted([(DraftTree.chain([1]).by("ngram"), [0], 2)]) != total


def test_a_requests_figures_have_their_names_in_python_and_in_json() -> None:
    counts = counted([(DraftTree.chain([1, 2]).by("ngram"), [0], 2)])
    metrics = RequestMetrics(7, 3, counts, queue_s=0.1, ttft_s=0.2, tpot_s=None, e2e_s=0.4, draft_s=0.01)
    member = {
        "num_draft_tokens": 2,
        "num_accepted_tokens": 1,
        "num_wasted_tokens": 1,
        "draft_acceptance_rate": 0.5,
        "accepted_per_position": [1],
    }
    expected = {
        "num_prompt_tokens": 7,
        "num_cached_tokens": 3,
        "num_output_tokens": 2,
        "num_steps": 1,
        "num_drafts": 1,
        "num_draft_tokens": 2,
        "num_accepted_tokens": 1,
        "accepted_per_position": [1],
        "queue_s": 0.1,
        "ttft_s": 0.2,
        "tpot_s": None,
        "e2e_s": 0.4,
        "lossy": False,
        "by_member": {"ngram": member},
        "draft_s": 0.01,
        "num_wasted_tokens": 1,
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.5,
    }
    assert json.dumps(metrics.to_dict()) == json.dumps(expected), "the order of the keys is part of the output"
    assert json.loads(json.dumps(metrics.to_dict())) == metrics.to_dict()
    assert metrics.by_member == {"ngram": DraftCounts(2, 1, [1], num_drafts=1)}
    for name in expected.keys() - {"by_member"}:
        assert getattr(metrics, name) == expected[name]
