"""The controller: what it learns, what it chooses, and that it neither loses nor changes a token."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bench.replay.recording import Recorded
from paceline.bench.replay.replay import Replay, ReplayResult
from paceline.core.forward import ForwardBatch
from paceline.core.tree import DraftTree
from paceline.lab.live_pass_cost import PassCostModel
from paceline.lab.pass_cost import PassCost
from paceline.spec.auto.controller import AutoProposer
from paceline.spec.auto.cost import calibrate
from paceline.spec.auto.members import MemberChoice
from paceline.spec.auto.select import above_bar, path_chances, select
from paceline.spec.merge.merge import MergeProposer
from paceline.spec.proposer import StepContext
from tests.toy import run_all, toy_core, toy_request

VOCAB = 5000
# A pass takes long beside the drafters' Python, so that these tests do not measure the machine they run on.
CHEAP_ROWS = PassCost.of({1: 0.50, 8: 0.55, 16: 0.70, 32: 1.0, 64: 1.8})
EXPENSIVE_ROWS = PassCost.linear(0.01, 0.5)


# -- the cost model ----------------------------------------------------------------------------------------------------


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


def test_a_slow_second_does_not_change_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    class Target:
        draws_tokens = False

        def forward(self, batch: ForwardBatch, kv_cache: torch.Tensor) -> Any:
            nonlocal now_s
            slowness = 1.7 if 0.2 < now_s < 0.8 else 1.0
            now_s += slowness * CHEAP_ROWS(len(batch.token_ids)) / 100
            return SimpleNamespace(logits=torch.zeros(1, 1), tokens=None)

    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    services: Any = SimpleNamespace(
        decoder=Target(),
        kv_cache=torch.zeros(1),
        block_size=16,
        num_slots=4096,
        max_model_len=1024,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
    )
    measured = calibrate(services)
    for rows in (2, 8, 16, 64):
        assert measured[rows] / measured[1] == pytest.approx(CHEAP_ROWS(rows) / CHEAP_ROWS(1), rel=0.02)


@given(st.lists(st.tuples(st.integers(1, 1500), st.floats(1e-4, 10.0)), max_size=50))
def test_more_rows_never_cost_less(observations: list[tuple[int, float]]) -> None:
    model = PassCostModel()
    for rows, seconds in observations:
        model.observe(rows, seconds)
    curve = [model.at(rows) for rows in range(1, 1200)]
    assert all(later >= earlier > 0 for earlier, later in itertools.pairwise(curve))
    assert model.at(700) == pytest.approx(curve[699])


# -- the selection -----------------------------------------------------------------------------------------------------


def _trees() -> st.SearchStrategy[list[DraftTree]]:
    @st.composite
    def tree(draw: st.DrawFn) -> DraftTree:
        size = draw(st.integers(0, 4))
        parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
        confidence = [draw(st.floats(0.05, 0.99)) for _ in range(size)]
        return DraftTree(list(range(size)), parents, confidence=confidence)

    return st.lists(tree(), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(_trees(), st.floats(0.0, 0.5))
def test_no_other_choice_of_nodes_is_faster(trees: list[DraftTree], slope: float) -> None:
    cost = PassCostModel({1: 1.0, 2: 1.0 + slope})
    chances = [path_chances(tree) for tree in trees]
    chosen = select(chances, len(trees), cost, margin=1.0)
    for tree, keep in zip(trees, chosen.keep, strict=True):
        assert all(tree.parents[node] in (-1, *keep) for node in keep)

    def rate(kept: Sequence[tuple[int, int]]) -> float:
        return (len(trees) + sum(chances[i][node] for i, node in kept)) / cost.at(len(trees) + len(kept))

    nodes = [(i, node) for i, tree in enumerate(trees) for node in range(len(tree))]
    best = max(
        (rate(kept) for size in range(len(nodes) + 1) for kept in itertools.combinations(nodes, size)), default=0.0
    )
    assert rate([(i, node) for i, keep in enumerate(chosen.keep) for node in keep]) >= best * (1 - 1e-9)


def test_a_margin_excludes_marginal_nodes() -> None:
    cost = PassCostModel({1: 1.0, 2: 1.5})
    assert select([[0.55]], 1, cost, margin=1.0).num_nodes == 1
    assert select([[0.55]], 1, cost, margin=1.15).num_nodes == 0


def test_the_longer_drafting_took_the_more_nodes_are_kept() -> None:
    cost = PassCostModel({1: 1.0, 2: 1.2})
    chances = [[0.9, 0.5, 0.3, 0.2, 0.1]]
    sizes = [select(chances, 1, cost, 1.0, drafting_s).num_nodes for drafting_s in (0.0, 0.5, 5.0)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


@given(_trees())
def test_nodes_above_the_bar_are_trees_and_part_of_a_full_selection(trees: list[DraftTree]) -> None:
    """On a straight cost curve, where each row costs the same."""
    cost = PassCostModel({1: 1.0, 2: 1.1})
    chances = [path_chances(tree) for tree in trees]
    chosen = select(chances, len(trees), cost, margin=1.0)
    keep = above_bar(chances, chosen.bar)
    for tree, nodes, own, full in zip(trees, keep, chances, chosen.keep, strict=True):
        assert all(tree.parents[node] in (-1, *nodes) for node in nodes)
        assert all(node in full or own[node] == pytest.approx(chosen.bar) for node in nodes)


def test_where_further_rows_are_expensive_nodes_like_those_kept_pass_the_bar() -> None:
    """Two rows cost almost nothing, each further one more than a token."""
    cost = PassCostModel({1: 1.0, 2: 1.01, 3: 1.02, 4: 4.0, 5: 7.0})
    chances = [[0.9, 0.8, 0.7, 0.6]]
    chosen = select(chances, 1, cost, margin=1.0)
    assert chosen.keep == [[0, 1]]
    assert above_bar(chances, chosen.bar) == [[0, 1]]


# -- the whole ---------------------------------------------------------------------------------------------------------


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
    assert result.speedup > (4.0 if concurrency == 1 else 1.5)


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize(("kind", "cost"), [("noise", CHEAP_ROWS), ("noise", EXPENSIVE_ROWS), ("loop", EXPENSIVE_ROWS)])
def test_it_is_never_slower_than_plain_decoding(kind: str, cost: PassCost, concurrency: int) -> None:
    assert _replay([kind] * concurrency, cost, concurrency).speedup > 0.97


def test_in_one_batch_the_nodes_go_to_the_requests_whose_drafts_are_accepted() -> None:
    recorded = [_recorded(kind, seed) for seed, kind in enumerate(["loop", "noise", "noise", "noise"])]
    replay = Replay(recorded, {"method": "auto", "members": ["ngram", "suffix"]}, concurrency=4, pass_cost=CHEAP_ROWS)
    result = replay.run()
    assert result.counts.draft_acceptance_rate > 0.5  # a row costs a hundredth of a pass: unlikely nodes pay as well
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


def test_the_trees_of_a_member_that_drafts_alone_are_offered_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach the target under its name, in the steps that are not evaluated."""
    passed_on: list[DraftTree] = []

    def propose_alone(self: MergeProposer, *given: Any) -> list[DraftTree]:
        trees = inner(self, *given)
        passed_on.extend(trees)
        return trees

    inner = MergeProposer.propose_alone
    monkeypatch.setattr(MergeProposer, "propose_alone", propose_alone)
    for name, value in [("pays_alone", "suffix"), ("asks_batch", True), ("has_cheap", False), ("has_trial", False)]:
        always = property(lambda self, value=value: value, lambda self, value: None)
        monkeypatch.setattr(MemberChoice, name, always, raising=False)
    replay = Replay([_recorded("loop", 1, 400)], {"method": "auto"}, pass_cost=CHEAP_ROWS)
    result = replay.run()
    assert result.counts.mean_acceptance_length > 1.5
    assert {names for tree in passed_on for names in tree.members or []} == {("suffix",)}
    decisions = replay.speculator.stats()["auto"]["decisions"]
    assert decisions["offered_nodes"] >= sum(len(tree) for tree in passed_on) > 0


