"""How two models agree: the figures on distributions whose divergence is known."""

import math

import pytest
import torch

from paceline.core.agreement import NOT_COUNTED, Agreement, Passage


def test_a_model_agrees_with_itself() -> None:
    logits, found = torch.randn(5, 11, generator=torch.Generator().manual_seed(0)), Agreement()
    found.add(logits, logits, torch.tensor([1, 2, 3, 4, NOT_COUNTED]))
    assert (found.divergence, found.same_top) == (0.0, 1.0)
    assert found.perplexity == found.reference_perplexity


def test_the_divergence_is_that_of_the_reference_from_the_other() -> None:
    reference, other = torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    found = Agreement()
    found.add(reference[:1].log(), other[:1].log(), torch.tensor([0]))
    found.add(reference[1:].log(), other[1:].log(), torch.tensor([NOT_COUNTED]))
    expected = [0.75 * math.log(3) + 0.25 * math.log(1 / 3), 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5)]
    assert found.divergence == pytest.approx(sum(expected) / 2, rel=1e-5)
    assert found.same_top == 0.5  # equally likely: the first counts
    assert found.perplexity == pytest.approx(4.0) and found.reference_perplexity == pytest.approx(4 / 3)
    assert found.to_dict()["positions"] == 2


def test_only_what_no_model_wrote_counts_for_the_perplexity() -> None:
    assert Passage([7, 8, 9, 10, 11], 3).next_ids().tolist() == [8, 9, NOT_COUNTED, NOT_COUNTED, NOT_COUNTED]
    assert Passage([7, 8], 2).next_ids().tolist() == [8, NOT_COUNTED]
