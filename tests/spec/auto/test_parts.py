"""The parts by themselves: paths that pay, chances that are learned, prices that are measured, gains, the bucket."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.tree import DraftTree
from paceline.lab.live_acceptance import BUCKETS, Acceptance
from paceline.lab.live_call_cost import CallCostModel
from paceline.lab.live_pass_cost import PassCostModel
from paceline.spec.auto.constants import LASTING, SHARE, START
from paceline.spec.auto.cost import Market
from paceline.spec.auto.explore import Bucket, Gain
from paceline.spec.merge.pool import PRICES, gains, join, rate

TABLE = Acceptance().chances


def _trees() -> st.SearchStrategy[list[DraftTree]]:
    @st.composite
    def tree(draw: st.DrawFn) -> DraftTree:
        size = draw(st.integers(1, 4))
        parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
        confidence = [draw(st.floats(0.05, 0.99)) for _ in range(size)]
        return DraftTree(list(range(size)), parents, confidence=confidence)

    return st.lists(tree(), min_size=1, max_size=3)


def _market(num_requests: int, slope: float = 0.1) -> Market:
    market = Market(PassCostModel({1: 0.010, 2: 0.010 * (1.0 + slope)}))
    market.quote(num_requests)
    return market


@settings(max_examples=60, deadline=None)
@given(_trees(), st.floats(0.0, 0.5))
def test_no_other_choice_of_paths_has_a_larger_surplus(trees: list[DraftTree], slope: float) -> None:
    market = _market(len(trees), slope)
    drafts = [rate("a", tree, TABLE) for tree in trees]
    bar = market.bar([chance for draft in drafts for chance in draft.chances])
    kept = [[node for node, chance in enumerate(draft.chances) if chance >= bar] for draft in drafts]
    for tree, nodes, draft in zip(trees, kept, drafts, strict=True):
        assert all(tree.parents[node] in (-1, *nodes) for node in nodes)
        assert len(draft.offer(bar, 100)) == len(nodes)

    def surplus(chosen: Sequence[tuple[int, int]]) -> float:
        rows = len(trees) + len(chosen)
        seconds = market.passes.at(rows, len(trees)) - market.passes.at(len(trees), len(trees))
        return sum(drafts[i].chances[node] for i, node in chosen) - market.tokens_per_s * seconds

    nodes = [(i, node) for i, tree in enumerate(trees) for node in range(len(tree))]
    best = max(surplus(chosen) for size in range(len(nodes) + 1) for chosen in itertools.combinations(nodes, size))
    # Paths of equal chance are bought together, or not at all.
    equal = len(nodes) - len({chance for draft in drafts for chance in draft.chances})
    assert surplus([(i, node) for i, one in enumerate(kept) for node in one]) >= best - 0.5 * equal - 1e-9


def test_a_budget_keeps_the_likeliest_paths_and_they_are_a_tree() -> None:
    draft = rate("a", DraftTree([1, 2, 3, 4], [-1, -1, 0, 2], confidence=[0.9, 0.2, 0.9, 0.9]), TABLE)
    assert draft.offer(0.0, 3).token_ids == [1, 3, 4]


def test_chances_are_learned_from_every_path_and_a_likelier_one_never_has_less() -> None:
    acceptance, rng = Acceptance(), random.Random(0)
    tree = DraftTree([1, 2], [-1, 0], confidence=[0.9, 0.5])
    for _ in range(1500):
        draft = rate("a", tree, acceptance.chances)
        first, second = rng.random() < 0.6, rng.random() < 0.5
        acceptance.learn(
            tree.token_ids, tree.parents, draft.buckets, [1 if first else 7, 2 if second else 7, 8] if first else [7]
        )
    assert acceptance.chances[draft.buckets[0]] == pytest.approx(0.6, abs=0.12)
    assert acceptance.chances[draft.buckets[1]] == pytest.approx(0.3, abs=0.1)
    assert acceptance.chances == sorted(acceptance.chances)
    assert draft.buckets[1] <= acceptance.least_said(0.25) ** 0.5 * BUCKETS + 2


def test_a_path_whose_outcome_nobody_saw_is_no_outcome() -> None:
    acceptance = Acceptance()
    tree = DraftTree.chain([1, 2, 3])
    for _ in range(50):
        acceptance.learn(
            tree.token_ids, tree.parents, [30, 29, 28], [1]
        )  # only the first token is known, and was right
    acceptance.refresh()
    assert acceptance.num_known == pytest.approx(50)


def test_a_passage_that_goes_otherwise_is_noticed_before_the_table_has_changed() -> None:
    acceptance = Acceptance()
    tree = DraftTree.chain([1])
    for _ in range(800):
        acceptance.learn(tree.token_ids, tree.parents, [28], [1])
    before = acceptance.chances[28]
    for _ in range(48):
        acceptance.learn(tree.token_ids, tree.parents, [28], [9])
    assert acceptance.chances[28] < 0.7 * before
    for _ in range(150):
        acceptance.learn(tree.token_ids, tree.parents, [28], [1])
    assert acceptance.chances[28] > 0.85 * before


def test_a_drafter_that_is_always_wrong_is_disbelieved_after_a_few_drafts() -> None:
    acceptance = Acceptance()
    tree = DraftTree([1, 2, 3, 4], [-1, 0, 1, 2], confidence=[0.95] * 4)
    for _ in range(6):
        acceptance.learn(tree.token_ids, tree.parents, rate("a", tree, acceptance.chances).buckets, [9])
    assert max(rate("a", tree, acceptance.chances).chances) < 0.35


def test_drafts_of_two_drafters_are_one_tree_that_names_both() -> None:
    sure = DraftTree([5, 6, 7], [-1, 0, 1], confidence=[0.9, 0.8, 0.5])
    other = DraftTree([5, 6, 8], [-1, 0, 1], confidence=[0.7, 0.9, 0.5])
    first, second = rate("a", sure, TABLE), rate("b", other, TABLE)
    joined = join([second, first])
    assert joined.tree.token_ids == [5, 6, 7, 8] and joined.tree.parents == [-1, 0, 1, 1]
    assert joined.tree.members == [("a", "b"), ("a", "b"), ("a",), ("b",)]
    assert joined.chances[:3] == first.chances  # the surest drafter's
    assert 0.0 < joined.chances[3] < second.chances[2]  # right only where the surest one's is wrong
    assert all(
        joined.chances[node] <= joined.chances[parent] for node, parent in enumerate([-1, 0, 1, 1]) if parent >= 0
    )


def test_a_drafter_s_price_is_a_line_through_its_calls_and_one_stall_does_not_move_it() -> None:
    cost = CallCostModel()
    for i in range(60):
        requests = (1, 2, 4, 8)[i % 4]
        cost.learn(0.001 + 0.0005 * requests, requests, 3, 0.010)
    call_s, each_s = cost.parts(0.010)
    assert call_s == pytest.approx(0.001, rel=0.1) and each_s == pytest.approx(0.0005, rel=0.1)
    cost.learn(1.0, 4, 3, 0.010)
    assert cost.parts(0.010)[0] + 4 * cost.parts(0.010)[1] < 1.15 * 0.003
    for _ in range(120):  # it has really become slower
        cost.learn(0.020, 4, 3, 0.010)
    assert cost.parts(0.010)[0] + 4 * cost.parts(0.010)[1] == pytest.approx(0.020, rel=0.15)


def test_a_second_is_worth_what_the_last_steps_gave_and_never_less_than_plain_decoding() -> None:
    market = _market(4)
    plain = 4 / market.plain_s
    assert market.tokens_per_s == pytest.approx(plain)
    market.learn_rate(200 * 3.0, 200 * 1.5 * market.plain_s, 200)
    market.quote(4)
    assert market.tokens_per_s == pytest.approx(2 * plain, rel=0.01)
    market.learn_rate(200 * 1.0, 200 * 2.0 * market.plain_s, 200)  # drafts that lost time do not make time cheap
    market.quote(4)
    assert market.tokens_per_s == pytest.approx(plain)


def test_the_bucket_never_pays_more_than_its_share() -> None:
    bucket = Bucket()
    bucket.start(0.006)
    bucket.start(0.006)
    assert bucket.saved_s == pytest.approx(START * 0.006)
    for _ in range(10_000):
        bucket.earn(0.006, 0.006)
        if bucket.saved_s > 0.003:
            bucket.pay(0.003)
    assert bucket.lost_s <= SHARE * bucket.run_s + START * 0.006
    assert bucket.lost_s > 0.9 * SHARE * bucket.run_s
    bucket.earn(3600.0, 0.006)
    assert bucket.saved_s < 0.1  # what was saved in an hour is not spent at once


def test_what_is_known_of_a_drafter_and_of_a_request_fades() -> None:
    gain, market = Gain(), _market(1)
    found = gains([1.0])
    for step in range(100):
        market.step = step
        gain.learn(f"{step}", found, market, LASTING)
    assert gain.means == pytest.approx(found)
    gain.learn("r", gains([1.0, 1.0, 1.0]), market, LASTING)
    expected = []
    for step in (101, 1000):
        market.step = step
        expected += gain.expect([(0, "r")], market)
    soon, late = expected
    assert soon.mean > 1.5 * late.mean  # like any other by then
    assert late.most - late.mean > soon.most - soon.mean


@pytest.mark.parametrize(("runs", "least", "most"), [(True, 0.6, 1.0), (False, 0.0, 0.3)])
def test_how_much_a_request_s_last_drafts_say_about_its_next_is_learned(runs: bool, least: float, most: float) -> None:
    """Good drafts come in runs, as copies do, or one by one."""
    gain, market, rng = Gain(), _market(1), random.Random(0)
    good = False
    for step in range(3000):
        market.step = step
        good = rng.random() < 0.5 if not runs or step % 40 == 0 else good
        gain.learn("r", gains([1.0, 1.0] if good else [0.0]), market, LASTING / 8)
    assert least <= gain.pull <= most


def test_a_draft_s_gain_is_what_its_paths_bring_beyond_their_rows() -> None:
    chances = [0.9, 0.5, 0.2]
    assert gains(chances) == pytest.approx([sum(max(0.0, one - price) for one in chances) for price in PRICES])
