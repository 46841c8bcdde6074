"""Merged trees: nodes are joined, names kept, the budget goes to members that are right, others are skipped."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.core.tree import DraftTree
from paceline.spec.merge.credit import Credit, make_guess
from paceline.spec.merge.members import Members
from paceline.spec.merge.merge import MergeProposer, side_by_side
from paceline.spec.merge.usefulness import EARLY_REVIEWS, PROBE_EVERY, PROBE_STEPS, REVIEW_EVERY, Usefulness
from paceline.spec.proposer import Budget, Proposer, RequestPass, StepContext
from tests.spec.replaying import SERVICES, replay, request, speculator, tokens_per_step
from tests.toy import VOCAB, run_all, toy_core, toy_request


class Fixed(Proposer):
    """A member that always drafts the same tree."""

    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self.tree.cut(budget.num_nodes) for budget in budgets]


def merge_of(**trees: DraftTree) -> MergeProposer:
    merged = MergeProposer(SERVICES, Budget(32, 16), members=())
    merged.members = Members({name: Fixed(tree) for name, tree in trees.items()}, dict.fromkeys(trees, Budget(32, 16)))
    merged.members.clock = lambda: 0.0
    merged.usefulness = Usefulness(list(trees))
    merged.usefulness.clock = lambda: 0.0  # asking costs nothing: no member is skipped
    return merged


def propose(merged: MergeProposer, num_nodes: int = 32) -> DraftTree:
    [tree] = merged.propose(StepContext([request([1])]), [Budget(num_nodes, 16)])
    return tree


def test_same_paths_are_joined_and_name_all_their_members() -> None:
    tree = propose(merge_of(a=DraftTree.chain([5, 6, 7]), b=DraftTree.chain([5, 6, 8])))
    nodes = {tuple(tree.token_ids[i] for i in tree.ancestors(n)): (tree.members or [])[n] for n in range(len(tree))}
    assert nodes == {(5,): ("a", "b"), (5, 6): ("a", "b"), (5, 6, 7): ("a",), (5, 6, 8): ("b",)}


def test_the_budget_goes_to_the_member_that_has_been_right() -> None:
    merged = merge_of(right=DraftTree.chain([1, 2, 3, 4]), wrong=DraftTree.chain([9, 9, 9, 9]))
    for _ in range(30):
        propose(merged)
        merged._learn(merged._candidates["a"], [1, 2, 3, 4, 5])
    tree = propose(merged, num_nodes=4)
    assert tree.token_ids == [1, 2, 3, 4] and set(tree.members or []) == {("right",)}
    for _ in range(200):  # from now on the other one is right
        propose(merged)
        merged._learn(merged._candidates["a"], [9, 9, 9, 9, 9])
    assert propose(merged, num_nodes=4).token_ids == [9, 9, 9, 9]


def test_nodes_that_were_not_verified_are_judged_too() -> None:
    """A member without budget can get it: the tokens that were emitted show that it was right."""
    merged = merge_of(first=DraftTree.chain([1, 2]), second=DraftTree.chain([8, 9]))
    for _ in range(60):
        propose(merged, num_nodes=1)
        merged._learn(merged._candidates["a"], [8, 9, 5])
    assert propose(merged, num_nodes=2).token_ids == [8, 9]


def test_a_node_that_two_members_draft_is_likelier_than_a_contested_one() -> None:
    credit = Credit()
    alone, both = [make_guess("a", 1, 0, 0.5)], [make_guess("a", 1, 0, 0.5), make_guess("b", 1, 0, 0.5)]
    rng = random.Random(0)
    for _ in range(400):
        credit.record(alone, True, rng.random() < 0.2)
        credit.record(both, False, rng.random() < 0.9)
    assert credit.chance(both, False) > 0.8 > 0.3 > credit.chance(alone, True)


def test_chances_are_learned_by_rank_and_depth() -> None:
    credit = Credit()
    rng = random.Random(1)
    truth = {(1, 0): 0.8, (1, 1): 0.1, (4, 0): 0.3}
    for _ in range(2000):
        for (depth, rank), chance in truth.items():
            credit.record([make_guess("a", depth, rank, None)], False, rng.random() < chance)
    for (depth, rank), chance in truth.items():
        assert credit.chance([make_guess("a", depth, rank, None)], False) == pytest.approx(chance, abs=0.06)


def run_usefulness(use: Usefulness, hits: dict[str, list[list[str]]], num_steps: int) -> dict[str, int]:
    """Drive it with made-up times: a step takes 10 ms, asking a member 1 ms."""
    asked = dict.fromkeys(use.accounts, 0)
    for _ in range(num_steps):
        for name in use.worth_asking():
            asked[name] += 1
            use.accounts[name].spent_s = 0.001
        use._step_s = 0.010
        use.record(hits["accepted"], 1 + len(hits["accepted"]))
    return asked


def test_a_member_that_gains_nothing_is_skipped_and_probed() -> None:
    use = Usefulness(["good", "useless"])
    asked = run_usefulness(use, {"accepted": [["good"], ["good", "useless"]]}, 4 * PROBE_EVERY)
    assert asked["good"] == 4 * PROBE_EVERY
    assert asked["useless"] <= REVIEW_EVERY + 4 * PROBE_STEPS
    assert not use.accounts["useless"].is_used


def test_an_expensive_member_is_skipped_after_a_few_steps() -> None:
    """One that takes three times as long as a pass and brings one token."""
    use = Usefulness(["good", "expensive"])
    asked = 0
    for _ in range(REVIEW_EVERY):
        for name in use.worth_asking():
            use.accounts[name].spent_s = 0.030 if name == "expensive" else 0.0001
            asked += name == "expensive"
        use._step_s = 0.010
        use.record([["good"], ["expensive"]], 3)
    assert asked < EARLY_REVIEWS[0]


def test_of_two_members_that_draft_the_same_one_stays_in_use() -> None:
    use = Usefulness(["a", "b"])
    run_usefulness(use, {"accepted": [["a", "b"], ["a", "b"]]}, 20 * REVIEW_EVERY)
    assert sum(account.is_used for account in use.accounts.values()) == 1


def test_a_skipped_member_is_used_again_when_it_would_pay() -> None:
    use = Usefulness(["a", "b"])
    run_usefulness(use, {"accepted": [["a"]]}, 4 * REVIEW_EVERY)
    assert not use.accounts["b"].is_used
    run_usefulness(use, {"accepted": [["b"], ["b"], ["b"]]}, 12 * PROBE_EVERY)
    assert use.accounts["b"].is_used


class Watcher(Fixed):
    """Counts the passes and the ended requests that it is told of."""

    def __init__(self, tree: DraftTree) -> None:
        super().__init__(tree)
        self.num_passes = self.num_gone = 0

    def observe(self, step: StepContext) -> None:
        self.num_passes += len(step.passes)
        self.num_gone += len(step.gone)


def test_a_skipped_member_is_told_only_which_requests_ended() -> None:
    merged = merge_of(a=DraftTree.chain([1]), b=DraftTree.chain([2]))
    watcher = Watcher(DraftTree.chain([2]))
    merged.members.proposers["b"] = watcher
    merged.usefulness.accounts["b"].is_used = False
    merged.usefulness._num_steps = PROBE_STEPS  # between two probes
    propose(merged)
    job = request([1])
    merged.observe(StepContext([], [RequestPass(job, range(1), 0, 1)], [job]))
    assert (watcher.num_passes, watcher.num_gone) == (0, 1)


def phrases(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    stock = [[rng.randrange(50_000) for _ in range(rng.randrange(3, 12))] for _ in range(20)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += rng.choice(stock) if rng.random() < 0.7 else [rng.randrange(50_000)]
    return tokens[:length]


def test_a_useless_member_costs_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """An oracle that is always wrong beside two that are often right: under 2 % of the tokens per step.

    There is no model here, so asking is set to cost a thousandth of a pass."""
    monkeypatch.setattr(
        Usefulness,
        "_profit_s",
        lambda self, account, margin=1.0: account.own_tokens + 1.0 / max(account.num_asked, 1) - margin * 0.001,
    )
    prompt, output = phrases(1, 100), phrases(1, 1500)
    wrong = {"method": "oracle", "sequences": [[*prompt, *output]], "accuracy": 0.0}
    lengths = []
    for members in (["ngram", "suffix"], ["ngram", "suffix", wrong]):
        spec = speculator({"method": "merge", "members": members, "node_budget": 8})
        lengths.append(tokens_per_step(replay(spec, prompt, output)))
    assert lengths[1] > 0.98 * lengths[0]
    before = spec.stats()["merge"]
    replay(spec, prompt, output, "again")
    after = spec.stats()["merge"]
    wasted = after["by_member"]["oracle"]["num_draft_tokens"] - before["by_member"]["oracle"]["num_draft_tokens"]
    assert wasted < 0.02 * (after["num_draft_tokens"] - before["num_draft_tokens"])


def test_statistics_by_member_add_up() -> None:
    spec = speculator({"method": "merge", "members": ["ngram", "suffix"], "node_budget": 12})
    replay(spec, phrases(2, 80), phrases(2, 600))
    stats = spec.stats()["merge"]
    assert stats["num_wasted_tokens"] == stats["num_draft_tokens"] - stats["num_accepted_tokens"]
    assert sum(stats["accepted_per_position"]) == stats["num_accepted_tokens"]
    members = stats["by_member"]
    assert set(members) == {"ngram", "suffix"}
    for counts in members.values():
        assert 0 < counts["num_accepted_tokens"] <= stats["num_accepted_tokens"]
    assert sum(counts["num_accepted_tokens"] for counts in members.values()) >= stats["num_accepted_tokens"]
    assert stats["num_emitted_tokens"] == 600 and stats["draft_s"] > 0.0


def test_sampled_members_keep_their_trees_and_their_q() -> None:
    q = torch.eye(50)[[3, 4]]
    trees = {
        "a": DraftTree.chain([3, 4]).__class__([3, 4], [-1, 0], q),
        "b": DraftTree([3, 4], [-1, 0], q),
        "fixed": DraftTree.chain([7]),
    }
    tree = side_by_side(trees, Budget(9, 4))
    assert tree.token_ids == [3, 4, 3, 4, 7] and tree.parents == [-1, 0, -1, 2, -1]  # duplicates stay
    assert tree.members == [("a",), ("a",), ("b",), ("b",), ("fixed",)]
    assert tree.draft_probs is not None and tree.draft_probs.argmax(dim=1).tolist() == [3, 4, 3, 4, 7]
    assert len(side_by_side(trees, Budget(3, 4))) == 3


def test_several_draft_models_under_rule_r3() -> None:
    """SpecInfer: two draft models sample, each keeps its own q, one tree verifies both; the target stays exact.

    Twins of the target are never rejected at the first token."""
    from paceline.verifiers import make_verifier
    from tests.spec.model.test_model_drafting import twin

    members: list[dict[str, Any]] = [
        {"method": "draft_model", "model": twin(), "draft_sampling": "sampled"},
        {"method": "draft_model", "model": twin(1.0), "draft_sampling": "sampled"},
    ]
    config = {"method": "merge", "members": members, "node_budget": 8, "rejection_sample_method": "multi_step"}
    core = toy_core(config, num_blocks=256)
    core.verifier = core.launcher.verifier = make_verifier("multi_step")
    run_all(core, [toy_request(str(i), [1, 2, i], temperature=1.0, seed=i, ignore_eos=True) for i in range(6)])
    stats = core.speculator.stats()["merge"]
    assert stats["accepted_per_position"][0] == stats["num_drafts"] > 0
    assert set(stats["by_member"]) == {"draft_model", "draft_model#2"}
    assert core.speculator.needs.draft_probs and VOCAB


def test_the_more_expensive_a_skipped_member_the_less_often_it_is_probed() -> None:
    """Probing takes a bounded share of the time, even of a member that costs half a step."""
    asked = {}
    for cost_s in (0.0001, 0.005):
        use = Usefulness(["good", "useless"])
        steps = 0
        for _ in range(8000):
            for name in use.worth_asking():
                use.accounts[name].spent_s = cost_s if name == "useless" else 0.0001
                steps += name == "useless" and not use.accounts[name].is_used
            use._step_s = 0.010
            use.record([["good"]], 2)
        asked[cost_s] = steps
    assert asked[0.005] * 0.005 < 0.01 * 8000 * 0.010
    assert asked[0.0001] >= 20 * PROBE_STEPS > asked[0.005] > 0


def test_every_member_s_time_is_in_the_statistics() -> None:
    spec = speculator({"method": "merge", "members": ["ngram", "suffix"], "node_budget": 12})
    replay(spec, phrases(3, 80), phrases(3, 300))
    stats = spec.stats()["merge"]
    parts = [counts["draft_s"] for counts in stats["by_member"].values()]
    assert all(part > 0.0 for part in parts) and sum(parts) < stats["draft_s"]
