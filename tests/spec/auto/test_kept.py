"""What one start of `auto` learned is the next one's prior: no second expensive trial, drafts from the first step."""

import copy
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.core.sampling_params import SamplingParams
from paceline.lab.live_pass_cost import PassCostModel
from paceline.llm import LLM
from paceline.models.learned_cache import FOLDER_VARIABLE, FORMAT
from paceline.spec.auto.controller import AutoProposer
from paceline.spec.auto.members import STAKE
from paceline.spec.proposer import Needs
from tests.bench.toy_llm import toy_model
from tests.spec.auto.simulation import CURVE, Planted, Simulation, alone_by_price

PASS_S = CURVE(1)
FACTS = {"model": "planted"}
LOGITS = Needs(logits=True)
USELESS: dict[str, Any] = {"accuracy": lambda step: 0.0, "confidence": 0.9, "call_s": 0.5 * PASS_S, "needs": LOGITS}
GOOD: dict[str, Any] = {"accuracy": lambda step: 0.9, "confidence": 0.9, "call_s": 0.2 * PASS_S, "needs": LOGITS}
CHEAP: dict[str, Any] = {"accuracy": lambda step: 0.9, "confidence": 0.9, "call_s": 0.01 * PASS_S}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def start(monkeypatch: pytest.MonkeyPatch, users: int, **kind: Any) -> tuple[Simulation, Planted, AutoProposer]:
    world = Simulation(users)
    drafter = Planted(world, **kind)
    return world, drafter, alone_by_price(monkeypatch, world, drafter, FACTS)


def end(proposer: AutoProposer) -> None:
    assert proposer._entry is not None
    proposer._entry.wait()
    proposer._entry.write(proposer.learned())


@pytest.mark.parametrize("users", [1, 8])
def test_a_useless_drafter_is_tried_less_at_every_further_start(monkeypatch: pytest.MonkeyPatch, users: int) -> None:
    num_calls, speedups = [], []
    for number in range(3):
        world, drafter, proposer = start(monkeypatch, users, **USELESS)
        assert proposer.is_warm == (number > 0)
        speedups.append(world.run(proposer, 200))
        num_calls.append(drafter.num_calls)
        end(proposer)
    first, *others = num_calls
    assert others[0] == others[1] > 0
    assert users > 1 or others[0] <= 0.6 * first  # of several users one step is over a stake
    assert speedups[0] < 0.99
    assert min(speedups[1:]) > (0.95 if users == 1 else 0.99)


def test_a_drafter_that_lost_on_one_text_is_found_by_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _, proposer = start(monkeypatch, 1, **USELESS)
    world.run(proposer, 200)
    assert proposer.choice.members["recycling"].state == "skipped"
    end(proposer)
    world, _, proposer = start(monkeypatch, 1, **GOOD)
    world.run(proposer, 100)
    assert proposer.choice.members["recycling"].state == "pays"


@pytest.mark.parametrize(("kind", "state"), [(GOOD, "trial"), (CHEAP, "cheap")], ids=["good", "cheap"])
@pytest.mark.parametrize("users", [1, 8])
def test_a_drafter_that_paid_drafts_from_the_first_step(
    monkeypatch: pytest.MonkeyPatch, users: int, kind: dict[str, Any], state: str
) -> None:
    world, _, proposer = start(monkeypatch, users, **kind)
    cold = world.run(proposer, 40)
    world.run(proposer, 400)
    end(proposer)
    world, drafter, proposer = start(monkeypatch, users, **kind)
    member = proposer.choice.members["recycling"]
    assert member.state == state and (state == "cheap" or member.balance_s > 0.0)
    world.run(proposer, 1)
    assert drafter.num_calls == 1 and all(world.drafts.values())
    assert world.run(proposer, 39) > 0.99 * cold
    assert member.state in ("pays", "cheap")


def test_a_drafter_that_paid_once_is_given_up_as_quickly_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _, proposer = start(monkeypatch, 1, **GOOD)
    world.run(proposer, 1000)
    end(proposer)
    for kind in (GOOD, USELESS):  # it is the same method, on other text
        world, drafter, proposer = start(monkeypatch, 1, **kind)
        speedup = world.run(proposer, 1000)
    assert proposer.choice.members["recycling"].state == "skipped"
    assert drafter.num_calls < 1.5 * STAKE / 0.5 and speedup > 0.97


def test_a_start_says_whether_it_knew_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _, proposer = start(monkeypatch, 1, **USELESS)
    world.run(proposer, 700)
    before = proposer.report()
    end(proposer)
    after = start(monkeypatch, 1, **USELESS)[2].report()
    assert (before["start"], after["start"]) == ("cold", "warm")
    assert after["members"]["recycling"]["reason"].startswith("recycling: on trial, 0.00 tokens gained < ")


