"""A method named without a size: it drafts what pays, costs next to nothing where nothing does, and says why."""

from typing import Any

import pytest

from paceline.lab.live_pass_cost import PassCostModel
from paceline.lab.pass_cost import PassCost
from paceline.spec.auto.reasons import Inequality
from paceline.spec.methods import PROPOSERS
from paceline.spec.proposer import Needs
from tests.spec.auto.simulation import CURVE, Planted, Simulation, alone_by_price
from tests.spec.conformance_cases import ROOM, assert_nothing_failed, plain, requests
from tests.toy import run_all, toy_core

PASS_S = CURVE(1)
LOGITS, SLOTS = Needs(logits=True), Needs(lookahead_slots=4)


def never(step: int) -> float:
    return 0.0


def sometimes_slow(step: int) -> float:
    """One call in eight takes twelve passes."""
    return 12 * PASS_S if step % 8 == 5 else 0.01 * PASS_S


BAD: dict[str, dict[str, Any]] = {
    "useless": {"accuracy": never, "confidence": 0.95, "call_s": 0.05 * PASS_S},
    "useless and reads logits": {"accuracy": never, "confidence": 0.95, "needs": LOGITS, "tell_s": 0.05 * PASS_S},
    "slow": {"accuracy": lambda step: 0.5, "confidence": 0.5, "call_s": 2 * PASS_S, "needs": SLOTS},
    "slow and often right": {"accuracy": lambda step: 0.8, "confidence": 0.8, "call_s": 3 * PASS_S, "needs": SLOTS},
    "useless and slow": {"accuracy": never, "confidence": 0.9, "call_s": 4 * PASS_S, "needs": LOGITS},
    "expensive and needs nothing": {"accuracy": lambda step: 0.6, "confidence": 0.6, "call_s": 3 * PASS_S},
    "useless, expensive and needs nothing": {"accuracy": never, "confidence": 0.9, "call_s": 4 * PASS_S},
    "erratic": {"accuracy": lambda step: 0.5, "confidence": 0.5, "slow_s": sometimes_slow},
    "erratic and reads logits": {"accuracy": never, "confidence": 0.9, "slow_s": sometimes_slow, "needs": LOGITS},
    "right by turns": {"accuracy": lambda step: 0.9 * (step // 40 % 2), "confidence": 0.5, "call_s": 0.6 * PASS_S},
}


@pytest.mark.parametrize("users", [1, 8])
@pytest.mark.parametrize("kind", BAD)
def test_a_method_that_does_not_pay_costs_less_than_one_percent(
    monkeypatch: pytest.MonkeyPatch, kind: str, users: int
) -> None:
    """Of its first 3,000 steps, the first trial included, and of the next 3,000."""
    world = Simulation(users)
    drafter = Planted(world, **BAD[kind])
    proposer = alone_by_price(monkeypatch, world, drafter)
    first = world.run(proposer, 3000)
    later = world.run(proposer, 3000)
    assert drafter.num_calls > 0 and first > 0.99
    assert later > 0.99  # of what it is tried again


@pytest.mark.parametrize("needs", [Needs(), LOGITS, SLOTS], ids=["cheap", "logits", "slots"])
def test_a_method_that_pays_is_used(monkeypatch: pytest.MonkeyPatch, needs: Needs) -> None:
    world = Simulation()
    drafter = Planted(world, accuracy=lambda step: 0.8, confidence=0.8, call_s=0.15 * PASS_S, needs=needs)
    proposer = alone_by_price(monkeypatch, world, drafter)
    world.run(proposer, 200)
    assert world.run(proposer, 400) > 1.5


@pytest.mark.parametrize(
    ("level_share", "accuracy", "levels"), [(0.45, 0.75, {1, 2}), (0.05, 0.9, {4}), (1.2, 0.9, {1})]
)
def test_a_model_drafts_as_many_levels_as_pay(
    monkeypatch: pytest.MonkeyPatch, level_share: float, accuracy: float, levels: set[int]
) -> None:
    world = Simulation()
    drafter = Planted(
        world, accuracy=lambda step: accuracy, confidence=accuracy, level_s=level_share * PASS_S, needs=SLOTS
    )
    proposer = alone_by_price(monkeypatch, world, drafter)
    world.run(proposer, 300)
    speedup = world.run(proposer, 700)
    assert set(drafter.depths[-5:]) <= levels
    member = proposer.choice.members["recycling"]
    assert member.levels <= member.needs.lookahead_slots == SLOTS.lookahead_slots
    assert speedup > {0.45: 1.1, 0.05: 2.0, 1.2: 0.97}[level_share]


@pytest.mark.parametrize("accuracy", [0.6, 0.7, 0.8])
def test_rows_that_cost_more_than_calibrated_are_found_out(monkeypatch: pytest.MonkeyPatch, accuracy: float) -> None:
    """Further rows cost half as much again as was measured, so that drafts seem to pay and do not. Where every pass has
    drafts, what they are compared with must not be guessed from them."""
    measured = PassCost.of({1: 0.0033, 2: 0.0034, 4: 0.0039, 8: 0.0058, 16: 0.0092, 32: 0.0163, 64: 0.0310})
    real = PassCost.of({1: 0.0033, 2: 0.0034, 4: 0.0039, 8: 0.0058, 16: 0.0102, 32: 0.0185, 64: 0.0360})
    world = Simulation(8, length=128, curve=real)
    drafter = Planted(world, accuracy=lambda step: accuracy, confidence=accuracy, each_s=6e-5)
    proposer = alone_by_price(monkeypatch, world, drafter)
    proposer.cost = PassCostModel({rows: measured(rows) for rows in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)})
    world.run(proposer, 200)
    assert world.run(proposer, 1000) > 0.97  # 0.88 to 0.93 while passes with drafts moved the level


def test_the_reasons_are_one_inequality_in_words() -> None:
    judged = Inequality()
    assert judged.reason("on trial", None).words == "on trial, nothing judged yet"
    judged.learn(0.1, 0.31, 0.0019, 1 / 221)
    reason = judged.reason("off", False)
    assert reason.words == "off, 0.31 tokens gained < 0.42 tokens' worth of time (1.9 ms at 221 tok/s)"
    assert reason.decided == "off: gain < price"
    close = judged.reason("on for 2 of 3 requests", True)
    assert close.words.endswith("(1.9 ms at 221 tok/s): not clear enough to change that")
    assert close.decided == "on: gain < price"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("useless", "tokens gained < "),
        ("useless and reads logits", "tokens gained < "),
        ("slow and often right", "tokens gained < "),
    ],
)
def test_a_method_says_why_it_does_not_draft(monkeypatch: pytest.MonkeyPatch, kind: str, words: str) -> None:
    world = Simulation()
    proposer = alone_by_price(monkeypatch, world, Planted(world, **BAD[kind]))
    world.run(proposer, 700)
    [figures] = proposer.report()["members"].values()
    assert figures["reason"].startswith("recycling: off")
    assert words in figures["reason"] and figures["reason"].endswith(" tok/s)")
    assert figures["decided"] == "off: gain < price"
    assert figures["gain_tokens"] < figures["price_tokens"]


