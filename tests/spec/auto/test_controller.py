"""The controller as a whole: it neither loses nor changes a token, follows the text, and says what it decided."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.bench.replay.recording import Recorded
from paceline.bench.replay.replay import Replay, ReplayResult
from paceline.core.tree import DraftTree
from paceline.lab.pass_cost import PassCost
from paceline.spec.auto.controller import AutoProposer
from paceline.spec.proposer import StepContext
from tests.toy import run_all, toy_core, toy_request

VOCAB = 5000
# A pass takes long beside the drafters' Python, so that these tests do not measure the machine they run on.
CHEAP_ROWS = PassCost.of({1: 0.50, 8: 0.55, 16: 0.70, 32: 1.0, 64: 1.8})
EXPENSIVE_ROWS = PassCost.linear(0.01, 0.5)
HOPELESS_ROWS = PassCost.of({1: 0.5, 2: 1.1, 3: 1.7})  # a row costs more than a pass


def _recorded(kind: str, seed: int, num_tokens: int = 200) -> Recorded:
    """`loop`: the same forty tokens again and again. `noise`: no token ever comes twice in a row of two."""
    rng = random.Random(f"{kind}/{seed}")
    if kind == "loop":
        period = [rng.randrange(VOCAB) for _ in range(40)]
        tokens = (period * (num_tokens // 40 + 2))[: num_tokens + 45]
    else:
        tokens = [rng.randrange(VOCAB) for _ in range(num_tokens + 45)]
    return Recorded(f"{kind}-{seed}", kind, tokens[:45], tokens[45:], [[0]] * num_tokens, 0.0, VOCAB)


def _replay(kinds: Sequence[str], cost: PassCost, concurrency: int, **options: object) -> ReplayResult:
    recorded = [_recorded(kind, seed) for seed, kind in enumerate(kinds)]
    return Replay(recorded, {"method": "auto", **options}, concurrency=concurrency, pass_cost=cost).run()


@pytest.mark.parametrize("concurrency", [1, 8])
def test_it_speculates_where_it_pays(concurrency: int) -> None:
    result = _replay(["loop"] * concurrency, CHEAP_ROWS, concurrency)
    assert result.speedup > (3.5 if concurrency == 1 else 1.5)  # it begins with plain decoding


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize(("kind", "cost"), [("noise", CHEAP_ROWS), ("noise", EXPENSIVE_ROWS), ("loop", EXPENSIVE_ROWS)])
def test_it_is_never_slower_than_plain_decoding(kind: str, cost: PassCost, concurrency: int) -> None:
    assert _replay([kind] * concurrency, cost, concurrency).speedup > 0.97


def test_in_one_batch_the_nodes_go_to_the_requests_whose_drafts_are_accepted() -> None:
    recorded = [_recorded(kind, seed) for seed, kind in enumerate(["loop", "noise", "noise", "noise"])]
    drafted: Counter[bool] = Counter()  # nodes, by whether they are for the loop

    def count(tree: DraftTree, future: Sequence[int]) -> None:
        drafted[set(future) <= set(recorded[0].output_token_ids)] += len(tree)

    config = {"method": "auto", "members": ["ngram", "suffix"]}
    result = Replay(recorded, config, concurrency=4, pass_cost=CHEAP_ROWS, on_draft=count).run()
    assert drafted[True] > 5 * drafted[False] / 3  # for each of the three others
    assert result.counts.num_accepted_tokens > 150


def test_it_follows_a_change_within_fifty_steps() -> None:
    """Noise, a loop, then noise in one engine: loops are drafted within fifty steps, and nothing in the noise after."""
    recorded = [_recorded(kind, seed, 300) for seed, kind in enumerate(["noise", "loop", "noise"])]
    replay = Replay(recorded, {"method": "auto"}, concurrency=1, pass_cost=CHEAP_ROWS)
    emitted = list(replay.steps())
    first = next(i for i, tokens in enumerate(emitted[300:]) if tokens >= 8)
    assert first <= 50
    back = emitted[-250:]  # the last phase: plain decoding again
    assert sum(back) / len(back) < 1.1
    assert replay.result.counts.num_draft_tokens < 700


def test_limits_set_by_the_user_are_kept() -> None:
    recorded = [_recorded("loop", 1)]
    replay = Replay(recorded, {"method": "auto", "node_budget": 3, "num_speculative_tokens": 3}, pass_cost=CHEAP_ROWS)
    assert max(replay.steps()) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_those_of_plain_decoding(temperature: float) -> None:
    def outputs(speculative: dict[str, object] | None) -> list[list[int]]:
        core = toy_core(speculative, sharpness=6.0)
        prompts = [[1, 2, 3, 1, 2, 3], [4, 4, 4, 4], [5, 6, 5, 6, 5], [7]]
        requests = [
            toy_request(str(i), prompt, max_tokens=40, seed=i, temperature=temperature, ignore_eos=True)
            for i, prompt in enumerate(prompts)
        ]
        return run_all(core, requests)

    assert outputs({"method": "auto"}) == outputs(None)


def test_it_says_what_it_decided_and_why() -> None:
    replay = Replay([_recorded("loop", 1)], {"method": "auto"}, pass_cost=CHEAP_ROWS)
    replay.run()
    decisions = replay.speculator.stats()["auto"]["decisions"]
    assert decisions["offered_nodes"] > 0 and decisions["asked"] > 0
    assert "more tokens for" in decisions["last_decision"]
    off = Replay([_recorded("noise", 2)], {"method": "auto"}, pass_cost=EXPENSIVE_ROWS)
    off.run()
    decisions = off.speculator.stats()["auto"]["decisions"]
    assert decisions["last_decision"].startswith("off: no draft")
    hopeless = Replay([_recorded("noise", 2)], {"method": "auto"}, pass_cost=HOPELESS_ROWS)
    hopeless.run()
    decisions = hopeless.speculator.stats()["auto"]["decisions"]
    assert decisions["reasons"]["skipped"] > 100
    said = decisions["members"]["suffix"]
    assert said["state"] == "not asked" and said["reason"].startswith("not asked: 0.00 tokens expected <")
    assert said["price_tokens"] > said["gain_tokens"] == 0.0


def test_where_all_requests_are_skipped_the_controller_is_rarely_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither proposes nor observes then, unless a request has ended; its own count of steps stays right."""
    calls: Counter[str] = Counter()

    def counted(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: AutoProposer, step: StepContext, *rest: Any) -> Any:
            calls[name] += 1
            calls["gone"] += len(step.gone) if name == "observe" else 0
            return inner(self, step, *rest)

        return call

    for name in ("observe", "propose"):
        monkeypatch.setattr(AutoProposer, name, counted(name, getattr(AutoProposer, name)))
    recorded = [_recorded("noise", seed, 400) for seed in range(3)]
    replay = Replay(recorded, {"method": "auto"}, concurrency=1, pass_cost=HOPELESS_ROWS)
    num_steps = len(list(replay.steps()))
    assert calls["propose"] < 0.4 * num_steps and calls["observe"] < 0.4 * num_steps
    assert calls["gone"] == 3
    steps = replay.speculator.stats()["auto"]["decisions"]["steps"]
    assert num_steps - 8 <= steps <= num_steps
