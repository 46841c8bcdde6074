"""One account for every member: on trial, used as long as it pays, skipped until the allowance has made good a loss."""

from collections.abc import Sequence
from typing import Any

from paceline.core.tree import DraftTree
from paceline.spec.auto.members import ALLOWANCE, HOLD, STAKE, MemberChoice
from paceline.spec.auto.reasons import Inequality
from paceline.spec.proposer import Budget, Needs, Proposer, RequestPass, StepContext

TOKEN_S, ROW_S, STEP_S = 0.010, 0.0005, 0.011
LOGITS = Needs(logits=True)
CHEAP = Inequality().reason("on", True)


class Asked(Proposer):
    def __init__(self, needs: Needs, keeps_min_prob: bool = False) -> None:
        self.needs, self.keeps_min_prob = needs, keeps_min_prob

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        raise NotImplementedError  # these tests choose members and never ask them


def choice(**needs: Needs) -> MemberChoice:
    return MemberChoice({name: Asked(need) for name, need in (needs or {"one": LOGITS}).items()})


def run(
    members: MemberChoice, num_steps: int, cost_s: float, accepted: bool, num_requests: int = 1, name: str = "one"
) -> int:
    """Steps in which the member was asked; each costs `cost_s`, and its only nodes are accepted or not."""
    num_asked = 0
    for _ in range(num_steps):
        members.begin_step(STEP_S)
        asked = name in members.worth_asking()
        num_asked += asked
        if asked:
            members.spend(name, cost_s)
        tree = DraftTree([7], [-1], members=[(name,)]) if asked else DraftTree([], [])
        request: Any = None
        one = RequestPass(request, range(2), 0, 1, tree, [0] if asked and accepted else [], [7, 8])
        members.judge([one] * num_requests, TOKEN_S, ROW_S, num_requests)
    return num_asked


def test_a_member_is_used_while_it_pays_and_skipped_when_it_loses() -> None:
    members = choice()
    assert run(members, 100, 0.002, accepted=True) == 100
    assert members.members["one"].state == "pays" and members.needs.logits
    # Steps until what the account holds is lost, the time of so many tokens, beside what is allowed to be lost.
    most = HOLD * STAKE * TOKEN_S / (0.002 + ROW_S - ALLOWANCE * STEP_S) + 1
    num_asked = run(members, int(most) + 2, 0.002, accepted=False)
    assert num_asked <= most and members.members["one"].state == "skipped"
    assert not members.needs.logits and not members.is_told("one")


def test_a_trial_loses_its_stake_and_all_trials_the_allowance() -> None:
    members = choice()
    lost = 0.0025 * run(members, 200, 0.002, accepted=False)
    assert 0.8 * STAKE * TOKEN_S <= lost <= 1.2 * STAKE * TOKEN_S
    lost += 0.0025 * run(members, 20_000, 0.002, accepted=False)
    assert lost <= STAKE * TOKEN_S + 1.1 * ALLOWANCE * 20_200 * STEP_S
    assert run(members, 4000, 0.002, accepted=True) > 1000  # it pays now: a trial finds that, and it is used


def test_a_drafter_that_takes_many_passes_is_asked_a_few_times() -> None:
    """As often as its losses fit into the stake."""
    assert run(choice(), 1000, 5 * STEP_S, accepted=True) <= STAKE * TOKEN_S / (5 * STEP_S - TOKEN_S) + 1


def test_with_more_requests_a_trial_is_shorter() -> None:
    """As many tokens in fewer steps: what is lost is the time of tokens, not of steps."""
    one, many = (run(choice(), 100, 0.003 * count, accepted=False, num_requests=count) for count in (1, 8))
    assert many <= one / 4


def test_a_member_observes_before_its_next_trial() -> None:
    members = choice()
    run(members, 80, 0.002, accepted=False)
    states = []
    while members.members["one"].state != "trial":
        states.append(members.members["one"].state)
        members.begin_step(STEP_S)
    assert states[-1] == "observes" and set(states[:-1]) == {"skipped"}
    assert members.needs.logits and members.is_told("one")


