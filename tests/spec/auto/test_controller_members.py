"""Members that cost time: tried, kept as long as they pay, tried again later."""

import itertools
from collections.abc import Sequence
from typing import Any

from paceline.core.tree import DraftTree
from paceline.spec.auto.members import (
    FIRST_PAUSE,
    LISTEN_STEPS,
    MOST_SKIPPED,
    TRIAL_STEPS,
    WARM_UP_STEPS,
    WORTHWHILE,
    MemberChoice,
)
from paceline.spec.proposer import Budget, Needs, Proposer, RequestPass, StepContext

TOKEN_S, ROW_S, STEP_S = 0.010, 0.0005, 0.011
LONGEST_TRIAL = TRIAL_STEPS + WARM_UP_STEPS


class Member(Proposer):
    def __init__(self, needs: Needs, keeps_min_prob: bool = False) -> None:
        self.needs, self.keeps_min_prob = needs, keeps_min_prob

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        raise NotImplementedError  # here members are chosen, not asked


def choice() -> MemberChoice:
    return MemberChoice({"suffix": Member(Needs()), "dear": Member(Needs(logits=True))})


def run(members: MemberChoice, num_steps: int, cost_s: float, accepted: bool, num_requests: int = 1) -> int:
    """Steps in which the dear member was asked; each costs `cost_s`, and its only node is accepted or not."""
    num_asked = 0
    for _ in range(num_steps):
        members.begin_step(num_requests)
        asked = "dear" in members.worth_asking()
        num_asked += asked
        tree = DraftTree([7], [-1], members=[("dear",)]) if asked else DraftTree([], [])
        request: Any = None
        one = RequestPass(request, range(2), 0, 1, tree, [0] if asked and accepted else [], [7, 8])
        members.dear["dear"].spent_s += cost_s if asked else 0.0
        members.judge([one], TOKEN_S, ROW_S, STEP_S)
    return num_asked


def test_cheap_members_are_always_asked() -> None:
    members = choice()
    run(members, 50, 0.1, accepted=False)
    assert "suffix" in members.worth_asking()


def test_one_that_pays_stays_and_one_that_stops_paying_goes() -> None:
    members = choice()
    assert run(members, 100, 0.002, accepted=True) == 100
    assert members.report()["dear"]["state"] == "pays"
    num_asked = 0
    while members.dear["dear"].state == "pays":
        num_asked += run(members, 1, 0.002, accepted=False)
    assert num_asked < 60
    assert members.report()["dear"]["state"] == "listens"  # it usually pays: it only rests
    while members.dear["dear"].state != "asleep":  # until it has not paid for long
        num_asked += run(members, 1, 0.002, accepted=False)
    assert num_asked < 300


def test_who_can_be_told_where_to_stop_drafts_alone_once_it_pays() -> None:
    for keeps_min_prob, alone in [(True, "dear"), (False, None)]:
        dear = Member(Needs(logits=True), keeps_min_prob)
        members = MemberChoice({"suffix": Member(Needs()), "dear": dear})
        assert members.pays_alone is None and members.min_probs == (0.0, 0.0)
        run(members, 100, 0.002, accepted=True)
        assert members.pays_alone == alone
        members.stop_at(0.2)
        kept, extended = members.min_probs
        assert 0.2 == kept < extended < 1.0
        members.stop_at(2.0)  # nothing pays: what is certain is drafted nevertheless, to be looked at
        assert members.min_probs[1] < 1.0
    members = choice()
    run(members, 100, 0.002, accepted=True)
    assert members.report()["dear"]["state"] == "pays" and members.pays_alone is None


def test_one_that_loses_is_tried_seldom_and_seldomer() -> None:
    members = choice()
    assert run(members, FIRST_PAUSE, 0.002, accepted=False) <= LONGEST_TRIAL
    lost_s = 0.0025 * run(members, 4000, 0.002, accepted=False)  # its time and its row
    assert lost_s <= 0.01 * 4000 * STEP_S
    assert run(members, 2000, 0.002, accepted=True) > 300  # it pays now: found out, and kept


def test_a_much_smaller_batch_is_a_reason_to_try_again() -> None:
    members = choice()
    run(members, 20, 0.050, accepted=True, num_requests=16)
    assert members.report()["dear"]["state"] == "asleep"
    assert run(members, LISTEN_STEPS, 0.002, accepted=True, num_requests=4) == 0
    assert run(members, 10, 0.002, accepted=True, num_requests=4) == 10


