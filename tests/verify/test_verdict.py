"""Shares with their intervals, and what a run of checks is said to have proved."""

import pytest

from paceline.verify.check import Check
from paceline.verify.share import Share
from paceline.verify.verdict import BITS, BROKEN, ROUNDING, SAME_HERE, make_verdict


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),  # Wilson's interval as in textbooks and in scipy.stats.binomtest
    [(0, 8, 0.0, 0.3244), (3, 8, 0.1368, 0.6943), (14, 24, 0.3883, 0.7553), (8, 8, 0.6756, 1.0), (0, 0, 0.0, 1.0)],
)
def test_a_share_has_wilsons_interval(count: int, total: int, low: float, high: float) -> None:
    assert Share(count, total).interval == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def equality(kind: str, differing: list[int], *, rounding: bool = True, plain: bool = False) -> Check:
    figures = {"workload": "long answers", "num_outputs": 8, "requests_differing": differing, "plain": plain}
    return Check(kind, "a case", not differing, "", figures, explained_by_rounding=rounding and bool(differing))


SAME = [equality("greedy", []), equality("seeded", [])]
DIFFERENT = [
    equality("greedy", [1, 2], plain=True),
    equality("greedy", [2, 4]),
    equality("seeded", []),
]


@pytest.mark.parametrize(
    ("checks", "promised", "proved", "passed", "with_allowance"),
    [
        (SAME, True, BITS, True, True),
        (SAME, False, SAME_HERE, True, True),
        (DIFFERENT, False, ROUNDING, False, True),
        ([equality("greedy", [1], rounding=False)], True, BROKEN, False, False),
        ([*DIFFERENT, Check("forcing", "a case", False, "")], False, BROKEN, False, False),
        ([*SAME, Check("distribution", "a rule", False, "")], True, BROKEN, False, False),
    ],
)
def test_a_verdict_names_what_was_proved(
    checks: list[Check], promised: bool, proved: str, passed: bool, with_allowance: bool
) -> None:
    for allow_rounding, expected in ((False, passed), (True, with_allowance)):
        verdict = make_verdict(checks, promised=promised, allow_rounding=allow_rounding)
        assert (verdict.proved, verdict.passed) == (proved, expected)


def test_a_request_that_differs_in_several_cases_counts_once_and_batching_is_told_apart() -> None:
    verdict = make_verdict(DIFFERENT, promised=False, allow_rounding=False)
    assert "3 of 16 (19 %, 95 % interval 7 to 43 %) answers differ" in verdict.explanation
    assert "Batching alone, without drafts, changes 2 of 8" in verdict.explanation
    assert "--batch-invariant" in verdict.explanation
