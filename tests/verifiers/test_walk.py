"""Batches of requests with trees of every shape, and requests that fail among others that do not."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.outputs import VerifyResult
from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.errors import InvalidOptionError, RequestFailedError
from paceline.ops.sampling import choose_tokens
from paceline.verifiers import VERIFIERS, check_pairing, make_verifier, walk
from paceline.verifiers.sample_match import _looked_up, sample_match_walk

VOCAB = 8
CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
RULES = ["sample_match", "rejection", "multi_step", "block", "typical"]


def logits_after(context: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(list(context)).normal(0, 2, VOCAB).astype(np.float32))


def request_of(i: int, **options: Any) -> Request:
    return Request(f"r{i}", [i, 2, 3], SamplingParams(**options), max_tokens=64, seed=i)


def pass_logits(request: Request, tree: DraftTree) -> torch.Tensor:
    paths = [[tree.token_ids[i] for i in tree.ancestors(node)] for node in range(-1, len(tree))]
    return torch.stack([logits_after([*request.token_ids, *path]) for path in paths])


def verify(rule: str, requests: list[Request], trees: list[DraftTree]) -> list[VerifyResult]:
    logits = torch.cat([pass_logits(request, tree) for request, tree in zip(requests, trees, strict=True)])
    return make_verifier(rule).verify(requests, trees, logits)


def random_tree(generator: np.random.Generator, size: int, chain: bool) -> DraftTree:
    parents = [i - 1 if chain else int(generator.integers(-1, i)) for i in range(size)]
    return DraftTree(generator.integers(VOCAB, size=size).tolist(), parents)


def batch(chain: bool) -> tuple[list[Request], list[DraftTree]]:
    generator = np.random.default_rng(0)
    options: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"frequency_penalty": 1.0}]
    requests = [request_of(i, **options[i % 4]) for i in range(12)]
    return requests, [random_tree(generator, size % 5, chain) for size in range(12)]


def check_batch_is_each_alone(rule: str) -> None:
    requests, trees = batch(chain=rule in ("rejection", "block"))
    for found, request, tree in zip(verify(rule, requests, trees), requests, trees, strict=True):
        assert [found] == verify(rule, [request], [tree])
        assert len(found.token_ids) == len(found.accepted) + 1


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_is_every_request_alone(rule: str) -> None:
    check_batch_is_each_alone(rule)


def test_18_an_empty_draft_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above sees rows counted as if every request had a draft."""

    def broken(drafts: Sequence[DraftTree]) -> list[int]:
        rows, start = [], 0
        for draft in drafts:
            rows.append(start)
            start += 1 + len(draft) if len(draft) else 0
        return rows

    monkeypatch.setattr(walk, "_root_rows", broken)
    with pytest.raises(AssertionError):
        check_batch_is_each_alone("sample_match")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_choosing_for_every_row_at_once_is_the_same(device: str) -> None:
    """What a device does, to wait for it once and not once for every level."""
    requests, trees = batch(chain=False)
    logits = torch.cat([pass_logits(request, tree) for request, tree in zip(requests, trees, strict=True)])
    rows = walk.all_rows(requests, trees)
    assert [row.logits_row for row in rows] == list(range(len(logits)))
    looked_up = _looked_up(choose_tokens(rows, logits.to(device)))
    walks = [sample_match_walk(tree) for tree in trees]
    assert walk.run_walks(walks, requests, trees, logits, looked_up) == verify("sample_match", requests, trees)
    if device != "cpu":
        expected = verify("sample_match", requests, trees)
        assert make_verifier("sample_match").verify(requests, trees, logits.to(device)) == expected


def plain(request: Request, num_tokens: int) -> list[int]:
    before = list(request.token_ids)
    for _ in range(num_tokens):
        (result,) = verify("sample_match", [request], [EMPTY_TREE])
        request.token_ids += result.token_ids
    found, request.token_ids = request.token_ids[len(before) :], before
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(0, 9), st.sampled_from([0.0, 0.7, 1.0, 1.5]), st.booleans())
def test_seeded_output_equals_plain_decoding(seed: int, size: int, temperature: float, penalties: bool) -> None:
    """Whatever the tree holds, the tokens are those that plain decoding emits; and a right path is taken to its end."""
    generator = np.random.default_rng(seed)
    options = {"frequency_penalty": 0.7, "min_p": 0.02, "logit_bias": {1: 1.0}} if penalties else {}
    request = request_of(seed % 7, temperature=temperature, **options)
    expected = plain(request, 6)
    right = DraftTree.chain(expected[: int(generator.integers(0, 5))])
    tree = DraftTree.merge([random_tree(generator, size, chain=False), right])
    (result,) = verify("sample_match", [request], [tree])
    assert result.token_ids == expected[: len(result.token_ids)]
    assert len(result.accepted) >= len(right)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_unusable_logits_end_their_request_alone(rule: str, value: float) -> None:
    requests, trees = [request_of(i, temperature=0.0) for i in range(3)], [DraftTree.chain([1, 2])] * 3
    logits = torch.cat([pass_logits(request, tree) for request, tree in zip(requests, trees, strict=True)])
    expected = make_verifier(rule).verify(requests, trees, logits)
    logits[3, 4] = value  # the second request's root
    found = make_verifier(rule).verify(requests, trees, logits)
    assert isinstance(found[1].error, RequestFailedError) and found[1].token_ids == []
    assert [found[0], found[2]] == [expected[0], expected[2]]