def test_cheap_is_what_takes_less_time_than_a_row_and_has_nothing_kept_for_it() -> None:
    for needs, share, state in [
        (Needs(), 0.5, "cheap"),
        (Needs(), 4.0, "skipped"),  # needs nothing, and is expensive all the same
        (LOGITS, 0.5, "pays"),
    ]:
        members = choice(one=needs)
        run(members, 100, share * ROW_S if share < 1 else 0.05, accepted=share < 1)
        assert members.members["one"].state == state
    figures = members.report(CHEAP)["one"]
    assert figures["state"] == "pays" and figures["asked"] and figures["gain_tokens"] > figures["price_tokens"]


def test_a_cheap_member_that_becomes_slow_is_on_trial_and_has_to_make_good_for_it() -> None:
    members = choice(one=Needs())
    run(members, 50, 0.1 * ROW_S, accepted=True)
    assert members.has_cheap and not members.asks_batch
    run(members, 1, 0.3, accepted=True)
    assert members.members["one"].state == "trial" and members.members["one"].balance_s <= -0.3
    run(members, 2, 0.1 * ROW_S, accepted=True)
    assert members.members["one"].state == "skipped"
    assert run(members, int(0.2 / (ALLOWANCE * STEP_S)), 0.1 * ROW_S, accepted=True) == 0


def test_a_cheap_member_drafts_for_the_requests_that_are_due() -> None:
    members = choice(one=Needs(), two=LOGITS)
    run(members, 20, 0.1 * ROW_S, accepted=True)
    members.not_due = {1}
    whole = [Budget(6, 6)] * 3
    assert members.budgets("one", whole) == [Budget(6, 6), Budget(0, 0), Budget(6, 6)]
    assert members.budgets("two", whole) == whole
    members.skips_cheap = True
    assert "one" not in members.worth_asking() and not members.is_told("one")


def test_a_member_that_takes_thresholds_drafts_alone_once_it_pays() -> None:
    for keeps_min_prob, alone in [(True, "one"), (False, None)]:
        members = MemberChoice({"one": Asked(LOGITS, keeps_min_prob)})
        assert members.pays_alone is None and members.min_probs == (0.0, 0.0)
        run(members, 100, 0.002, accepted=True)
        assert members.pays_alone == alone
        members.stop_at(0.2, TOKEN_S)
        kept, extended = members.min_probs
        assert 0.2 == kept < extended < 1.0
        members.stop_at(2.0, TOKEN_S)  # nothing pays: near-certain paths are drafted nevertheless, to be judged
        assert members.min_probs[1] < 1.0


def test_of_two_members_that_draft_the_same_one_is_used() -> None:
    names = ("one", "two")
    members = choice(one=LOGITS, two=LOGITS)
    for _ in range(60):
        members.begin_step(STEP_S)
        asked = tuple(members.worth_asking())
        tree = DraftTree([7], [-1], members=[asked]) if asked else DraftTree([], [])
        for name in asked:
            members.spend(name, 0.001 if name == "one" else 0.004)
        request: Any = None
        one = RequestPass(request, range(2), 0, 1, tree, [0] if asked else [], [7, 8])
        members.judge([one], TOKEN_S, ROW_S, 0)
    assert sorted(members.members[name].state for name in names) == ["pays", "skipped"]


def test_a_step_that_read_prompts_says_nothing_but_its_time_counts_in_a_trial() -> None:
    members = choice()
    members.spend("one", 0.5)
    members.skip_evaluation()
    assert members.members["one"].balance_s == -0.5 and members.members["one"].state == "trial"
    members = choice()
    run(members, 100, 0.002, accepted=True)
    members.spend("one", 0.5)
    members.skip_evaluation()
    assert members.members["one"].balance_s > 0.0
    run(members, 1, 0.002, accepted=True)
    assert members.members["one"].state == "pays"  # what reading the prompt took is forgotten
