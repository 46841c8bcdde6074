"""How often drafts are let through: theory beside measurement, for random pairs (p, q). `pytest -s` shows the table.

Every step is the real thing: a chain drawn with `draft_tokens` from q, verified by the rule against p, one per seed.
Bounds are 4.5 standard errors wide: a correct rule fails one of the comparisons with odds of about 1e-4.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import DraftTree
from paceline.ops.sampling import NodeRow
from paceline.ops.sampling_drafts import draft_tokens
from paceline.verifiers import make_verifier

VOCAB = 16
LENGTH = 3
STEPS = 800
WIDE = 4.5


@dataclass
class Measured:
    first: float  # how often the first draft token was let through
    first_error: float  # one standard error
    accepted: float  # draft tokens let through per step
    accepted_error: float


def measure(rule: str, mode: str, p: torch.Tensor, q: torch.Tensor) -> Measured:
    verifier = make_verifier(rule)
    target = p.log().float().expand(LENGTH + 1, -1)
    counts = []
    for seed in range(STEPS):
        request = Request("r", [0], SamplingParams(), max_tokens=99, seed=seed)
        tokens: list[int] = []
        rows = []
        for _ in range(LENGTH):
            (drawn,) = draft_tokens([NodeRow(request, tuple(tokens), 0)], q.log().float()[None], mode)
            tokens += drawn.token_ids
            rows.append(drawn.probs)
        probs = None if rows[0] is None else torch.cat([row for row in rows if row is not None])
        tree = DraftTree(tokens, list(range(-1, LENGTH - 1)), probs)
        (result,) = verifier.verify([request], [tree], target)
        counts.append(len(result.accepted))
    accepted = np.array(counts)
    first = accepted > 0
    error = STEPS**-0.5
    return Measured(
        float(first.mean()), float(first.std()) * error, float(accepted.mean()), float(accepted.std()) * error
    )


def pair(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(seed)
    sharp, noise = (0.3, 0.5, 1.0)[seed % 3], (0.3, 1.0, 3.0)[seed % 3]
    p = generator.dirichlet(np.full(VOCAB, sharp)) + 1e-4
    q = p * np.exp(generator.normal(0, noise, VOCAB))
    return torch.from_numpy(p / p.sum()), torch.from_numpy(q / q.sum())


@pytest.mark.parametrize("seed", range(3))
def test_acceptance_in_theory_and_in_practice(seed: int) -> None:
    p, q = pair(seed)
    alpha = float(torch.minimum(p, q).sum())  # = 1 - TV
    bound = alpha / (2.0 - alpha)  # (1 - TV) / (1 + TV)
    chain = sum(alpha**i for i in range(1, LENGTH + 1))
    rejection = measure("rejection", "sampled", p, q)
    block = measure("block", "sampled", p, q)
    coupled = measure("sample_match", "coupled", p, q)
    independent = measure("sample_match", "sampled", p, q)
    chance = float((p * q).sum())
    print(f"\n{'rule':26} {'first token':>20} {'theory':>9}   {'tokens of ' + str(LENGTH):>20} {'theory':>9}")
    for name, found, first, tokens in (
        ("rejection, sampled", rejection, f"= {alpha:.3f}", f"= {chain:.3f}"),
        ("block, sampled", block, "", f">= {chain:.3f}"),
        ("sample_match, coupled", coupled, f">= {bound:.3f}", ""),
        ("sample_match, sampled", independent, f"= {chance:.3f}", ""),
    ):
        left = f"{found.first:.3f} ± {found.first_error:.3f}"
        right = f"{found.accepted:.3f} ± {found.accepted_error:.3f}"
        print(f"{name:26} {left:>20} {first:>9}   {right:>20} {tokens:>9}")
    assert abs(rejection.first - alpha) < WIDE * rejection.first_error
    assert abs(rejection.accepted - chain) < WIDE * rejection.accepted_error
    assert block.accepted > chain - WIDE * block.accepted_error
    assert coupled.first > bound - WIDE * coupled.first_error
    assert abs(independent.first - chance) < WIDE * independent.first_error + 1e-9
    assert coupled.first > independent.first  # what sharing the noise is for
