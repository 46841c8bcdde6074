"""Drafts on a device: which networks, launching without waiting, and padding to the sizes that have a graph.

As in test_captured_drafts.py the plain twin of the kernels runs, without a graph."""

from dataclasses import replace

import pytest
import torch

from paceline.models.drafters.eagle import Eagle, EagleConfig
from paceline.spec.buckets import BUCKETS
from paceline.spec.feature.captured_drafts import CapturedDrafts, draft_shapes
from paceline.spec.feature.draft_levels import DraftRoom, DraftShape
from paceline.spec.proposer import Budget
from tests.spec.feature.test_captured_drafts import BUDGETS, LARGEST, LENGTHS, Pair, blocks_of
from tests.spec.feature.test_native_drafts import CONFIG, network


def eagle_network(input_norm: bool) -> Eagle:
    torch.manual_seed(3)
    made = Eagle(EagleConfig(replace(CONFIG, num_layers=1), 70, (2,), input_norm=input_norm))
    for name, value in made.named_parameters():
        value.data = 1.0 + 0.3 * torch.randn_like(value) if "norm" in name else 0.15 * torch.randn_like(value)
    made.d2t = torch.randperm(CONFIG.vocab_size)[:70].sort().values
    return made


def drafts_of(pair: Pair) -> CapturedDrafts:
    assert pair.whole._captured is not None
    return pair.whole._captured


@pytest.mark.parametrize("input_norm", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eagle_drafts_the_same_trees_step_after_step(
    monkeypatch: pytest.MonkeyPatch, input_norm: bool, temperature: float
) -> None:
    pair = Pair(monkeypatch, made=eagle_network(input_norm))
    requests = [pair.request(str(i), LENGTHS[i], blocks_of(i), temperature=temperature) for i in range(3)]
    starts = [0] * 3
    for _ in range(3):
        trees = pair.compare(pair.step(requests, starts), BUDGETS["trees"][:3])
        assert any(len(tree) > 2 for tree in trees)
        starts = [pair.go_on(request, 1 + i) for i, request in enumerate(requests)]


@pytest.mark.parametrize("options", [{"norm_before_residual": True}, {"norm_before_fc": True}])
def test_where_norms_stand_makes_no_difference(monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]) -> None:
    pair = Pair(monkeypatch, made=network(**options))
    requests = [pair.request(str(i), LENGTHS[i], blocks_of(i)) for i in range(2)]
    pair.compare(pair.step(requests, [0, 0]), [Budget(16, 4)] * 2)


def test_drafts_launched_before_others_were_collected_keep_their_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    requests = [pair.request(str(i), 9 + i, blocks_of(i)) for i in range(3)]
    step = pair.step(requests, [0] * 3)
    budgets = [Budget(16, 4)] * 3
    expected = pair.by_level.propose(step, budgets)
    parts = [replace(step, requests=[request]) for request in requests]
    launched = [pair.whole.launch(part, budgets[:1]) for part in parts]
    found = [one.collect()[0] for one in reversed(launched)][::-1]
    assert [tree.token_ids for tree in found] == [tree.token_ids for tree in expected]
    assert len({tuple(tree.token_ids) for tree in found}) == 3
    assert drafts_of(pair)._answers.num_free == 3, "what a draft was read into is used again"


def test_more_requests_than_a_graph_takes_are_drafted_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, max_num_seqs=2)
    requests = [pair.request(str(i), LENGTHS[i], blocks_of(i)) for i in range(5)]
    pair.compare(pair.step(requests, [0] * 5), BUDGETS["trees"])
    assert max(shape.num_requests for shape in drafts_of(pair)._shapes) == 2


def test_a_draft_is_padded_to_the_next_size_that_has_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    drafts = drafts_of(pair)
    drafts._shapes = [DraftShape(4, 3, 6), DraftShape(8, 3, 6)]
    requests = [pair.request(str(i), LENGTHS[i], blocks_of(i)) for i in range(3)]
    pair.compare(pair.step(requests, [0] * 3), [Budget(2, 2), Budget(6, 3), Budget(1, 1)])
    assert drafts._fitting == {(3, 3, 3): DraftShape(4, 3, 6)}


def test_every_size_of_draft_fits_a_shape_and_none_is_larger_than_it_must_be() -> None:
    room = DraftRoom(torch.zeros(0), 0, BUCKETS[-1], LARGEST.max_depth + 1, 3, LARGEST.max_depth, LARGEST.num_nodes)
    shapes = draft_shapes(room)
    for num_requests in range(1, BUCKETS[-1] + 1):
        for width in (1, 2, 3):
            for num_levels in range(1, LARGEST.max_depth + 1):
                found = next(shape for shape in shapes if shape.fits(num_requests, width, num_levels))
                assert found.num_requests < 2 * num_requests
                assert found.width == (1 if width == 1 else 3)
                assert found.num_levels <= num_levels + 1


def test_a_request_suits_from_the_step_on_in_which_min_tokens_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    request = pair.request("a", 9, blocks_of(0), temperature=0.0, min_tokens=2, stop_token_ids=[3])
    assert not drafts_of(pair).suit(request)
    pair.go_on(request, 4)
    assert drafts_of(pair).suit(request)
    drafts_of(pair).forget("a")
    other = pair.request("a", 9, blocks_of(0), temperature=0.0, logit_bias={3: 1.0})
    assert not drafts_of(pair).suit(other), "what was known of a request that is gone must not be used"
