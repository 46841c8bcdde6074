"""The step at which `auto` has followed a change, on traces whose answer is known."""

import itertools

from paceline.bench.claims.adapt import compare, speed_between


def trace(*parts: tuple[int, int]) -> list[tuple[float, int]]:
    """(steps, tokens per step) one after the other, a second per step."""
    emitted = [tokens for steps, tokens in parts for _ in range(steps)]
    return [(float(i), total) for i, total in enumerate(itertools.accumulate(emitted))]


def test_auto_has_followed_at_the_first_step_from_which_a_window_is_fast() -> None:
    result = compare(
        "repetitive", {"auto": trace((30, 1), (200, 4)), "plain": trace((400, 1)), "best": trace((150, 4))}
    )
    assert (result.best, result.best_tokens_per_s) == ("best", 4.0)
    assert result.reached_after is not None and 25 <= result.reached_after <= 30
    assert result.holds and result.row()["holds"] == "yes"


def test_following_too_late_or_never_fails_the_claim() -> None:
    late = compare("repetitive", {"auto": trace((100, 1), (200, 4)), "best": trace((150, 4))})
    assert late.reached_after is not None and late.reached_after > 50 and not late.holds
    never = compare("repetitive", {"auto": trace((100, 1)), "best": trace((150, 4))})
    assert never.reached_after is None and not never.holds


def test_short_runs_are_judged_by_what_there_is() -> None:
    assert speed_between(trace((10, 1), (10, 5)), 50, None) == 5.0
    assert compare("x", {"auto": trace((20, 5)), "best": trace((20, 5))}).holds
