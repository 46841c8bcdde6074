"""Pass cost, speedup, best K, break-even and money."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidOptionError
from paceline.lab.money import dollars_per_million_tokens
from paceline.lab.pass_cost import PassCost
from paceline.lab.speedup import Speculation, best_k, break_even_acceptance, speedup

MEASURED = PassCost.of({1: 0.010, 4: 0.012, 8: 0.018, 32: 0.060})


def test_interpolates_between_and_extrapolates_beyond() -> None:
    assert MEASURED(2.5) == pytest.approx(0.011)
    assert MEASURED(56) == pytest.approx(0.060 + 24 * (0.042 / 24))


@given(st.floats(0, 0.99), st.integers(1, 16), st.floats(0, 1))
def test_free_rows_give_the_textbook_formula(rate: float, k: int, c: float) -> None:
    point = Speculation(rate, draft_s=c)
    assert speedup(point, k) == pytest.approx((1 - rate ** (k + 1)) / (1 - rate) / (k * c + 1))


def test_best_k_is_the_maximum_and_off_where_nothing_pays() -> None:
    point = Speculation(0.8, draft_s=0.0005, pass_cost=MEASURED)
    best = best_k(point, 16)
    assert best.speedup == max(speedup(point, k) for k in range(17)) > 1.5
    assert best_k(Speculation(0.05, draft_s=0.004, pass_cost=MEASURED)).num_draft_tokens == 0
    # the same drafts lose in a batch, where the pass is bound by compute
    busy = PassCost.linear(0.001, 0.010)
    assert best_k(Speculation(0.6, pass_cost=busy, batch=32)).num_draft_tokens == 0


@given(st.integers(1, 12), st.floats(0, 0.002))
def test_break_even_is_where_the_speedup_is_one(k: int, draft_s: float) -> None:
    point = Speculation(0.5, draft_s=draft_s, pass_cost=MEASURED)
    rate = break_even_acceptance(point, k)
    if rate is None:
        assert speedup(Speculation(1.0, draft_s=draft_s, pass_cost=MEASURED), k) < 1
    elif rate > 0:
        assert speedup(Speculation(rate, draft_s=draft_s, pass_cost=MEASURED), k) == pytest.approx(1.0, abs=1e-6)


def test_break_even_is_none_where_perfect_drafts_lose() -> None:
    assert break_even_acceptance(Speculation(0.5, draft_s=10.0, pass_cost=MEASURED), 3) is None


def test_the_cost_of_a_million_tokens_follows_from_price_and_speed() -> None:
    assert dollars_per_million_tokens(3.6, 1000) == pytest.approx(1.0)
    assert dollars_per_million_tokens(3.6, 1000, utilization=0.5) == pytest.approx(2.0)


def test_a_curve_file_is_read_and_a_bad_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    path.write_text(json.dumps({"pass_cost": {"1": 0.01, "8": 0.02}, "machine": "x"}))
    assert PassCost.load(path)(8) == pytest.approx(0.02)
    path.write_text("not json")
    with pytest.raises(InvalidOptionError, match="is not a pass cost"):
        PassCost.load(path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PassCost.of({}), "as many times as row counts"),
        (lambda: PassCost((1.0, 1.0), (1.0, 2.0)), "must ascend"),
        (lambda: PassCost.of({1: 0.0}), "times positive"),
        (lambda: Speculation(0.5, batch=0), "at least 1 request"),
        (lambda: Speculation(0.5, draft_s=-1.0), "0 or more"),
        (lambda: dollars_per_million_tokens(1.0, 0.0), "a speed above 0"),
    ],
)
def test_impossible_curves_and_prices_are_refused_with_a_reason(call: object, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        call()  # type: ignore[operator]
