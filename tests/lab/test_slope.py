"""What a level costs, found out while their number changes."""

import pytest

from paceline.lab.slope import Slope


@pytest.mark.parametrize(("fixed_s", "level_s"), [(4e-4, 1e-4), (0.0, 3e-3)])
def test_a_level_costs_what_a_draft_takes_longer_with_it(fixed_s: float, level_s: float) -> None:
    costs = Slope()
    for levels in [3, 1, 4, 2] * 40:
        found = costs.learn(0.1, levels, fixed_s + level_s * levels)
    assert found == pytest.approx(level_s, rel=1e-4)


def test_while_levels_hardly_vary_a_level_costs_its_share_of_the_draft() -> None:
    costs = Slope()
    assert costs.learn(1.0, 4.0, 8e-4) == pytest.approx(2e-4)
    assert costs.learn(0.1, 4.0, 6e-4) == pytest.approx(7.8e-4 / 4)


def test_noise_makes_no_level_free() -> None:
    costs = Slope()
    for levels, seconds in [(1, 9e-4), (4, 1e-4)] * 20:  # deeper drafts that take less
        found = costs.learn(0.1, levels, seconds)
    assert 0.0 < found < 1e-4