def kept(folder: Path) -> Any:
    (file,) = folder.glob("*.json")
    return json.loads(file.read_text())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "no member": lambda learned: learned["members"].clear(),
    "another state": lambda learned: learned["members"]["recycling"].update(state="gone"),
    "another balance": lambda learned: learned["members"]["recycling"].update(balance_s=1.0),
    "another guess": lambda learned: learned["credit"].append(["recycling", 0, 1, 1, 5, 3]),
    "nothing": lambda learned: learned.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_by_hand_is_a_cold_start(
    monkeypatch: pytest.MonkeyPatch, folder: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    world, _, proposer = start(monkeypatch, 1, **USELESS)
    world.run(proposer, 300)
    end(proposer)
    assert start(monkeypatch, 1, **USELESS)[2].is_warm
    whole = kept(folder)
    CHANGES[change](whole["learned"])
    next(folder.glob("*.json")).write_text(json.dumps(whole))
    with caplog.at_level(logging.INFO, logger="paceline"):
        world, drafter, proposer = start(monkeypatch, 1, **USELESS)
    assert not proposer.is_warm and len(caplog.records) == 1 and caplog.records[0].levelno == logging.INFO
    world.run(proposer, 100)
    assert drafter.num_calls > 0


def test_a_debt_is_never_larger_than_what_a_trial_may_lose(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    world, _, proposer = start(monkeypatch, 1, **USELESS)
    world.run(proposer, 300)
    proposer.choice.members["recycling"].balance_s = -1e6  # a laptop that slept
    end(proposer)
    _, _, proposer = start(monkeypatch, 1, **USELESS)
    assert proposer.is_warm and proposer.choice.members["recycling"].balance_s > -100.0


def test_the_curve_goes_on_from_half_of_what_passes_had_shown() -> None:
    calibrated = {rows: CURVE(rows) for rows in (1, 2, 4, 8, 16, 32, 64)}
    old = PassCostModel(calibrated)
    for _ in range(60):
        old.observe(1, CURVE(1), 1)
        old.observe(16, 1.3 * CURVE(16), 1)
    new = PassCostModel(calibrated)
    new.begin_with(**old.learned())
    far, half = math.log(old.at(16) / CURVE(16)), math.log(new.at(16) / CURVE(16))
    assert far > 0.1 and 0.3 * far < half < 0.8 * far
    assert new.at(1, 1) == pytest.approx(old.at(1, 1), rel=0.1)
    before = copy.deepcopy(new.learned())
    new.begin_with(bent=[99.0] * len(before["bent"]), request=99.0)  # never further than passes can bend it
    assert new.at(16) < 1.3 * CURVE(16) and new.at(16, 16) < 20 * CURVE(16)


def test_two_engines_one_after_the_other(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The second measures less, knows the first one's figures, and writes the same tokens."""
    monkeypatch.setattr("paceline.engine.build.facts_of", lambda *given: FACTS)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    tokens = []
    for number in range(2):
        llm = LLM(toy_model(), max_num_seqs=4, num_kv_blocks=64, max_num_batched_tokens=64)
        auto = llm.engine.core.speculator.proposers["auto"]
        assert isinstance(auto, AutoProposer) and auto.is_warm == (number > 0)
        assert auto._entry is not None
        tokens.append(llm.generate("abcabcabc", params)[0].outputs[0].token_ids)
        auto._entry.wait()
        assert kept(folder)["learned"]["members"].keys() == auto.choice.members.keys()
        assert llm.stats()["speculation"]["auto"]["decisions"]["start"] == ("warm" if number else "cold")
    assert tokens[0] == tokens[1]
    assert len(kept(folder)["learned"]["rounds"]) <= 4


def form(found: Any) -> Any:
    """Names and types: of a list those of its first value."""
    if isinstance(found, dict):
        return {name: form(value) for name, value in found.items()}
    return [form(value) for value in found[:1]] if isinstance(found, list) else type(found).__name__


def test_the_form_of_what_is_kept_changes_only_with_the_number_of_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is not checked value by value: it must be what this code wrote."""
    world, _, proposer = start(monkeypatch, 1, **USELESS)
    world.run(proposer, 100)
    proposer._rounds.append([[1, 1.0]])
    judged = {"gain": "float", "price_s": "float", "tokens_per_s": "float", "num_judged": "int"}
    numbers = dict.fromkeys(("balance_s", "price_s", "level_s", "next_chance"), "float")
    member = {"state": "str", "levels": "int", **numbers, "judged": judged}
    expected = {
        "rounds": [[["int"]]],
        "curve": {"bent": ["float"], "request": "float"},
        "credit": [["str"]],
        "members": {"recycling": member},
    }
    found = json.loads(json.dumps(proposer.learned()))
    assert (FORMAT, form(found)) == (1, expected)
