"""The conformance suite tells good drafters from bad ones: each bad one, planted in the table, fails the rule that it
breaks, and a good one passes all of them."""

import pytest

from paceline.spec.config.method import Method, size
from paceline.spec.methods import PROPOSERS
from tests.spec.conformance import RULES

BROKEN_RULES = {
    "NeverDrafts": "drafts_and_is_right_where_the_text_repeats",
    "AlwaysWrong": "drafts_and_is_right_where_the_text_repeats",
    "IgnoresTheBudget": "stays_inside_any_budget",
    "DraftsForNoBudget": "drafts_nothing_for_an_empty_budget",
    "Raises": "drafts_and_is_right_where_the_text_repeats",
    "RaisesNowAndThen": "writes_what_plain_decoding_writes, flat, greedy",
    "LosesATree": "survives_preemption_and_chunked_prefill",
    "DraftsUnknownTokens": "writes_what_plain_decoding_writes, sharp, greedy",
    "KeepsEveryRequest": "forgets_requests_that_are_gone",
    "MixesRequests": "drafts_the_same_alone_and_in_a_batch",
    "RefusesEverything": "drafts_beside_every_other_method",
}


def plant(monkeypatch: pytest.MonkeyPatch, drafter: str, drafts: bool = True) -> None:
    row = Method(f"tests.spec.planted_drafters:{drafter}", "planted by a test", size(4, 4), drafts=drafts)
    monkeypatch.setitem(PROPOSERS, "planted", row)


@pytest.mark.faults  # the engine must go on, so that it is the suite that catches them
@pytest.mark.parametrize("drafter", BROKEN_RULES)
def test_a_bad_drafter_breaks_its_rule(monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    plant(monkeypatch, drafter)
    with pytest.raises(Exception, match=r"planted|refused"):
        RULES[BROKEN_RULES[drafter]]("planted")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        ("NeverDrafts", "never drafted"),
        ("AlwaysWrong", "never right"),
        ("IgnoresTheBudget", "raised, or drafted what its budget does not allow"),
        ("Raises", "raised"),
    ],
)
def test_the_suite_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, drafter: str, said: str) -> None:
    plant(monkeypatch, drafter)
    with pytest.raises(AssertionError, match=said):
        RULES["drafts_and_is_right_where_the_text_repeats"]("planted")


def test_a_drafter_that_says_that_it_does_not_draft_is_held_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "Knows", drafts=False)
    with pytest.raises(AssertionError, match="its row says that it does not"):
        RULES["drafts_and_is_right_where_the_text_repeats"]("planted")


@pytest.mark.parametrize("rule", RULES)
def test_a_good_drafter_keeps_every_rule(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    plant(monkeypatch, "Knows")
    RULES[rule]("planted")
