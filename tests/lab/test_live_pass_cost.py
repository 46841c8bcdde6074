"""The cost curve of a running engine: what it learns from steps, and what it does not."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.lab.live_pass_cost import PassCostModel
from paceline.lab.pass_cost import PassCost

CHEAP_ROWS = PassCost.of({1: 0.50, 8: 0.55, 16: 0.70, 32: 1.0, 64: 1.8})


def test_the_curve_learns_its_shape_from_steps() -> None:
    model = PassCostModel()  # a guess, far too steep for this machine
    rng = random.Random(0)
    for _ in range(3000):
        rows = rng.choice([1, 2, 3, 5, 7, 9, 17])
        model.observe(rows, CHEAP_ROWS(rows) * rng.lognormvariate(0.0, 0.05))
    for rows in (2, 5, 9, 17):
        assert model.at(rows) / model.at(1) == pytest.approx(CHEAP_ROWS(rows) / CHEAP_ROWS(1), rel=0.06)


def test_the_level_follows_the_machine_quickly() -> None:
    model = PassCostModel({1: 1.0, 9: 1.5})
    for _ in range(3):
        model.observe(1, 0.020)
    assert model.at(1) == pytest.approx(0.020) and model.at(9) == pytest.approx(0.030)
    for _ in range(20):
        model.observe(1, 0.030)
    assert model.at(9) / 0.045 == pytest.approx(1.0, rel=0.1)  # never seen, but raised with the rest


def test_one_stall_does_not_bend_the_curve() -> None:
    model = PassCostModel({1: 1.0, 9: 1.5})
    model.observe(1, 0.020)
    model.observe(9, 20.0)
    assert model.at(9) / model.at(1) == pytest.approx(1.5, rel=0.02)


def test_the_cost_of_requests_is_not_attributed_to_their_rows() -> None:
    """Contexts add half to every pass. No draft has shown yet what rows cost, so the calibration decides."""
    calibrated = {1: 0.006, 8: 0.010, 16: 0.014, 32: 0.024, 64: 0.044}
    model = PassCostModel(calibrated)
    for _ in range(64):
        model.observe(16, 0.021, 16)
    assert model.at(16, 16) == pytest.approx(0.021, rel=0.02)
    rows_s = model.at(32, 16) - model.at(16, 16)
    assert 0.010 <= rows_s <= 0.012  # 0.015 if it were attributed to rows and requests alike


def test_drafts_show_whether_rows_or_requests_are_expensive() -> None:
    calibrated = {1: 0.006, 8: 0.010, 16: 0.014, 32: 0.024, 64: 0.044}
    model = PassCostModel(calibrated)
    rng = random.Random(0)
    for _ in range(200):  # the machine has become half as fast again for everything
        rows = rng.choice([16, 16, 24, 32])
        model.observe(rows, 1.5 * PassCost.of(calibrated)(rows), 16)
    assert model.at(32, 16) - model.at(16, 16) == pytest.approx(0.015, rel=0.1)


def test_a_machine_that_becomes_faster_does_not_make_drafts_look_expensive() -> None:
    """Only plain passes of 16 requests are observed; then the cost with two draft nodes for each is predicted."""
    model = PassCostModel({1: 5.0, 8: 7.0, 16: 11.0, 32: 20.0, 48: 30.0, 64: 40.0})
    before = model.at(48, 16) / model.at(16, 16)
    for i in range(300):
        model.observe(16, 16.0 if i < 20 else 11.0, 16)
    assert model.at(16, 16) == pytest.approx(11.0, rel=0.02)
    assert model.at(48, 16) / model.at(16, 16) < 1.02 * before


def test_the_first_drafts_correct_what_the_calibration_had_wrong() -> None:
    true = {1: 0.006, 8: 0.010, 16: 0.014, 32: 0.022, 64: 0.038}
    model = PassCostModel(true | {32: 0.030, 64: 0.060})
    for _ in range(40):
        model.observe(8, 0.010, 8)
    before_s = model.at(40, 8)
    for _ in range(4):  # as the few passes tried at a loss
        model.observe(40, PassCost.of(true)(40), 8)
        for _ in range(8):
            model.observe(8, 0.010, 8)
    assert model.at(40, 8) < before_s - 0.4 * (before_s - PassCost.of(true)(40))
    assert model.at(8, 8) == pytest.approx(0.010, rel=0.03)


@given(st.lists(st.tuples(st.integers(1, 1500), st.floats(1e-4, 10.0)), max_size=50))
def test_more_rows_never_cost_less(observations: list[tuple[int, float]]) -> None:
    model = PassCostModel()
    for rows, seconds in observations:
        model.observe(rows, seconds)
    curve = [model.at(rows) for rows in range(1, 1200)]
    assert all(later >= earlier > 0 for earlier, later in itertools.pairwise(curve))
    assert model.at(700) == pytest.approx(curve[699])


def test_one_wrong_point_of_the_calibration_does_not_raise_all_above_it() -> None:
    true = {1: 10.0, 2: 10.5, 3: 11.0, 4: 11.5, 8: 14.0}
    disturbed = PassCostModel(true | {2: 20.0})
    assert disturbed.at(8) / disturbed.at(1) == pytest.approx(1.4, rel=0.2)
    for _ in range(12):
        disturbed.observe(1, 0.0100)
        disturbed.observe(2, 0.0105)
    assert disturbed.at(2) / disturbed.at(1) < 1.15


def test_a_shape_that_was_kept_is_believed_as_much_as_the_calibration_unless_it_is_another_one() -> None:
    steep, flat = PassCostModel({1: 1.0, 8: 1.4, 64: 5.0, 128: 9.0}), PassCostModel({1: 1.0, 8: 1.2, 64: 4.5, 128: 8.0})
    before = flat.at(8) / flat.at(1)
    flat.restore(steep.state())
    assert before < flat.at(8) / flat.at(1) < steep.at(8) / steep.at(1)
    other = PassCostModel({1: 1.0, 8: 1.0, 64: 1.1, 128: 1.2})
    known = other.at(64)
    other.restore(steep.state())
    other.restore(None)
    assert other.at(64) == known
