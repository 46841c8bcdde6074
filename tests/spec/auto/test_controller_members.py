"""Expensive members: put on trial, used as long as they pay, put on trial again later."""

import itertools
from collections.abc import Sequence
from typing import Any

from paceline.spec.auto.members import (
    FIRST_PAUSE,
    MOST_SKIPPED,
    OBSERVE_STEPS,
    TRIAL_STEPS,
    WARM_UP_STEPS,
    WORTHWHILE,
    MemberChoice,
)

from paceline.core.tree import DraftTree
from paceline.spec.proposer import Budget, Needs, Proposer, RequestPass, StepContext

TOKEN_S, ROW_S, STEP_S = 0.010, 0.0005, 0.011
LONGEST_TRIAL = TRIAL_STEPS + WARM_UP_STEPS


class Member(Proposer):
    def __init__(self, needs: Needs, keeps_min_prob: bool = False) -> None:
        self.needs, self.keeps_min_prob = needs, keeps_min_prob

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        raise NotImplementedError  # these tests choose members and never ask them


def choice() -> MemberChoice:
    return MemberChoice({"suffix": Member(Needs()), "expensive": Member(Needs(logits=True))})


def run(members: MemberChoice, num_steps: int, cost_s: float, accepted: bool, num_requests: int = 1) -> int:
    """Steps in which the expensive member was asked; each costs `cost_s`, and its only node is accepted or not."""
    num_asked = 0
    for _ in range(num_steps):
        members.begin_step(num_requests)
        asked = "expensive" in members.worth_asking()
        num_asked += asked
        tree = DraftTree([7], [-1], members=[("expensive",)]) if asked else DraftTree([], [])
        request: Any = None
        one = RequestPass(request, range(2), 0, 1, tree, [0] if asked and accepted else [], [7, 8])
        members.expensive["expensive"].spent_s += cost_s if asked else 0.0
        members.judge([one], TOKEN_S, ROW_S, STEP_S)
    return num_asked


def test_cheap_members_are_always_asked() -> None:
    members = choice()
    run(members, 50, 0.1, accepted=False)
    assert "suffix" in members.worth_asking()


def test_an_expensive_member_is_used_while_it_pays_and_skipped_when_it_loses() -> None:
    members = choice()
    assert run(members, 100, 0.002, accepted=True) == 100
    assert members.report()["expensive"]["state"] == "pays"
    num_asked = 0
    while members.expensive["expensive"].state == "pays":
        num_asked += run(members, 1, 0.002, accepted=False)
    assert num_asked < 60
    assert members.report()["expensive"]["state"] == "observes"  # it usually pays, so it goes on observing
    while members.expensive["expensive"].state != "skipped":  # until it has lost for long
        num_asked += run(members, 1, 0.002, accepted=False)
    assert num_asked < 300


def test_a_member_that_takes_thresholds_drafts_alone_once_it_pays() -> None:
    for keeps_min_prob, alone in [(True, "expensive"), (False, None)]:
        expensive = Member(Needs(logits=True), keeps_min_prob)
        members = MemberChoice({"suffix": Member(Needs()), "expensive": expensive})
        assert members.pays_alone is None and members.min_probs == (0.0, 0.0)
        run(members, 100, 0.002, accepted=True)
        assert members.pays_alone == alone
        members.stop_at(0.2)
        kept, extended = members.min_probs
        assert 0.2 == kept < extended < 1.0
        members.stop_at(2.0)  # nothing pays: near-certain paths are drafted nevertheless, to be judged
        assert members.min_probs[1] < 1.0
    members = choice()
    run(members, 100, 0.002, accepted=True)
    assert members.report()["expensive"]["state"] == "pays" and members.pays_alone is None


def test_a_member_that_loses_is_put_on_trial_less_and_less_often() -> None:
    members = choice()
    assert run(members, FIRST_PAUSE, 0.002, accepted=False) <= LONGEST_TRIAL
    lost_s = 0.0025 * run(members, 4000, 0.002, accepted=False)  # its time and its row
    assert lost_s <= 0.01 * 4000 * STEP_S
    assert run(members, 2000, 0.002, accepted=True) > 300  # it pays now: a trial finds that, and it is used


def test_a_much_smaller_batch_starts_a_new_trial() -> None:
    members = choice()
    run(members, 20, 0.050, accepted=True, num_requests=16)
    assert members.report()["expensive"]["state"] == "skipped"
    assert run(members, OBSERVE_STEPS, 0.002, accepted=True, num_requests=4) == 0
    assert run(members, 10, 0.002, accepted=True, num_requests=4) == 10