def test_unusable_logits_off_the_accepted_path_do_not_matter() -> None:
    request, tree = request_of(0, temperature=0.0), DraftTree([], [])
    (root,) = verify("sample_match", [request], [tree])
    tree = DraftTree([(root.token_ids[0] + 1) % VOCAB], [-1])
    logits = pass_logits(request, tree)
    logits[1] = float("nan")
    for rule in RULES:
        (result,) = make_verifier(rule).verify([request], [tree], logits)
        assert result.error is None and result.token_ids == root.token_ids


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_chain_rules_refuse_trees(rule: str) -> None:
    (result,) = verify(rule, [request_of(0)], [DraftTree([1, 2], [-1, -1])])
    with pytest.raises(RequestFailedError, match="verifies chains"):
        raise result.error or AssertionError


def test_a_q_that_gives_its_own_token_nothing_is_refused() -> None:
    q = torch.full((1, VOCAB), 1.0 / (VOCAB - 1))
    q[0, 3] = 0.0
    (result,) = verify("rejection", [request_of(0)], [DraftTree([3], [-1], q)])
    with pytest.raises(RequestFailedError, match="what it really drew from"):
        raise result.error or AssertionError


def test_siblings_that_no_q_could_have_drawn_are_refused() -> None:
    q = torch.zeros(2, VOCAB)
    q[:, 3] = 1.0
    logits = torch.full((3, VOCAB), 0.0)
    verifier = make_verifier("multi_step", replacement=False)
    logits[0, 3] = -20.0  # so that the first sibling is not let through
    (result,) = verifier.verify([request_of(0)], [DraftTree([3, 3], [-1, -1], q)], logits)
    with pytest.raises(RequestFailedError, match="with replacement"):
        raise result.error or AssertionError


def test_spechub_refuses_siblings_that_are_no_hub_pair() -> None:
    q = torch.full((2, VOCAB), 0.1)
    q[:, 0] = 0.3
    (result,) = verify("spechub", [request_of(0)], [DraftTree([3, 4], [-1, -1], q)])
    with pytest.raises(RequestFailedError, match="likeliest token 0 and another"):
        raise result.error or AssertionError


def test_typical_accepts_what_is_likely_enough_and_says_that_it_is_lossy() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25] * 4, [0.25] * 4]))
    request = Request("r", [1], SamplingParams(), max_tokens=9, seed=0)
    verifier = make_verifier("typical", epsilon=0.2, alpha=1.0)
    assert not verifier.lossless
    (likely,) = verifier.verify([request], [DraftTree([2, 1], [-1, -1])], logits)
    assert likely.accepted == [1]  # 0.3 > 0.2; 0.15 is not
    (unlikely,) = verifier.verify([request], [DraftTree([2, 3], [-1, -1])], logits)
    assert unlikely.accepted == []


def test_rules_by_name() -> None:
    assert all(make_verifier(name).name == name for name in VERIFIERS)
    assert {name for name in VERIFIERS if not make_verifier(name).lossless} == {"typical"}
    with pytest.raises(InvalidOptionError, match="choose one of sample_match"):
        make_verifier("speculation")
    with pytest.raises(InvalidOptionError, match="does not take"):
        make_verifier("block", replacement=False)
    with pytest.raises(InvalidOptionError, match="epsilon"):
        make_verifier("typical", epsilon=0.0)


PAIRINGS = [
    # rule, drafting, draft_probs, chain, refused because
    ("sample_match", "sampled", False, False, None),
    ("sample_match", "coupled", False, False, None),
    ("typical", "sampled", False, False, None),
    ("rejection", "fixed", False, True, None),
    ("rejection", "sampled", True, True, None),
    ("rejection", "sampled", False, True, "does not report q"),
    ("rejection", "sampled", True, False, "verifies chains"),
    ("block", "fixed", False, False, "verifies chains"),
    ("block", "coupled", True, True, "share the target's noise"),
    ("multi_step", "sampled", True, False, None),
    ("multi_step", "sampled", False, False, "does not report q"),
    ("multi_step", "coupled", True, False, "share the target's noise"),
    ("spechub", "spechub", True, False, None),
    ("spechub", "fixed", False, False, "on fixed drafts"),
    ("spechub", "sampled", True, False, "on sampled drafts"),
    ("multi_step", "spechub", True, False, "multi_step on spechub drafts"),
    ("sample_match", "spechub", True, False, None),
    ("multi_step", "guessed", True, False, "drafts are one of"),
]


@pytest.mark.parametrize(("rule", "drafting", "draft_probs", "chain", "reason"), PAIRINGS)
def test_wrong_pairings_are_refused(
    rule: str, drafting: str, draft_probs: bool, chain: bool, reason: str | None
) -> None:
    if reason is None:
        check_pairing(rule, drafting, draft_probs=draft_probs, chain=chain)
    else:
        with pytest.raises(InvalidOptionError, match=reason):
            check_pairing(rule, drafting, draft_probs=draft_probs, chain=chain)
