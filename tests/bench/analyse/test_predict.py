"""The model predicts a cell from others: what was measured of the setting in the cell itself must not matter."""

from copy import deepcopy
from typing import Any

import pytest

from paceline.bench.analyse.cells import Point, analyse
from paceline.bench.analyse.predict import Prediction, chart, error_table, predictions
from paceline.lab.charts import to_svg
from paceline.lab.pass_cost import PassCost
from tests.bench.analyse.test_report import record

CURVE = PassCost.of({1: 0.010, 65: 0.074})  # 9 ms and 1 ms a row
USERS = (1, 2, 4, 8)


def behave(users: int) -> tuple[float, float, float]:
    """Tokens and nodes per request and pass, drafting seconds per pass: a drafter that drafts less for many users."""
    return {1: 3.0, 2: 2.5, 4: 2.0, 8: 1.5}[users], {1: 8.0, 2: 6.0, 4: 4.0, 8: 2.0}[users], 0.001 + 0.0005 * users


def drafted(users: int, repeat: int = 0, level: float = 1.0, setting: str = "suffix:4") -> dict[str, Any]:
    """A run that took exactly what the model says, on a machine that is `level` times slower than the curve's."""
    tokens, nodes, draft_s = behave(users)
    num_tokens, passes = 800, 800 / (tokens * users)
    step_s = level * (CURVE(users * (1 + nodes)) + draft_s)
    made = record(setting, users, num_tokens / (passes * step_s), repeat)
    made["summary"]["speculation"] |= {
        "num_steps": passes * users,
        "num_draft_tokens": passes * users * nodes,
        "mean_acceptance_length": tokens,
    }
    made["summary"]["engine"] = {"num_passes": passes, "draft_s": passes * level * draft_s}
    return made


def plain(users: int, repeat: int = 0, level: float = 1.0) -> dict[str, Any]:
    made = record("plain", users, users / (level * CURVE(users)), repeat)
    made["summary"]["inter_token_s"]["p50"] = level * CURVE(users)
    return made


def records(levels: tuple[float, ...] = (1.0, 1.5, 0.8)) -> list[dict[str, Any]]:
    return [make(users, number, level) for number, level in enumerate(levels) for users in USERS
            for make in (plain, drafted)]  # fmt: skip


def found_in(measured: list[dict[str, Any]]) -> dict[int, Prediction]:
    return {one.cell.point.concurrency: one for one in predictions(analyse(measured), {0.0: CURVE})}


def test_a_cell_is_explained_exactly_and_predicted_from_its_neighbours() -> None:
    """With two users tokens and nodes lie half way between one and four, seconds a third of the way."""
    found = found_in(records())
    for users in USERS:
        tokens, nodes, draft_s = behave(users)
        exactly = tokens * CURVE(users) / (CURVE(users * (1 + nodes)) + draft_s)
        assert found[users].measured == pytest.approx(exactly) and found[users].explained == pytest.approx(exactly)
    assert found[2].predicted == pytest.approx(2.5 * CURVE(2) / (CURVE(2 * 7) + 0.002))
    assert found[8].predicted == pytest.approx(2.0 * CURVE(8) / (CURVE(8 * 5) + 0.005)), "as with 4, on the same line"
    assert found[1].predicted == pytest.approx(2.5 * CURVE(1) / (CURVE(1 * 7) + 0.0015)), "as with 2"


@pytest.mark.parametrize("users", USERS)
def test_nothing_of_the_setting_in_the_cell_itself_is_in_its_prediction(users: int) -> None:
    measured = records()
    changed = deepcopy(measured)
    for one in changed:
        if one["cell"]["setting"] == "suffix:4" and one["cell"]["concurrency"] == users:
            summary = one["summary"]
            summary["tokens_per_s"] *= 3.0
            summary["wall_s"] /= 5.0
            summary["num_output_tokens"] *= 7
            summary["speculation"] |= {"mean_acceptance_length": 9.0, "num_draft_tokens": 9, "num_steps": 11}
            summary["engine"] = {"num_passes": 13, "draft_s": 9.0}
    before, after = found_in(measured), found_in(changed)
    assert after[users].predicted == before[users].predicted
    assert after[users].measured != before[users].measured and after[users].explained != before[users].explained
    assert any(after[other].predicted != before[other].predicted for other in USERS if other != users)


def test_other_prompts_temperatures_and_settings_say_nothing_of_a_cell() -> None:
    measured = records()
    others = []
    for change in ({"workload": "code"}, {"temperature": 1.0}, {"setting": "suffix:8"}):
        for one in deepcopy(measured):
            if one["cell"]["setting"] == "suffix:4":
                one["cell"] |= change
                one["summary"]["speculation"]["mean_acceptance_length"] = 7.0
                others.append(one)
    before = found_in(measured)
    analysis = analyse([*measured, *others])
    for users in USERS:
        (same,) = [p for p in predictions(analysis, {0.0: CURVE})
                   if (p.cell.setting, p.cell.point) == ("suffix:4", Point("chat", 0.0, users))]  # fmt: skip
        assert same.predicted == before[users].predicted


def test_a_single_number_of_users_can_only_be_explained() -> None:
    (one,) = found_in([one for one in records() if one["cell"]["concurrency"] == 4]).values()
    assert one.predicted is None and one.explained == pytest.approx(one.measured)
    assert one.row()["predicts"] is None and one.row()["explains: within"] == "yes"
    assert "explained" in to_svg(chart([one]))


def test_both_have_an_error_table_of_their_own() -> None:
    """One user's run was 1.05 times as fast as the model says: that is explained within 10 %, but not predicted."""
    measured = records()
    for one in measured:
        if one["cell"]["setting"] == "suffix:4" and one["cell"]["concurrency"] == 1:
            one["summary"]["tokens_per_s"] *= 1.05
    found = list(found_in(measured).values())
    overall, own = error_table(found)
    assert (overall["setting"], own["setting"]) == ("all", "suffix:4") and overall["cells"] == 4
    assert overall["explains: worst"] == f"{1 - 1 / 1.05:.1%}" and overall["explains: within 10%"] == "100%"
    assert overall["predicts: worst"] == f"{1 - (1 - 1 / 14) / 1.05:.1%}" and overall["predicts: within 10%"] == "75%"
    assert "predicted" in to_svg(chart(found))
