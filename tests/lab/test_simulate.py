"""The simulator agrees with the theory. Every bound is 5 standard errors: under one failure in a million by chance."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidOptionError
from paceline.lab.simulate import acceptance_rate, simulate_rule, simulate_steps, toy_pair


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9, 1.0])
def test_output_is_the_target_and_acceptance_is_the_overlap(rate: float) -> None:
    p, q = toy_pair(12, rate, seed=3)
    assert acceptance_rate(p, q) == pytest.approx(rate)
    run = simulate_rule(p, q, 200_000, seed=1)
    assert abs(run.accepted - rate) <= 5 * run.standard_error
    assert run.distance < 3 * run.distance_by_chance


def test_a_biased_rule_is_detected() -> None:
    """Emitting from p instead of the residual after a rejection moves the output by far more than chance does."""
    p, q = toy_pair(12, 0.6, seed=3)
    run = simulate_rule(p, q, 200_000, seed=1)
    wrong = np.minimum(p, q) + (1 - 0.6) * p
    assert np.abs(wrong - p).sum() / 2 > 20 * run.distance_by_chance


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 0.95), st.integers(1, 8), st.integers(0, 1000))
def test_simulated_steps_match_the_formula(rate: float, k: int, seed: int) -> None:
    run = simulate_steps(rate, k, 20_000, seed)
    assert abs(run.tokens_per_step - run.tokens_per_step_theory) <= 5 * run.standard_error
    assert run.accepted_per_position == sorted(run.accepted_per_position, reverse=True)


def test_draft_latency_turns_a_win_into_a_loss() -> None:
    fast = simulate_steps(0.7, 5, 20_000, 0, draft_s=0.02)
    slow = simulate_steps(0.7, 5, 20_000, 0, draft_s=0.9)
    assert fast.speedup > 2.0 and slow.speedup < 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simulate_rule([1.0], [0.5, 0.5], 10, 0), "one vocabulary"),
        (lambda: simulate_rule([0.0], [1.0], 10, 0), "not all 0"),
        (lambda: simulate_steps(0.5, 3, 1, 0), "2 steps or more"),
        (lambda: toy_pair(1, 0.5, 0), "2 tokens or more"),
    ],
)
def test_impossible_simulations_are_refused_with_a_reason(call: object, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        call()  # type: ignore[operator]
