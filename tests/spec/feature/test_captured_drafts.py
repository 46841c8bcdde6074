"""Whole drafts as one function of tensors, the one that a CUDA graph holds, against the proposer going level by level.

Here its plain twin runs: no graph and no Triton, the same inputs, table and choice of nodes."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.models.decoder import Decoder
from paceline.models.drafters.eagle import Eagle
from paceline.models.drafters.eagle3 import Eagle3
from paceline.models.drafters.paged import Placement, TorchLayers
from paceline.models.layout import expected_shapes
from paceline.ops.random import Purpose, id_constants, keyed_noise, noise_key, noise_keys
from paceline.spec.engine_parts import EngineParts
from paceline.spec.feature import eagle3
from paceline.spec.feature.captured_drafts import DRAFT_CLOCK
from paceline.spec.feature.device_drafts import plain_drafts
from paceline.spec.feature.draft_scores import DraftScores
from paceline.spec.feature.eagle import EagleProposer
from paceline.spec.feature.eagle3 import Eagle3Proposer
from paceline.spec.proposer import Budget, RequestPass, StepContext
from tests.spec.feature.test_native_drafts import CONFIG, network
from tests.toy import toy_request

BLOCK_SIZE, NUM_BLOCKS, BLOCKS_EACH = 4, 96, 16
LARGEST = Budget(16, 6)


class Pair:
    """Two proposers that see the same steps: one drafts level by level, the other at once."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        device: str = "cpu",
        made: Eagle3 | Eagle | None = None,
        max_num_seqs: int | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(5)
        weights = {name: 0.3 * torch.randn(shape) for name, shape in expected_shapes(CONFIG).items()}
        decoder = Decoder(CONFIG, weights, device=device)
        services = EngineParts(
            vocab_size=CONFIG.vocab_size,
            max_model_len=BLOCKS_EACH * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            num_slots=NUM_BLOCKS * BLOCK_SIZE,
            device=torch.device(device),
            decoder=decoder,
            max_num_seqs=max_num_seqs,
        )
        monkeypatch.setattr(eagle3, "placement", lambda _: Placement(torch.device(device), native=False))
        monkeypatch.setattr(eagle3, "load_network", lambda *_: deepcopy(made or network()))
        kind = EagleProposer if isinstance(made, Eagle) else Eagle3Proposer
        given = {"model": None, "draft_sampling": None, "draft_width": 3, "draft_min_prob": 0.0} | options
        self.by_level, self.whole = (kind(services, LARGEST, **given) for _ in range(2))
        self.by_level._captured = None
        if self.whole._captured is None:
            layers = self.whole._layers
            assert isinstance(layers, TorchLayers)
            self.whole._captured = plain_drafts(
                self.whole._network, decoder, layers, self.whole._scores, services, LARGEST, given["draft_width"]
            )
        self.whole._grow = lambda growing: pytest.fail("went level by level")  # type: ignore[method-assign]
        self.uses = np.zeros(NUM_BLOCKS, dtype=np.int32)
        self.rng = np.random.default_rng(0)
        self.device = device

    def request(self, name: str, num_tokens: int, blocks: list[int], **params: Any) -> Request:
        tokens = self.rng.integers(0, CONFIG.vocab_size, num_tokens).tolist()
        request = toy_request(name, tokens, seed=len(name), **params)
        self.give_blocks(request, blocks)
        return request

    def give_blocks(self, request: Request, blocks: list[int], num_shared: int = 0) -> None:
        request.block_ids = blocks
        self.uses[blocks[num_shared:]] += 1

    def step(self, requests: list[Request], starts: list[int], gone: list[Request] | None = None) -> StepContext:
        """A pass over the tokens from `starts` on, the last one excepted; each second row belongs to nobody, as
        rejected nodes do."""
        passes, begin = [], 0
        for request, start in zip(requests, starts, strict=True):
            count = request.num_tokens - 1 - start
            accepted = list(range(1, 2 * count - 2, 2)) if count > 1 else []
            seen = RequestPass(request, range(begin, begin + 2 * count), start, 1, accepted=accepted)
            seen.block_ids = tuple(request.block_ids)
            passes.append(seen)
            begin += 2 * count
        hidden = torch.from_numpy(self.rng.standard_normal((begin, 3, CONFIG.hidden_size), dtype=np.float32))
        step = StepContext(requests, passes, gone or [], None, hidden.to(self.device), (0, 2, 3), self.uses)
        self.show(step)
        return step

    def show(self, step: StepContext) -> None:
        for proposer in (self.by_level, self.whole):
            proposer.observe(step)

    def compare(self, step: StepContext, budgets: list[Budget]) -> list[DraftTree]:
        expected = self.by_level.propose(step, budgets)
        trees = self.whole.propose(step, budgets)
        for tree, other in zip(trees, expected, strict=True):
            assert (tree.token_ids, tree.parents) == (other.token_ids, other.parents)
            assert (tree.confidence or []) == pytest.approx(other.confidence or [], rel=1e-3)
        return trees

    def go_on(self, request: Request, count: int) -> int:
        """`count` more tokens; the first position of which the features are not known yet."""
        start = request.num_tokens - 1
        request.token_ids.extend(self.rng.integers(0, CONFIG.vocab_size, count).tolist())
        return start


