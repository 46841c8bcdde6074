"""Verification rules, by the name they have in `speculative_config["rejection_sample_method"]`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from paceline.errors import InvalidOptionError
from paceline.verifiers.block import block_walk
from paceline.verifiers.multi_step import multi_step_walk, rejection_walk
from paceline.verifiers.pairing import check_pairing
from paceline.verifiers.rule_verifier import RuleVerifier
from paceline.verifiers.sample_match import SampleMatch
from paceline.verifiers.spechub import spechub_walk
from paceline.verifiers.typical import typical_walk
from paceline.verifiers.verifier import Verifier

__all__ = ["VERIFIERS", "Verifier", "check_pairing", "make_verifier"]


def _multi_step(replacement: bool = True) -> Verifier:
    return RuleVerifier("multi_step", partial(multi_step_walk, replacement=replacement))


def _typical(epsilon: float = 0.09, alpha: float = 0.3) -> Verifier:
    for name, value in (("epsilon", epsilon), ("alpha", alpha)):
        if not 0.0 < value <= 1.0:
            raise InvalidOptionError(f"{name} of typical acceptance must be above 0 and at most 1, got {value!r}")
    return RuleVerifier("typical", partial(typical_walk, epsilon=epsilon, alpha=alpha), lossless=False)


VERIFIERS: dict[str, Callable[..., Verifier]] = {
    "sample_match": SampleMatch,  # R1, the default: exact for any draft, seeded output equal to plain decoding
    "rejection": lambda: RuleVerifier("rejection", rejection_walk),  # R2: chains sampled from q
    "multi_step": _multi_step,  # R3: trees sampled from q, with or without replacement, several drafters
    "spechub": lambda: RuleVerifier("spechub", spechub_walk),  # R4: pairs drawn around the likeliest token
    "block": lambda: RuleVerifier("block", block_walk),  # R5: chains, never worse than R2
    "typical": _typical,  # lossy
}


def make_verifier(name: str = "sample_match", **options: Any) -> Verifier:
    if name not in VERIFIERS:
        raise InvalidOptionError(f"unknown rejection_sample_method {name!r}; choose one of {', '.join(VERIFIERS)}")
    try:
        return VERIFIERS[name](**options)
    except TypeError as error:
        raise InvalidOptionError(f"rejection_sample_method {name!r} does not take {options}: {error}") from error