def test_it_says_what_it_decided_and_why() -> None:
    replay = Replay([_recorded("loop", 1)], {"method": "auto"}, pass_cost=CHEAP_ROWS)
    replay.run()
    decisions = replay.speculator.stats()["auto"]["decisions"]
    assert decisions["offered_nodes"] > 0 and decisions["asked"] > 0
    assert "more tokens for" in decisions["last_decision"]
    off = Replay([_recorded("noise", 2, 600)], {"method": "auto"}, pass_cost=EXPENSIVE_ROWS)
    off.run()
    decisions = off.speculator.stats()["auto"]["decisions"]
    assert decisions["last_decision"].startswith("off: no draft")
    assert decisions["reasons"]["skipped"] > 100


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
    recorded = [_recorded("noise", seed, 1000) for seed in range(3)]
    replay = Replay(recorded, {"method": "auto"}, concurrency=1, pass_cost=EXPENSIVE_ROWS)
    num_steps = len(list(replay.steps()))
    assert calls["propose"] < 0.4 * num_steps and calls["observe"] < 0.4 * num_steps
    assert calls["gone"] == 3
    steps = replay.speculator.stats()["auto"]["decisions"]["steps"]
    assert num_steps - 8 <= steps <= num_steps


def test_after_a_selection_in_which_nothing_pays_a_good_draft_still_passes_the_bar() -> None:
    cost = PassCostModel({1: 1.0, 2: 1.2})
    nothing = select([[0.1]], 1, cost, margin=1.1)
    assert nothing.num_nodes == 0
    assert above_bar([[0.9, 0.15]], nothing.bar) == [[0]]


def test_one_wrong_point_of_the_calibration_does_not_raise_all_above_it() -> None:
    true = {1: 10.0, 2: 10.5, 3: 11.0, 4: 11.5, 8: 14.0}
    disturbed = PassCostModel(true | {2: 20.0})
    assert disturbed.at(8) / disturbed.at(1) == pytest.approx(1.4, rel=0.2)
    for _ in range(12):
        disturbed.observe(1, 0.0100)
        disturbed.observe(2, 0.0105)
    assert disturbed.at(2) / disturbed.at(1) < 1.15
