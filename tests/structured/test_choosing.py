"""A token that is chosen first and shown to the grammar afterwards is the one that the mask leaves, bit for bit."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import RequestFailedError
from paceline.ops.sampling import NodeRow, choose_tokens, chosen_before_mask
from paceline.structured.matching import OutputConstraint
from tests.structured.small_vocabulary import REGEXES, VOCAB, A, constrained

NUM_SEEDS = 60


def token_of(regex: str, path: tuple[int, ...], logits: torch.Tensor, seed: int, **params: Any) -> int | str:
    request = constrained(regex, **params)
    request.seed = seed
    (token,) = choose_tokens([NodeRow(request, path, 0)], logits[None])
    return f"failed: {token}" if isinstance(token, RequestFailedError) else token


@pytest.mark.parametrize("regex", REGEXES)
@pytest.mark.parametrize("path", [(), (A,)])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_both_ways_choose_the_same_token(
    regex: str, path: tuple[int, ...], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.normal(size=(NUM_SEEDS, VOCAB)).astype(np.float32))
    rows[1, 2] = rows[1].max()  # a tie
    rows[2, 0], rows[3, 1], rows[4, 3] = math.nan, math.inf, -math.inf
    rows[5] = math.nan
    asked = [token_of(regex, path, row, i, temperature=temperature) for i, row in enumerate(rows)]
    monkeypatch.setattr(OutputConstraint, "is_quick_to_ask", False)
    assert asked == [token_of(regex, path, row, i, temperature=temperature) for i, row in enumerate(rows)]


def test_the_winner_is_shown_to_the_grammar_as_well_as_the_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = OutputConstraint.settled
    monkeypatch.setattr(
        OutputConstraint, "settled", lambda self, path, token: (asked.append(token), real(self, path, token))[1]
    )
    logits = torch.tensor([3.0, 1.0, -9.0, 1.0])
    tokens = {token_of("a{1,3}b", (), logits, seed, temperature=2.0) for seed in range(NUM_SEEDS)}
    assert tokens <= {0, 2} and set(asked) >= {0, 1, 3}


@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}, {"logit_bias": {0: 1.0}}, {"min_tokens": 2},
     {"allowed_token_ids": [0, 1]}, {"presence_penalty": 1.0}, {"logits_processors": [lambda ids, x: x]}],
)  # fmt: skip
def test_options_that_come_after_the_mask_need_it_first(params: dict[str, Any]) -> None:
    assert chosen_before_mask(constrained("a+"), VOCAB)
    assert not chosen_before_mask(constrained("a+", **params), VOCAB)
