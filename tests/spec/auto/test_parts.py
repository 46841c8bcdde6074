"""The four parts by themselves: nodes that pay, chances that are learned, prices that are measured, the bucket."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.tree import DraftTree
from paceline.lab.live_call_cost import CallCostModel
from paceline.lab.live_pass_cost import PassCostModel
from paceline.spec.auto.acceptance import Acceptance
from paceline.spec.auto.choose import LEAST_CHANCE, choose
from paceline.spec.auto.constants import SHARE, START_S
from paceline.spec.auto.cost import Market
from paceline.spec.auto.explore import Bucket, Gain
from paceline.spec.merge.guess import guesses
from paceline.spec.merge.pool import draft_of, join


def _trees() -> st.SearchStrategy[list[DraftTree]]:
    @st.composite
    def tree(draw: st.DrawFn) -> DraftTree:
        size = draw(st.integers(0, 4))
        parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
        confidence = [draw(st.floats(0.05, 0.99)) for _ in range(size)]
        return DraftTree(list(range(size)), parents, confidence=confidence)

    return st.lists(tree(), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(_trees(), st.floats(0.0, 0.5), st.floats(0.5, 3.0))
def test_no_other_choice_of_nodes_has_a_larger_surplus(
    trees: list[DraftTree], slope: float, tokens_per_s: float
) -> None:
    cost, acceptance = PassCostModel({1: 1.0, 2: 1.0 + slope}), Acceptance()
    chances = [draft_of("a", tree, "r", acceptance).chances for tree in trees]
    chosen = choose(chances, len(trees), cost, tokens_per_s)
    for tree, keep in zip(trees, chosen.keep, strict=True):
        assert all(tree.parents[node] in (-1, *keep) for node in keep)

    def surplus(kept: Sequence[tuple[int, int]]) -> float:
        seconds = cost.at(len(trees) + len(kept), len(trees)) - cost.at(len(trees), len(trees))
        return sum(chances[i][node] for i, node in kept) - tokens_per_s * seconds

    nodes = [(i, node) for i, tree in enumerate(trees) for node in range(len(tree))]
    best = max(surplus(kept) for size in range(len(nodes) + 1) for kept in itertools.combinations(nodes, size))
    ignored = LEAST_CHANCE * len(nodes)  # nodes below LEAST_CHANCE are not considered
    assert surplus([(i, node) for i, keep in enumerate(chosen.keep) for node in keep]) >= best - ignored - 1e-9


def test_where_passes_are_padded_the_size_that_pays_is_filled() -> None:
    cost = PassCostModel({1: 1.0, 4: 1.3, 8: 2.6, 16: 5.2}, sizes=(1, 4, 8, 16))
    chances = [[0.6, 0.4, 0.2, 0.15, 0.1, 0.1]]
    assert choose(chances, 1, cost, 1.0).keep == [[0, 1, 2]]  # three rows are padding; four more cost more than 0.35
    assert choose(chances, 4, cost, 4.0).keep == [[]]  # a full size: the next costs 1.3 s, worth 5.2 tokens


def test_chances_are_learned_from_confidence_depth_and_rank() -> None:
    acceptance, rng = Acceptance(), random.Random(0)
    first, second, deeper = guesses([0.9, 0.5, 0.9], [1, 1, 2], [0, 1, 0])
    truth = {first: 0.7, second: 0.1, deeper: 0.4}
    for i in range(2000):
        acceptance.learn(f"{i // 50}", [(guess, rng.random() < chance) for guess, chance in truth.items()])
    for guess, chance in truth.items():
        odds = acceptance.odds(guess) * acceptance.factor("new")
        assert odds / (1.0 + odds) == pytest.approx(chance, abs=0.1)


def test_a_request_s_own_outcomes_move_its_chances_and_leave_others_alone() -> None:
    acceptance = Acceptance()
    (guess,) = guesses([0.5], [1], [0])
    before = acceptance.odds(guess)
    assert before < 1.0  # not yet known: a standard deviation below what the drafter says
    acceptance.learn("own", [(guess, True)] * 6)
    assert acceptance.odds(guess) >= before
    assert acceptance.factor("own") > 1.5 and acceptance.factor("other") == 1.0


def test_drafts_of_two_drafters_are_one_tree_that_names_both() -> None:
    ratings = {"a": Acceptance(), "b": Acceptance()}
    trees = {"a": DraftTree.chain([5, 6, 7]), "b": DraftTree.chain([5, 6, 8])}
    joined = join([draft_of(name, tree, "r", ratings[name]) for name, tree in trees.items()])
    assert joined.token_ids == [5, 6, 7, 8] and joined.parents == [-1, 0, 1, 1]
    assert joined.members == [("a", "b"), ("a", "b"), ("a",), ("b",)]
    hits = {name: [hit for _, hit in found] for name, found in joined.outcomes([5, 6, 8, 9]).items()}
    assert hits == {"a": [True, True, False], "b": [True, True, True]}
    ratings["b"].learn("x", [(joined.guesses[0][1], True)] * 40)  # each node is rated by the one who is surest
    again = join([draft_of(name, tree, "r", ratings[name]) for name, tree in trees.items()])
    assert again.own[0] > joined.own[0] + 0.1 and again.chances[2] > joined.chances[2]


def test_a_drafter_s_price_is_a_line_through_its_calls_and_one_stall_does_not_move_it() -> None:
    cost = CallCostModel()
    assert cost.least_s(1, 0.010) < 0.1 * (sum(cost.parts(0.010)) + 1e-9) * 1.1  # nothing is known yet
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


def _market(num_requests: int, launches_ahead: bool = False) -> Market:
    market = Market(PassCostModel({rows: 0.010 + 0.001 * (rows - 1) for rows in range(1, 65)}), launches_ahead)
    market.quote(num_requests)
    return market


def test_a_second_is_worth_what_the_last_steps_gave_and_never_less_than_plain_decoding() -> None:
    market = _market(4)
    plain = 4 / market.plain_s
    assert market.tokens_per_s == pytest.approx(plain)
    market.learn_rate(3.0, 1.5 * market.plain_s, 200)
    market.quote(4)
    assert market.tokens_per_s == pytest.approx(2 * plain, rel=0.01)
    market.learn_rate(1.0, 2.0 * market.plain_s, 200)  # drafts that lost time do not make time cheap
    market.quote(4)
    assert market.tokens_per_s == pytest.approx(plain)


def test_a_step_that_waits_for_drafters_is_priced_against_those_that_were_skipped() -> None:
    """As on a GPU: a pass that is launched ahead takes 10 ms, one that waits for the host 16."""
    market = _market(1, launches_ahead=True)
    for _ in range(40):
        market.learn_skipped([0.010, 0.010, 0.010, 0.055])  # a prompt's pass among them
        market.learn_step(1, 0.016, 1)
        market.learn_step(5, market.passes.at(5, 1) + 0.006, 1)
    assert market.wait_s == pytest.approx(0.006, rel=0.05)
    assert market.passes.at(1, 1) == pytest.approx(0.010, rel=0.05)
    on_a_cpu = _market(1)
    for _ in range(40):
        on_a_cpu.learn_step(1, 0.016, 1)  # nothing waits there: the passes became slower
    assert on_a_cpu.wait_s == 0.0 and on_a_cpu.passes.at(1, 1) == pytest.approx(0.016, rel=0.05)


def test_the_bucket_never_pays_more_than_its_share() -> None:
    bucket = Bucket()
    for _ in range(10_000):
        bucket.earn(0.006, 0.006)
        if bucket.saved_s > 0.003:
            bucket.pay(0.003)
    assert bucket.lost_s <= SHARE * bucket.run_s + START_S
    assert bucket.lost_s > 0.9 * SHARE * bucket.run_s
    bucket.earn(3600.0, 0.006)
    assert bucket.saved_s < 0.1  # what was saved in an hour is not spent at once


def test_what_is_known_of_a_drafter_and_of_a_request_fades() -> None:
    gain, market = Gain(), _market(1)
    for step in range(100):
        market.step = step
        gain.learn([1.0, 0.9, 0.7, 0.4, 0.0], market, is_new=False)
    gain.learn_of("r", 3.0, 100)
    assert gain.means == pytest.approx([1.0, 0.9, 0.7, 0.4, 0.0])
    expected = []
    for step in (101, 400):
        market.step = step
        expected += gain.expect([(0, "r")], market)
    soon, late = expected
    assert (
        soon.mean > 1.8 > late.mean >= 0.8 and soon.most - soon.mean < late.most - late.mean
    )  # like any other by then
    assert gain.deviation(100)[0] < gain.deviation(5000)[0]


def test_a_draft_s_gain_is_what_its_nodes_bring_beyond_their_rows() -> None:
    draft = draft_of("a", DraftTree.chain([1, 2]), "r", Acceptance())
    draft.chances = [0.5, 0.2]
    assert draft.gains() == pytest.approx([0.7, 0.5, 0.2, 0.0, 0.0])
    draft.whole = DraftTree.chain([1, 2])  # all of it or nothing
    assert draft.gains() == pytest.approx([0.7, 0.5, 0.1, 0.0, 0.0])