def test_a_skipped_member_is_told_nothing_until_shortly_before_its_next_trial() -> None:
    members = choice()
    assert members.needs.logits and members.is_told("expensive")
    run(members, LONGEST_TRIAL, 0.002, accepted=False)
    assert not members.needs.logits and not members.is_told("expensive")
    num_observed = 0
    while members.expensive["expensive"].state != "trial":
        run(members, 1, 0.002, accepted=False)
        num_observed += members.expensive["expensive"].state == "observes"
    assert num_observed == OBSERVE_STEPS and members.needs.logits


def test_there_is_no_trial_where_even_good_drafts_would_not_pay() -> None:
    members = choice()
    for _ in range(200):
        members.begin_step(64, best_saving_s=-0.001)
        assert "expensive" not in members.worth_asking() and not members.needs.logits


def test_a_best_case_that_changes_often_does_not_start_a_trial_each_time() -> None:
    members, best_saving_s, states = choice(), -0.001, []
    for step in range(4 * FIRST_PAUSE):
        if step % 5 == 0:
            best_saving_s = -best_saving_s
        members.begin_step(32, best_saving_s)
        members.note(0, 0, 32, STEP_S)
        states.append(members.expensive["expensive"].state)
    num_resumed = sum(before == "skipped" != after for before, after in itertools.pairwise(states))
    assert 1 <= num_resumed <= 4


def test_a_member_stays_skipped_where_the_best_case_is_below_what_a_trial_must_gain() -> None:
    for best_saving_s, one_row_s, is_tried in [
        (2 * WORTHWHILE * STEP_S, 0.0, True),
        (0.5 * WORTHWHILE * STEP_S, 0.0, False),
        (2 * WORTHWHILE * STEP_S, STEP_S, False),  # a level of drafting would take that
    ]:
        members = choice()
        members.begin_step(1, best_saving_s=-0.001)  # skipped from here on
        states = set()
        for _ in range(2 * FIRST_PAUSE):
            members.begin_step(1, best_saving_s, 1, one_row_s)
            members.note(0, 0, 1, STEP_S)
            states.add(members.expensive["expensive"].state)
        assert ("trial" in states) == is_tried


def test_a_trial_whose_steps_all_read_prompts_is_repeated() -> None:
    members = choice()
    run(members, 1, 0.002, accepted=True)
    for _ in range(MOST_SKIPPED):
        members.begin_step(1)
        members.skip()
    assert members.expensive["expensive"].state == "skipped"
    run(members, 4 * FIRST_PAUSE, 0.002, accepted=True)
    assert members.report()["expensive"]["state"] == "pays"


def test_of_two_expensive_members_that_draft_the_same_one_is_used() -> None:
    names = ("expensive", "more_expensive")
    needs = {"suffix": Needs(), "expensive": Needs(logits=True), "more_expensive": Needs(logits=True)}
    members = MemberChoice({name: Member(need) for name, need in needs.items()})
    for _ in range(60):
        members.begin_step(1)
        asked = [name for name in members.worth_asking() if name in names]
        tree = DraftTree([7], [-1], members=[tuple(asked)]) if asked else DraftTree([], [])
        request: Any = None
        one = RequestPass(request, range(2), 0, 1, tree, [0] if asked else [], [7, 8])
        for name in asked:
            members.expensive[name].spent_s += 0.001 if name == "expensive" else 0.004
        members.judge([one], TOKEN_S, ROW_S, STEP_S)
    assert sorted(members.report()[name]["state"] for name in names) == ["pays", "skipped"]


def test_a_trial_drafts_for_a_few_requests_only() -> None:
    members = choice()
    members.begin_step(8)
    whole = [Budget(6, 6)] * 8
    assert members.expensive["expensive"].state == "trial"
    assert members.budgets("expensive", whole) == [Budget(6, 6)] * 2 + [Budget(0, 0)] * 6
    assert members.budgets("suffix", whole) == whole
    members.expensive["expensive"].begin("pays")
    assert members.budgets("expensive", whole) == whole


def test_the_gain_of_a_trial_is_scaled_to_the_whole_batch() -> None:
    """For two of eight its drafts do not pay for its time; for all of them they would, at hardly more time."""

    def after(num_requests: int) -> str:
        members = choice()
        members.begin_step(num_requests)
        while members.expensive["expensive"].state == "trial":
            assert "expensive" in members.worth_asking()
            tried = min(2, num_requests)
            drafted, none = DraftTree([7], [-1], members=[("expensive",)]), DraftTree([], [])
            trees = [drafted] * tried + [none] * (num_requests - tried)
            request: Any = None
            passes = [RequestPass(request, range(2), 0, 1, tree, [0] if tree else [], [7, 8]) for tree in trees]
            members.expensive["expensive"].spent_s += 0.022  # two tokens are worth 0.019 and their rows cost 0.001
            members.judge(passes, TOKEN_S, ROW_S, STEP_S)
            members.begin_step(num_requests)
        return members.expensive["expensive"].state

    assert after(2) == "skipped"
    assert after(8) == "pays"
