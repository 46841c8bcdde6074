"""The accept/reject rule on toy distributions, played out and compared with the theory.

Leviathan's rule: a drafter samples x from q; the target accepts it with probability min(1, p(x)/q(x)) and otherwise
emits a token from the residual norm((p - q)+). Two facts make it work, and both can be watched here: what comes out is
distributed exactly as p, and the acceptance rate is sum(min(p, q)).

>>> run = simulate_steps(acceptance=0.8, num_draft_tokens=5, num_steps=20_000, seed=0)
>>> abs(run.tokens_per_step - 3.69) < 4 * run.standard_error
True
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.errors import InvalidOptionError
from paceline.lab.expected import expected_tokens

Distribution = NDArray[np.float64]


def acceptance_rate(target: ArrayLike, draft: ArrayLike) -> float:
    """sum(min(p, q)): one minus the total variation distance."""
    return float(np.minimum(as_distribution(target), as_distribution(draft)).sum())


def as_distribution(values: ArrayLike) -> Distribution:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or np.any(~np.isfinite(array)) or np.any(array < 0) or array.sum() <= 0:
        raise InvalidOptionError(f"a distribution is a list of weights, none negative, not all 0; got {values!r}")
    normalized: Distribution = array / array.sum()
    return normalized


def toy_pair(vocab_size: int, acceptance: float, seed: int) -> tuple[Distribution, Distribution]:
    """A random p and a q between it and its mirror image, so far away that sum(min(p, q)) is `acceptance`."""
    if vocab_size < 2 or not 0.0 < acceptance <= 1.0:
        raise InvalidOptionError(f"need 2 tokens or more and acceptance in (0, 1], got {vocab_size}, {acceptance}")
    target = np.random.default_rng(seed).dirichlet(np.ones(vocab_size))
    mirror = np.empty(vocab_size)
    mirror[np.argsort(target)] = np.sort(target)[::-1]  # what is likely in p is unlikely here
    for _ in range(30):  # sharper until it is far enough away: in the end all its mass is on p's unlikeliest token
        distance = 1.0 - acceptance_rate(target, mirror)
        if distance >= 1.0 - acceptance:
            share = (1.0 - acceptance) / distance if distance else 0.0
            return target, (1.0 - share) * target + share * as_distribution(mirror)
        mirror = as_distribution(mirror**2)
    raise InvalidOptionError(
        f"no drafter over {vocab_size} tokens is as bad as {acceptance} here: use a larger vocabulary"
    )


@dataclass(frozen=True, slots=True)
class RuleRun:
    """One draft token per trial, against the theory."""

    num_trials: int
    accepted: float  # share of the draft tokens
    accepted_theory: float  # sum(min(p, q))
    standard_error: float  # of `accepted`
    emitted: Distribution  # what came out, as frequencies
    distance: float  # total variation between `emitted` and p
    distance_by_chance: float  # what that distance is expected to be when `emitted` really is p


def simulate_rule(target: ArrayLike, draft: ArrayLike, num_trials: int, seed: int) -> RuleRun:
    p, q = as_distribution(target), as_distribution(draft)
    if p.size != q.size:
        raise InvalidOptionError(f"the target has {p.size} tokens and the draft {q.size}: one vocabulary for both")
    rng = np.random.default_rng(seed)
    drafted = rng.choice(p.size, size=num_trials, p=q)
    accepted = rng.random(num_trials) * q[drafted] < p[drafted]
    emitted_tokens = drafted.copy()
    residual = np.maximum(p - q, 0.0)
    num_rejected = int((~accepted).sum())
    if num_rejected:
        emitted_tokens[~accepted] = rng.choice(p.size, size=num_rejected, p=residual / residual.sum())
    emitted = np.bincount(emitted_tokens, minlength=p.size) / num_trials
    theory = acceptance_rate(p, q)
    return RuleRun(
        num_trials=num_trials,
        accepted=float(accepted.mean()),
        accepted_theory=theory,
        standard_error=float(np.sqrt(theory * (1 - theory) / num_trials)),
        emitted=emitted,
        distance=float(np.abs(emitted - p).sum() / 2),
        # each frequency is off by a normal of variance p(1-p)/n, whose mean absolute value is sqrt(2/pi) of its sigma
        distance_by_chance=float(np.sqrt(2 / np.pi) * np.sqrt(p * (1 - p) / num_trials).sum() / 2),
    )


@dataclass(frozen=True, slots=True)
class StepsRun:
    """Many steps of a chain of K draft tokens, timed by a model of the clock."""

    num_steps: int
    tokens_per_step: float
    tokens_per_step_theory: float
    standard_error: float  # of tokens_per_step
    accepted_per_position: list[float]  # share of steps in which position 1, 2, ... was accepted
    tokens_per_s: float
    speedup: float  # over one token per target pass


def simulate_steps(
    acceptance: float,
    num_draft_tokens: int,
    num_steps: int,
    seed: int,
    *,
    draft_s: float = 0.0,  # latency of one draft token
    target_s: float = 1.0,  # latency of a target pass, verifying or not
) -> StepsRun:
    theory = expected_tokens(acceptance, num_draft_tokens)  # checks the rate and the number
    if num_steps < 2 or target_s <= 0 or draft_s < 0:
        raise InvalidOptionError(f"need 2 steps or more and positive times, got {num_steps}, {target_s}, {draft_s}")
    rng = np.random.default_rng(seed)
    holds = rng.random((num_steps, num_draft_tokens)) < acceptance
    reached = np.cumprod(holds, axis=1)  # [steps, K]: 1 while every token so far was accepted
    emitted = 1 + reached.sum(axis=1)
    seconds = num_steps * (target_s + num_draft_tokens * draft_s)
    tokens_per_s = float(emitted.sum() / seconds)
    return StepsRun(
        num_steps=num_steps,
        tokens_per_step=float(emitted.mean()),
        tokens_per_step_theory=theory,
        standard_error=float(emitted.std(ddof=1) / np.sqrt(num_steps)),
        accepted_per_position=[float(share) for share in reached.mean(axis=0)],
        tokens_per_s=tokens_per_s,
        speedup=tokens_per_s * target_s,
    )