def test_a_method_says_why_it_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cheap one, by its price, is judged request by request; one for which logits are kept, or that takes longer
    than a row does, as a whole."""
    cheap, whole = "recycling: on for 1 of 1 requests, ", "recycling: on, "
    for needs, share, begins in [(Needs(), 0.02, cheap), (Needs(), 0.1, whole), (LOGITS, 0.02, whole)]:
        world = Simulation(length=10**4)
        drafter = Planted(world, accuracy=lambda step: 0.8, confidence=0.8, call_s=share * PASS_S, needs=needs)
        proposer = alone_by_price(monkeypatch, world, drafter)
        world.run(proposer, 300)
        figures = proposer.report()["members"]["recycling"]
        assert figures["reason"].startswith(begins) and " > " in figures["reason"]
        assert figures["decided"] == "on: gain > price" and figures["gain_tokens"] > figures["price_tokens"] > 0.0
        assert share * PASS_S < figures["price_s"] < 0.5 * PASS_S


@pytest.mark.parametrize("method", [name for name, row in PROPOSERS.items() if row.priced])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_method_by_price_writes_what_plain_decoding_writes(method: str, temperature: float) -> None:
    sizes = ("num_speculative_tokens", "node_budget", "draft_min_prob")
    options = {key: value for key, value in PROPOSERS[method].example.items() if key not in sizes}
    expected = plain(temperature=temperature)
    core = toy_core({"method": method, **options}, by_price=True, **ROOM)
    assert run_all(core, requests(method, expected, temperature=temperature)) == expected
    assert_nothing_failed(core, method)
    stats = core.speculator.stats()[method]
    assert stats["size"].startswith("by price, at most ")
    assert all(figures["reason"].startswith(name) for name, figures in stats["decisions"]["members"].items())


def test_trees_that_mean_nothing_in_part_are_offered_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though hardly any of their nodes is worth its row: `lookahead`'s window needs all of them computed."""
    world = Simulation()
    drafter = Planted(world, accuracy=lambda step: 0.05, confidence=0.01, needs=LOGITS)
    drafter.keeps_whole = True
    proposer = alone_by_price(monkeypatch, world, drafter)
    sizes = []
    for _ in range(120):
        world.run(proposer, 1)
        sizes += [len(tree) for tree in world.drafts.values()]
    assert set(sizes) == {0, drafter.length}
