"""What an engine learned is kept for the next start, and a damaged file is the same as none."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.spec import kept_state
from paceline.spec.auto.controller import AutoProposer
from paceline.spec.kept_state import states
from tests.spec.auto.simulation import CURVE, Planted, Simulation, auto

PASS_S = CURVE(1)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "auto" / "model.json"
    monkeypatch.setattr("paceline.spec.kept_state.state_path", lambda services: path)
    return path


def engine(monkeypatch: pytest.MonkeyPatch, accuracy: float = 0.8, **options: Any) -> tuple[Simulation, AutoProposer]:
    world = Simulation()
    drafter = Planted(world, accuracy=lambda step: accuracy, confidence=0.8, call_s=0.3 * PASS_S)
    return world, auto(monkeypatch, world, {"drafter": drafter}, **options)


def test_a_second_start_drafts_at_once(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    world, first = engine(monkeypatch)
    world.run(first, 1)
    assert first.drafters["drafter"].verdict.decision != "asked"
    world.run(first, 3000)
    assert kept.stat().st_size < kept_state.MOST_BYTES
    world, second = engine(monkeypatch)
    world.run(second, 1)
    assert second.drafters["drafter"].verdict.decision == "asked"
    assert world.run(second, 8) > 1.3
    assert list(kept.parent.iterdir()) == [kept]  # nothing half written is left


def test_what_no_longer_holds_is_soon_outweighed(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    world, first = engine(monkeypatch)
    world.run(first, 3000)
    world, second = engine(monkeypatch, accuracy=0.0)
    assert world.run(second, 2000) > 0.975


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 0}',
        '{"version": 2, "drafters": 3, "pass_cost": "x"}',
        '{"version": 2, "drafters": {"drafter": {"acceptance": [1e400]}}}',
        "x" * (kept_state.MOST_BYTES + 1),
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_file_is_the_same_as_none(monkeypatch: pytest.MonkeyPatch, kept: Path, text: str) -> None:
    kept.parent.mkdir()
    kept.write_text(text)
    world, damaged = engine(monkeypatch)
    _, fresh = engine(monkeypatch, remember=False)
    assert states(damaged.drafters["drafter"].kept) == states(fresh.drafters["drafter"].kept)
    assert damaged.market.passes.state() == fresh.market.passes.state()
    world.run(damaged, 100)


@pytest.mark.parametrize("part", ["acceptance", "gain", "cost"])
@pytest.mark.parametrize("wrong", [None, [], [None], ["1"], [float("nan")], [-1e12]], ids=str)
def test_nothing_of_a_drafter_is_believed_where_a_part_is_wrong(
    monkeypatch: pytest.MonkeyPatch, kept: Path, part: str, wrong: Any
) -> None:
    world, first = engine(monkeypatch)
    world.run(first, 3000)
    known = json.loads(kept.read_text())
    old = known["drafters"]["drafter"][part]
    known["drafters"]["drafter"][part] = wrong if not wrong else wrong + old[1:]
    kept.write_text(json.dumps(known))
    _, second = engine(monkeypatch)
    _, fresh = engine(monkeypatch, remember=False)
    assert states(second.drafters["drafter"].kept) == states(fresh.drafters["drafter"].kept)


def test_it_can_be_switched_off_and_a_folder_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    world, off = engine(monkeypatch, remember=False)
    world.run(off, 1500)
    assert not kept.exists()
    kept.parent.write_text("a file, where the folder should be")
    world, blocked = engine(monkeypatch)
    world.run(blocked, 1500)
    assert kept.parent.is_file()


def test_without_a_model_or_where_the_variable_says_so_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.spec.replaying import SERVICES

    assert kept_state.state_path(SERVICES) is None
    monkeypatch.setenv(kept_state.VARIABLE, "off")
    assert kept_state.state_path(SERVICES) is None


def test_drafters_of_other_engines_are_kept_beside_and_their_number_is_bounded(
    monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    world, first = engine(monkeypatch)
    first.members.keys["drafter"] = "another of the same method"
    world.run(first, 3000)
    known = json.loads(kept.read_text())
    many = {f"old {i}": known["drafters"]["another of the same method"] for i in range(2 * kept_state.MOST_DRAFTERS)}
    kept.write_text(json.dumps(known | {"drafters": many | known["drafters"]}))
    world, second = engine(monkeypatch)
    world.run(second, 3000)
    names = list(json.loads(kept.read_text())["drafters"])
    assert len(names) == kept_state.MOST_DRAFTERS and names[-2:] == ["another of the same method", "drafter"]
