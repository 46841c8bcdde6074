"""Draft tokens are drawn from exactly what is reported, and each mode suits the rule it is for."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidOptionError
from paceline.ops.sampling import NodeRow, choose_tokens, row_probs
from paceline.ops.sampling_drafts import Drawn, draft_tokens, widen_draft_logits

VOCAB = 6
DRAWS = 6_000


def logits_of(seed: int, spread: float = 1.2) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, spread, (1, VOCAB)).astype(np.float32))


def draw(seed: int, mode: str, logits: torch.Tensor, params: SamplingParams | None = None, **kwargs: Any) -> Drawn:
    request = Request("r", [1, 2], params or SamplingParams(), max_tokens=9, seed=seed)
    (drawn,) = draft_tokens([NodeRow(request, (), 0)], logits, mode, **kwargs)
    return drawn


def test_greedy_takes_the_likeliest_and_reports_no_q() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0, -1.0]])
    assert draw(0, "greedy", logits, width=4) == Drawn([1, 3, 4, 2])
    assert draw(0, "greedy", logits, SamplingParams(allowed_token_ids=[0, 2]), width=4).token_ids == [2, 0]


def test_a_request_with_nothing_left_drafts_nothing() -> None:
    assert draw(0, "sampled", torch.full((1, VOCAB), torch.nan)).token_ids == []


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.6, top_p=0.85)], ids=["raw", "cut"])
def test_sampled_siblings_follow_the_reported_rows(replacement: bool, params: SamplingParams) -> None:
    """Chi-square on the pairs (first, second) of 6,000 seeds; odds of failing by chance 1e-4 per case."""
    logits = logits_of(4)
    counts: dict[tuple[int, ...], int] = {}
    expected: dict[tuple[int, ...], float] = {}
    for seed in range(DRAWS):
        drawn = draw(seed, "sampled", logits, params, width=2, replacement=replacement)
        first, second = drawn.token_ids
        assert drawn.probs is not None
        counts[first, second] = counts.get((first, second), 0) + 1
        expected[first, second] = float(drawn.probs[0, first] * drawn.probs[1, second])
    assert sum(expected.values()) == pytest.approx(1.0)  # every pair was seen
    pairs = sorted(expected)
    assert stats.chisquare([counts[p] for p in pairs], [DRAWS * expected[p] for p in pairs]).pvalue > 1e-4


def test_a_hub_pair_follows_its_joint_distribution() -> None:
    """(i, a) with q(i), (a, i) with q(a) q(i) / (1 - q(a)). Chi-square of 6,000 seeds, odds 1e-4."""
    logits = logits_of(5)
    q = row_probs(NodeRow(Request("r", [1], SamplingParams(), max_tokens=9, seed=0), (), 0), logits)
    hub = int(q.argmax())
    joint = {(i, hub): q[i] for i in range(VOCAB) if i != hub}
    joint |= {(hub, i): q[hub] * q[i] / (1 - q[hub]) for i in range(VOCAB) if i != hub}
    counts = dict.fromkeys(joint, 0)
    for seed in range(DRAWS):
        drawn = draw(seed, "spechub", logits)
        counts[tuple(drawn.token_ids)] += 1  # type: ignore[index]
        assert drawn.probs is not None and np.array_equal(drawn.probs[1].numpy(), q)
    assert stats.chisquare(list(counts.values()), [DRAWS * p for p in joint.values()]).pvalue > 1e-4


def test_a_drafter_with_one_token_left_draws_it_alone() -> None:
    params = SamplingParams(top_k=1)
    assert len(draw(0, "sampled", logits_of(0), params, width=3).token_ids) == 1
    assert len(draw(0, "spechub", logits_of(0), params).token_ids) == 1
    assert len(draw(0, "coupled", logits_of(0), params, width=3).token_ids) == 1


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_p=0.7)], ids=str
)
def test_coupled_with_the_targets_own_logits_is_the_targets_token(params: SamplingParams) -> None:
    logits = logits_of(6)
    for seed in range(50):
        request = Request("r", [1, 2], params, max_tokens=9, seed=seed)
        row = NodeRow(request, (3,), 0)
        for width in (1, 3):
            (drawn,) = draft_tokens([row], logits, "coupled", width=width)
            assert choose_tokens([row], logits) == drawn.token_ids[:1]


def test_draws_of_one_step_and_of_the_next_are_fresh() -> None:
    request = Request("r", [1, 2], SamplingParams(), max_tokens=9, seed=0)
    logits = torch.zeros(1, 5000)
    row = NodeRow(request, (), 0)
    tokens = [draft_tokens([row], logits, "sampled", draws=[i])[0].token_ids[0] for i in range(20)]
    request.token_ids.append(3)
    tokens += [draft_tokens([row], logits, "sampled", draws=[i])[0].token_ids[0] for i in range(20)]
    assert len(set(tokens)) > 35  # 40 draws from 5,000: six or more repeats have odds below 1e-8


@pytest.mark.parametrize(("mode", "width", "message"), [("hot", 1, "one of greedy"), ("greedy", 0, "between 1 and")])
def test_unknown_modes_and_widths_are_refused(mode: str, width: int, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        draw(0, mode, logits_of(0), width=width)


def check_widened(widen: Any) -> None:
    """Draft token i is the target's token i + d2t[i]: the drafter's favourite must be found under its target id."""
    target_ids = [0, 2, 3, 7]
    d2t = torch.tensor([target - i for i, target in enumerate(target_ids)])
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    wide = widen(logits, d2t, 9)
    assert wide.shape == (1, 9)
    assert [int(i) for i in wide[0].isfinite().nonzero()] == target_ids
    assert wide[0, target_ids].tolist() == logits[0].tolist()


def test_14_d2t_missing_or_taken_as_absolute() -> None:
    def missing(logits: torch.Tensor, d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
        return widen_draft_logits(logits, torch.zeros_like(d2t), vocab_size)

    def absolute(logits: torch.Tensor, d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
        return widen_draft_logits(logits, d2t - torch.arange(len(d2t)), vocab_size)

    check_widened(widen_draft_logits)
    for broken in (missing, absolute):
        with pytest.raises(AssertionError):
            check_widened(broken)
