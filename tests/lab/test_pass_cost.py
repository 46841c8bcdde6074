"""The cost curve of a pass, as measured and as it goes on learning. `auto`'s use of it: tests/spec/auto."""

import pytest

from paceline.lab.live_pass_cost import PassCostModel
from paceline.lab.pass_cost import FREE, PassCost

MEASURED = PassCost.of({1: 0.010, 4: 0.012, 8: 0.018, 32: 0.060})


@pytest.mark.parametrize(
    ("rows", "seconds"), [(0.5, 0.010), (1, 0.010), (2.5, 0.011), (4, 0.012), (6, 0.015), (8, 0.018), (32, 0.060)]
)
def test_between_measured_points_the_curve_is_a_straight_line(rows: float, seconds: float) -> None:
    assert MEASURED(rows) == pytest.approx(seconds)


def test_beyond_the_last_point_the_last_slope_goes_on() -> None:
    assert MEASURED(64) == pytest.approx(0.060 + 32 * (0.060 - 0.018) / 24)
    falling = PassCost.of({1: 0.010, 2: 0.012, 3: 0.011})
    assert falling(100) == 0.011, "more rows never cost less because the last point was measured too low"


def test_one_outlier_at_the_end_does_not_bend_all_that_follows() -> None:
    assert MEASURED.with_mean_slope()(64) == pytest.approx(0.060 + 32 * 0.050 / 31)
    assert MEASURED.with_mean_slope()(6) == MEASURED(6)
    assert FREE.with_mean_slope()(64) == FREE(64) == 1.0


def test_a_live_curve_begins_with_the_measured_one() -> None:
    model = PassCostModel(MEASURED)
    for rows in (1, 2, 4, 6, 8, 20, 32):
        assert model.at(rows) == pytest.approx(MEASURED(rows))
    assert model.at(500) == pytest.approx(MEASURED.with_mean_slope()(500), rel=1e-3)
    assert model.at(2000) > model.at(1024) > model.at(500)
    assert model.between(2, 5, 1) == [model.at(rows, 1) for rows in (2, 3, 4, 5)]


def test_a_live_curve_follows_the_passes() -> None:
    model = PassCostModel(MEASURED)
    for _ in range(300):
        for rows in (1, 4, 8):
            model.observe(rows, 2.0 * MEASURED(rows), 1)
    assert [model.at(rows, 1) for rows in (1, 4, 8)] == pytest.approx([2.0 * MEASURED(rows) for rows in (1, 4, 8)])