def blocks_of(i: int) -> list[int]:
    return list(range(BLOCKS_EACH * i, BLOCKS_EACH * (i + 1)))[::-1]


LENGTHS = (9, 14, 2, 30, 5)
BUDGETS = {
    "chains": [Budget(4, 4), Budget(6, 6), Budget(1, 1), Budget(2, 2), Budget(5, 5)],
    "trees": [Budget(16, 5), Budget(7, 3), Budget(16, 6), Budget(16, 1), Budget(9, 2)],
    "mixed": [Budget(3, 3), Budget(12, 4), Budget(2, 1), Budget(0, 4), Budget(16, 6)],
    "floors": [
        Budget(16, 5, min_prob=0.1),
        Budget(16, 5, min_prob=1.1),
        Budget(16, 5, min_prob_to_extend=0.3),
        Budget(8, 6, min_prob_to_extend=1.0),
        Budget(16, 6, min_prob=0.02, min_prob_to_extend=0.15),
    ],
}


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("size", BUDGETS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_trees_step_after_step(
    monkeypatch: pytest.MonkeyPatch, count: int, size: str, temperature: float
) -> None:
    pair = Pair(monkeypatch)
    requests = [pair.request(str(i), LENGTHS[i], blocks_of(i), temperature=temperature) for i in range(count)]
    budgets = BUDGETS[size][:count]
    trees = pair.compare(pair.step(requests, [0] * count), budgets)
    assert any(len(tree) > 2 for tree in trees)
    for _ in range(3):
        starts = [pair.go_on(request, 1 + i) for i, request in enumerate(requests)]
        pair.compare(pair.step(requests, starts), budgets)


def test_requests_with_and_without_noise_share_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    requests = [pair.request(str(i), 9, blocks_of(i), temperature=0.7 * i) for i in range(3)]
    pair.compare(pair.step(requests, [0] * 3), [Budget(16, 4)] * 3)


def test_pairs_that_came_while_nobody_drafted_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    request = pair.request("a", 9, blocks_of(0))
    pair.compare(pair.step([request], [0]), [Budget(16, 4)])
    pair.step([request], [pair.go_on(request, 2)])  # observed, not asked
    pair.compare(pair.step([request], [pair.go_on(request, 3)]), [Budget(16, 4)])


def test_a_drafter_that_was_skipped_misses_some_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    request = pair.request("a", 9, blocks_of(0))
    pair.compare(pair.step([request], [0]), [Budget(16, 4)])
    pair.go_on(request, 3)
    pair.show(StepContext([request]))  # skipped: no hidden states
    pair.compare(pair.step([request], [pair.go_on(request, 2)]), [Budget(16, 4)])
    pair.compare(pair.step([request], [pair.go_on(request, 2)]), [Budget(16, 4)])


def test_a_shared_prefix_and_blocks_of_a_request_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    first, other = pair.request("a", 13, [3, 1, 2, 7, 8]), pair.request("b", 6, blocks_of(1))
    pair.compare(pair.step([first, other], [0, 0]), [Budget(16, 4)] * 2)
    second = toy_request("c", [*first.token_ids[:8], 5, 6, 7], seed=1)
    pair.give_blocks(second, [3, 1, 9, 10], num_shared=2)  # found in the cache: computed from token 8 on
    step = pair.step([other, second], [pair.go_on(other, 2), 8], gone=[first])
    pair.compare(step, [Budget(16, 4)] * 2)
    third = pair.request("d", 10, [2, 7, 8])  # blocks that the first one had
    step = pair.step([second, third, other], [pair.go_on(second, 1), 0, pair.go_on(other, 4)])
    pair.compare(step, [Budget(16, 4)] * 3)


def test_a_preempted_request_comes_back_in_other_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    kept, preempted = pair.request("a", 9, blocks_of(0)), pair.request("b", 11, blocks_of(1))
    pair.compare(pair.step([kept, preempted], [0, 0]), [Budget(16, 4)] * 2)
    pair.compare(pair.step([kept], [pair.go_on(kept, 1)], gone=[preempted]), [Budget(16, 4)])
    pair.give_blocks(preempted, blocks_of(2))
    pair.compare(pair.step([kept, preempted], [pair.go_on(kept, 1), 0]), [Budget(16, 4)] * 2)


def test_lines_of_the_table_are_taken_from_whom_was_drafted_for_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    assert pair.whole._captured is not None
    pair.whole._captured._lines._free = [4, 7]
    requests = [pair.request(str(i), 7 + i, blocks_of(i)) for i in range(3)]
    for turn in range(4):
        for request in requests:
            start = pair.go_on(request, 2) if turn else 0
            pair.compare(pair.step([request], [start]), [Budget(16, 4)])


def test_an_option_that_edits_logits_goes_level_by_level(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    wanted = int(pair.whole._network.d2t[7])
    del pair.whole._grow
    plain = pair.request("a", 9, blocks_of(0), temperature=0.0)
    biased = pair.request("b", 9, blocks_of(1), temperature=0.0, logit_bias={wanted: 100.0})
    trees = pair.compare(pair.step([plain, biased], [0, 0]), [Budget(4, 4)] * 2)
    assert trees[1].token_ids == [wanted] * 4 != trees[0].token_ids


def test_a_second_question_in_the_same_step_gets_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    requests = [pair.request(str(i), 9 + i, blocks_of(i)) for i in range(2)]
    step = pair.step(requests, [0, 0])
    trees = pair.compare(step, [Budget(16, 4)] * 2)
    assert pair.whole.propose(step, [Budget(16, 4)] * 2) == trees


def test_noise_is_that_of_the_host() -> None:
    seeds, positions = np.array([[3], [2**63 + 5]], dtype=np.uint64), np.array([7, 8, 9], dtype=np.uint64)
    keys = noise_keys(seeds, positions, Purpose.SAMPLE)
    assert keys.tolist() == [[noise_key(int(s), p, Purpose.SAMPLE) for p in (7, 8, 9)] for s in seeds[:, 0]]
    ids = torch.randperm(50)[:20]
    scores = DraftScores(ids, 50, "coupled")
    constants = torch.from_numpy(id_constants(50, ids.numpy()).view(np.int32).copy())
    request = toy_request("a", [1, 2, 3], seed=11, temperature=1.0)
    key = np.array([scores.noise_key(request, 2)], dtype=np.uint64)
    halves = torch.from_numpy(key.view(np.int32).reshape(1, 2))
    np.testing.assert_allclose(keyed_noise(halves, constants)[0].numpy(), scores.noise(request, 2), rtol=1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_give_the_same_trees_on_a_gpu(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """In float32, so that all but the order of sums is the same; a few near ties may fall the other way."""
    before = DRAFT_CLOCK.num_captured
    pair = Pair(monkeypatch, "cuda")
    captured = DRAFT_CLOCK.num_captured
    assert pair.whole._captured is not None and captured > before
    requests = [pair.request(str(i), LENGTHS[i], blocks_of(i), temperature=temperature) for i in range(5)]
    starts, alike, total = [0] * 5, 0, 0
    for _ in range(4):
        step = pair.step(requests, starts)
        for size in BUDGETS:
            expected = pair.by_level.propose(step, BUDGETS[size])
            trees = pair.whole.propose(step, BUDGETS[size])
            alike += sum(tree.token_ids == other.token_ids for tree, other in zip(trees, expected, strict=True))
            total += len(trees)
        starts = [pair.go_on(request, 1 + i) for i, request in enumerate(requests)]
    assert DRAFT_CLOCK.num_captured == captured, "a graph was captured inside a step"
    assert alike >= 0.9 * total