def test_a_sleeper_hears_nothing_and_listens_before_its_next_trial() -> None:
    members = choice()
    assert members.needs.logits and members.is_told("dear")
    run(members, LONGEST_TRIAL, 0.002, accepted=False)
    assert not members.needs.logits and not members.is_told("dear")
    heard = 0
    while members.dear["dear"].state != "trial":
        run(members, 1, 0.002, accepted=False)
        heard += members.dear["dear"].state == "listens"
    assert heard == LISTEN_STEPS and members.needs.logits


def test_nobody_is_tried_where_even_good_drafts_would_not_pay() -> None:
    members = choice()
    for _ in range(200):
        members.begin_step(64, hope_s=-0.001)
        assert "dear" not in members.worth_asking() and not members.needs.logits


def test_a_hope_that_comes_and_goes_wakes_nobody_each_time() -> None:
    members, hope_s, states = choice(), -0.001, []
    for step in range(4 * FIRST_PAUSE):
        if step % 5 == 0:
            hope_s = -hope_s
        members.begin_step(32, hope_s)
        members.note(0, 0, 32, STEP_S)
        states.append(members.dear["dear"].state)
    num_woken = sum(before == "asleep" != after for before, after in itertools.pairwise(states))
    assert 1 <= num_woken <= 4


def test_nobody_wakes_for_less_than_a_trial_must_bring() -> None:
    for hope_s, one_row_s, wakes in [
        (2 * WORTHWHILE * STEP_S, 0.0, True),
        (0.5 * WORTHWHILE * STEP_S, 0.0, False),
        (2 * WORTHWHILE * STEP_S, STEP_S, False),  # a level of drafting would take that
    ]:
        members = choice()
        members.begin_step(1, hope_s=-0.001)  # off to sleep
        states = set()
        for _ in range(2 * FIRST_PAUSE):
            members.begin_step(1, hope_s, 1, one_row_s)
            members.note(0, 0, 1, STEP_S)
            states.add(members.dear["dear"].state)
        assert ("trial" in states) == wakes


def test_a_trial_that_saw_nothing_but_prompts_is_made_again() -> None:
    members = choice()
    run(members, 1, 0.002, accepted=True)
    for _ in range(MOST_SKIPPED):
        members.begin_step(1)
        members.skip()
    assert members.dear["dear"].state == "asleep"
    run(members, 4 * FIRST_PAUSE, 0.002, accepted=True)
    assert members.report()["dear"]["state"] == "pays"


def test_of_two_that_draft_the_same_one_is_kept() -> None:
    names = ("dear", "dearer")
    needs = {"suffix": Needs(), "dear": Needs(logits=True), "dearer": Needs(logits=True)}
    members = MemberChoice({name: Member(need) for name, need in needs.items()})
    for _ in range(60):
        members.begin_step(1)
        asked = [name for name in members.worth_asking() if name in names]
        tree = DraftTree([7], [-1], members=[tuple(asked)]) if asked else DraftTree([], [])
        request: Any = None
        one = RequestPass(request, range(2), 0, 1, tree, [0] if asked else [], [7, 8])
        for name in asked:
            members.dear[name].spent_s += 0.001 if name == "dear" else 0.004
        members.judge([one], TOKEN_S, ROW_S, STEP_S)
    assert sorted(members.report()[name]["state"] for name in names) == ["asleep", "pays"]


def test_a_trial_is_made_with_a_few_requests() -> None:
    members = choice()
    members.begin_step(8)
    whole = [Budget(6, 6)] * 8
    assert members.dear["dear"].state == "trial"
    assert members.budgets("dear", whole) == [Budget(6, 6)] * 2 + [Budget(0, 0)] * 6
    assert members.budgets("suffix", whole) == whole
    members.dear["dear"].begin("pays")
    assert members.budgets("dear", whole) == whole


def test_a_trial_with_a_few_requests_counts_for_the_whole_batch() -> None:
    """For two of eight its drafts do not pay for its time; for all of them they would, at hardly more time."""

    def after(num_requests: int) -> str:
        members = choice()
        members.begin_step(num_requests)
        while members.dear["dear"].state == "trial":
            assert "dear" in members.worth_asking()
            tried = min(2, num_requests)
            trees = [DraftTree([7], [-1], members=[("dear",)])] * tried + [DraftTree([], [])] * (num_requests - tried)
            request: Any = None
            passes = [RequestPass(request, range(2), 0, 1, tree, [0] if tree else [], [7, 8]) for tree in trees]
            members.dear["dear"].spent_s += 0.022  # two tokens are worth 0.019 and their rows cost 0.001
            members.judge(passes, TOKEN_S, ROW_S, STEP_S)
            members.begin_step(num_requests)
        return members.dear["dear"].state

    assert after(2) == "asleep"
    assert after(8) == "pays"
