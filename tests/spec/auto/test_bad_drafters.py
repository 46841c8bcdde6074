"""No drafter costs more than a hundredth, whatever it claims, and good ones are found. On a simulated clock."""

from typing import Any

import pytest

from paceline.spec.proposer import Needs
from tests.spec.auto.simulation import CURVE, Planted, Simulation, auto

PASS_S = CURVE(1)


def never(step: int) -> float:
    return 0.0


def now_and_then(step: int) -> float:
    """Right for forty steps, wrong for the next two hundred."""
    return 0.9 if step % 240 < 40 else 0.0


BAD: dict[str, dict[str, Any]] = {
    "useless": {"accuracy": never, "confidence": 0.95},
    "slow": {"accuracy": lambda step: 0.5, "confidence": 0.5, "call_s": 5 * PASS_S},
    "erratic": {"accuracy": now_and_then, "confidence": 0.9, "call_s": 0.1 * PASS_S},
    "expensive": {"accuracy": lambda step: 0.6, "confidence": 0.6, "call_s": 1.5 * PASS_S, "each_s": 0.2 * PASS_S},
    "useless and watching": {"accuracy": never, "confidence": 0.95, "needs": Needs(logits=True)},
    "expensive to tell": {"accuracy": never, "confidence": 0.95, "tell_s": 0.1 * PASS_S, "needs": Needs(logits=True)},
}


@pytest.mark.parametrize("users", [1, 8])
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_drafter_costs_less_than_a_hundredth(monkeypatch: pytest.MonkeyPatch, kind: str, users: int) -> None:
    world = Simulation(users)
    drafter = Planted(world, **BAD[kind])
    speedup = world.run(auto(monkeypatch, world, {kind: drafter}), 2000)
    assert drafter.num_calls > 0  # it was tried, although its `needs` say nothing about its price
    assert speedup > 0.99


@pytest.mark.parametrize("users", [1, 4])
@pytest.mark.parametrize("needs", [Needs(), Needs(logits=True)], ids=["cheap", "watching"])
def test_a_good_drafter_is_found_from_a_cold_start(monkeypatch: pytest.MonkeyPatch, needs: Needs, users: int) -> None:
    world = Simulation(users)
    drafter = Planted(world, accuracy=lambda step: 0.8, confidence=0.8, call_s=0.15 * PASS_S, needs=needs)
    controller = auto(monkeypatch, world, {"good": drafter})
    world.run(controller, 400)
    assert world.run(controller, 400) > 1.5 if users == 1 else 1.2


def test_a_drafter_that_was_given_up_is_tried_again_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text changes after 1500 steps."""
    world = Simulation()
    drafter = Planted(world, accuracy=lambda step: 0.8 if step > 1500 else 0.0, confidence=0.8, call_s=0.1 * PASS_S)
    controller = auto(monkeypatch, world, {"late": drafter})
    assert world.run(controller, 1500) > 0.98
    world.run(controller, 300)
    assert world.run(controller, 300) > 1.4


@pytest.mark.parametrize("users", [1, 8, 32])
@pytest.mark.parametrize("kind", sorted(set(BAD) - {"erratic"}))  # that one begins well
def test_the_first_seconds_of_a_cold_start_cost_at_most_two_percent(
    monkeypatch: pytest.MonkeyPatch, kind: str, users: int
) -> None:
    """A slow one excepted: before its first call nobody knows what it takes, and that call is paid for afterwards."""
    world = Simulation(users)
    controller = auto(monkeypatch, world, {kind: Planted(world, **BAD[kind])})
    steps = int(3.0 / CURVE(users))
    first_call_s = BAD[kind].get("call_s", 0.0)
    plain_s = world.plain_s
    world.run(controller, steps)
    lost_s = world.clock.now_s - (world.plain_s - plain_s) - max(0.0, first_call_s - PASS_S)
    assert lost_s < 0.02 * world.clock.now_s


def test_of_two_drafters_that_draft_the_same_the_cheaper_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def right(step: int) -> float:
        return 0.9

    world = Simulation()
    drafters = {
        name: Planted(world, accuracy=right, confidence=0.9, call_s=cost_s, length=4)
        for name, cost_s in [("cheap", 0.02 * PASS_S), ("expensive", 0.5 * PASS_S)]
    }
    controller = auto(monkeypatch, world, dict(drafters))
    world.run(controller, 600)
    before = {name: one.num_calls for name, one in drafters.items()}
    world.run(controller, 400)
    calls = {name: one.num_calls - before[name] for name, one in drafters.items()}
    assert calls["cheap"] > 350 and calls["expensive"] < 100


def test_a_price_is_measured_and_not_inferred(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {}
    for name, call_s in [("a", 0.001), ("b", 0.004)]:
        world = Simulation()
        drafter = Planted(world, accuracy=lambda step: 0.9, confidence=0.9, call_s=call_s)
        controller = auto(monkeypatch, world, {name: drafter})
        world.run(controller, 300)
        figures[name] = controller.report()["members"][name]["price_s"]
    assert figures["a"] == pytest.approx(0.001, rel=0.2) and figures["b"] == pytest.approx(0.004, rel=0.2)


@pytest.mark.parametrize("users", [1, 32])
def test_where_nothing_pays_long_runs_of_steps_are_skipped(monkeypatch: pytest.MonkeyPatch, users: int) -> None:
    """All drafters alike; what it takes to think of them again comes out of the bucket."""
    world = Simulation(users, length=1000)
    drafters: dict[str, Any] = {
        "useless": Planted(world, **BAD["useless"], call_s=0.02 * PASS_S),
        "slow": Planted(world, **BAD["slow"]),
        "watching": Planted(world, **BAD["useless and watching"], call_s=0.1 * PASS_S),
    }
    controller = auto(monkeypatch, world, drafters)
    world.run(controller, 400)
    before = world.num_skipped
    speedup = world.run(controller, 1000)
    assert world.num_skipped - before > 0.4 * 1000
    assert speedup > 0.99


def test_a_new_request_is_noticed_in_a_run_of_skipped_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts for every second request are right: each is found soon after it arrives."""
    world = Simulation(length=200)
    drafter = Planted(world, accuracy=lambda step: 0.9 if world.num_admitted % 2 else 0.0, confidence=0.9)
    controller = auto(monkeypatch, world, {"half": drafter})
    world.run(controller, 1000)
    assert world.run(controller, 3000) > 1.25
