"""Whole drafts in one native call against the same proposer going level by level."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.model_config import ModelConfig
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.errors import InvalidOptionError
from paceline.models.drafters.eagle3 import Eagle3, Eagle3Config
from paceline.models.layout import expected_shapes
from paceline.models.native import NativeDecoder
from paceline.ops.native.drafter import Drafting, drafter_available
from paceline.spec.engine_parts import EngineParts
from paceline.spec.feature import eagle3
from paceline.spec.feature.eagle3 import Eagle3Proposer
from paceline.spec.proposer import Budget, RequestPass, StepContext
from tests.toy import toy_request

pytestmark = pytest.mark.skipif(not drafter_available(), reason="the native kernels are not built")

BLOCK_SIZE, NUM_BLOCKS = 4, 32
CONFIG = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
LENGTHS = (9, 14, 2)  # tokens of the requests


def network(**options: Any) -> Eagle3:
    """More confident than an untrained one, so that paths differ in their chances."""
    torch.manual_seed(3)
    made = Eagle3(Eagle3Config(replace(CONFIG, num_layers=1), CONFIG.hidden_size, 70, (0, 2, 3), **options))
    for name, value in made.named_parameters():
        value.data = 1.0 + 0.3 * torch.randn_like(value) if "norm" in name else 0.3 * torch.randn_like(value)
    made.d2t = torch.randperm(CONFIG.vocab_size)[:70].sort().values
    return made


def make_proposer(monkeypatch: pytest.MonkeyPatch, made: Eagle3, **options: Any) -> Eagle3Proposer:
    torch.manual_seed(5)
    weights = {name: 0.3 * torch.randn(shape) for name, shape in expected_shapes(CONFIG).items()}
    decoder = NativeDecoder(CONFIG, weights, quantization="int8", num_threads=2)
    monkeypatch.setattr(eagle3, "load_network", lambda *_: made)
    services = EngineParts(
        vocab_size=CONFIG.vocab_size,
        max_model_len=128,
        block_size=BLOCK_SIZE,
        num_slots=NUM_BLOCKS * BLOCK_SIZE,
        decoder=decoder,
        num_threads=2,
    )
    given = {"model": None, "draft_sampling": None, "draft_width": 3, "draft_min_prob": 0.0} | options
    return Eagle3Proposer(services, Budget(16, 6), **given)


def make_requests(**params: Any) -> list[Request]:
    rng = np.random.default_rng(0)
    made = []
    for i, length in enumerate(LENGTHS):
        request = toy_request(str(i), rng.integers(0, CONFIG.vocab_size, length).tolist(), seed=i, **params)
        request.block_ids = list(range(8 * i, 8 * i + 8))[::-1]
        made.append(request)
    return made


def show(proposer: Eagle3Proposer, requests: list[Request]) -> StepContext:
    """All tokens but the last were computed in one pass; the proposer sees their hidden states."""
    counts = [request.num_tokens - 1 for request in requests]
    begins = np.cumsum([0, *counts])[:-1].tolist()
    hidden = torch.randn(sum(counts), 3, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    passes = []
    for request, begin, count in zip(requests, begins, counts, strict=True):
        seen = RequestPass(request, range(begin, begin + count), 0, count)
        seen.block_ids = tuple(request.block_ids)
        passes.append(seen)
    uses = np.ones(8 * len(requests), dtype=np.int32)
    step = StepContext(requests, passes, [], None, hidden, (0, 2, 3), uses)
    proposer.observe(step)
    return step


def both_ways(proposer: Eagle3Proposer, step: StepContext, budgets: list[Budget]) -> list[list[DraftTree]]:
    native, proposer._native = proposer._native, None
    assert native is not None
    by_level = proposer.propose(step, budgets)
    proposer._native = native
    proposer._grow = lambda growing: pytest.fail("not drafted natively") if growing else None  # type: ignore[method-assign]
    return [by_level, proposer.propose(step, budgets)]


BUDGETS = {
    "chains": [Budget(4, 4), Budget(6, 6), Budget(1, 1)],
    "trees": [Budget(16, 5), Budget(7, 3), Budget(16, 6)],
    "mixed": [Budget(3, 3), Budget(12, 4), Budget(2, 1)],
}


@pytest.mark.parametrize("size", BUDGETS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("min_prob", [0.0, 0.05])
def test_the_same_trees(monkeypatch: pytest.MonkeyPatch, size: str, temperature: float, min_prob: float) -> None:
    proposer = make_proposer(monkeypatch, network(), draft_min_prob=min_prob)
    step = show(proposer, make_requests(temperature=temperature))
    by_level, whole = both_ways(proposer, step, BUDGETS[size])
    assert [(t.token_ids, t.parents) for t in whole] == [(t.token_ids, t.parents) for t in by_level]
    assert any(len(tree) > 2 for tree in whole)
    for one, other in zip(whole, by_level, strict=True):
        assert one.confidence == pytest.approx(other.confidence, rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True}, {"norm_before_fc": True}], ids=str)
def test_features_are_taken_in_alike(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    proposers = [make_proposer(monkeypatch, network(**options)) for _ in range(2)]
    proposers[1]._native = None
    requests = make_requests()
    for proposer in proposers:
        show(proposer, requests)
        proposer._flush()
    torch.testing.assert_close(proposers[0]._layers.kv_cache, proposers[1]._layers.kv_cache, rtol=1e-3, atol=1e-3)
    for request in requests:
        (position, feature), expected = (p._newest[request.request_id] for p in proposers)
        assert position == expected[0] == request.num_tokens - 2
        torch.testing.assert_close(feature, expected[1], rtol=1e-3, atol=1e-3)


def test_options_that_edit_logits_go_level_by_level(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = make_proposer(monkeypatch, network())
    wanted = int(proposer._network.d2t[7])
    plain, other = make_requests(temperature=0.0)[:2]
    biased = toy_request("1", other.token_ids, temperature=0.0, logit_bias={wanted: 100.0})
    biased.block_ids = other.block_ids
    alone = make_proposer(monkeypatch, network())
    expected = alone.propose(show(alone, [plain]), [Budget(4, 4)])
    trees = proposer.propose(show(proposer, [plain, biased]), [Budget(4, 4)] * 2)
    assert trees[0].token_ids == expected[0].token_ids != [wanted] * 4
    assert trees[1].token_ids == [wanted] * 4


def test_a_wrong_slot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = make_proposer(monkeypatch, network())
    assert proposer._native is not None
    outside = np.array([0, 10**6], dtype=np.int32)
    call = Drafting(1, 1, outside, torch.zeros(CONFIG.hidden_size), num_nodes=4, max_depth=4, width=1)
    with pytest.raises(InvalidOptionError, match="slot"):
        proposer._native._eagle.draft([call], NUM_BLOCKS * BLOCK_SIZE, -1e9)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_not_followed_is_kept_without_children(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    proposer = make_proposer(monkeypatch, network())
    step = show(proposer, make_requests(temperature=temperature)[:1])
    [whole] = proposer.propose(step, [Budget(16, 5)])
    assert max(whole.depths()) > 1
    certain = Budget(16, 5, min_prob_to_extend=1.0)  # nothing is that likely: one level
    [by_level], [shallow] = both_ways(proposer, step, [certain])
    assert shallow.token_ids == by_level.token_ids
    assert set(shallow.parents) == set(by_level.parents) == {-1}


def test_each_request_has_its_own_least_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = make_proposer(monkeypatch, network())
    step = show(proposer, make_requests()[:3])
    whole = proposer.propose(step, [Budget(16, 5)] * 3)
    budgets = [Budget(16, 5), Budget(16, 5, min_prob=1.1), Budget(16, 5, min_prob_to_extend=1.0)]
    for first, nothing, shallow in both_ways(proposer, step, budgets):
        assert first.token_ids == whole[0].token_ids
        assert not nothing.token_ids
        assert set(shallow.parents) == {-1}


def test_what_was_drawn_does_not_decide_what_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that samples with its q keeps no least probability: to leave out unlikely draws biases the output."""
    proposer = make_proposer(monkeypatch, network(), draft_sampling="sampled")
    step = show(proposer, make_requests(temperature=0.8)[:1])
    [whole] = proposer.propose(step, [Budget(5, 5)])
    [held] = proposer.propose(step, [Budget(5, 5, min_prob=0.99, min_prob_to_extend=0.99)])
    assert not proposer.keeps_min_prob and len(whole) == 5
    assert held.token_ids == whole.token_ids
