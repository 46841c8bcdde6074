"""Log-probabilities: the model's own, whatever the options did."""

import math

import pytest
import torch

from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.ops.sampling import token_logprobs
from paceline.verifiers import make_verifier

LOGITS = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]]))


def test_chosen_rank_and_top() -> None:
    first, second = token_logprobs(LOGITS, [1, 0], 2)
    assert math.exp(first.logprob) == pytest.approx(0.2) and first.rank == 3
    assert list(first.top) == [3, 2]
    assert [math.exp(value) for value in first.top.values()] == pytest.approx([0.4, 0.3])
    assert second.rank == 1 and next(iter(second.top)) == 0


def test_no_top_tokens_and_more_than_the_vocabulary_may_be_asked_for() -> None:
    assert token_logprobs(LOGITS, [1, 0], 0)[0].top == {}
    assert len(token_logprobs(LOGITS, [1, 0], 99)[0].top) == 4
    assert token_logprobs(LOGITS[:0], [], 3) == []


def test_a_row_has_the_same_bits_alone() -> None:
    logits = torch.randn(7, 33_001, generator=torch.Generator().manual_seed(0))
    together = token_logprobs(logits, list(range(7)), 5)
    assert [token_logprobs(logits[i : i + 1].clone(), [i], 5)[0] for i in range(7)] == together


@pytest.mark.parametrize("rule", ["sample_match", "multi_step"])
def test_every_emitted_token_has_them_before_any_option(rule: str) -> None:
    params = SamplingParams(temperature=0.0, logprobs=1, logit_bias={0: 50.0})
    request = Request("r", [2], params, max_tokens=9, seed=0)
    tree = DraftTree([0, 3], [-1, -1])
    logits = LOGITS[[0, 1, 1]]
    (result,) = make_verifier(rule).verify([request], [tree], logits)
    assert result.token_ids == [0, 0] and result.accepted == [0]
    assert result.logprobs == [token_logprobs(LOGITS, [0, 0], 1)[0], token_logprobs(LOGITS, [0, 0], 1)[1]]
    request = Request("r", [2], SamplingParams(temperature=0.0), max_tokens=9, seed=0)
    assert make_verifier(rule).verify([request], [EMPTY_TREE], logits[:1])[0].logprobs is None
