"""Verification rules, by the name they have in `speculative_config["rejection_sample_method"]`."""

from collections.abc import Callable
from typing import Any

from paceline.errors import InvalidOptionError
from paceline.verify.sample_match import SampleMatch
from paceline.verify.verifier import Verifier

VERIFIERS: dict[str, Callable[..., Verifier]] = {
    "sample_match": SampleMatch,
}


def make_verifier(name: str = "sample_match", **options: Any) -> Verifier:
    if name not in VERIFIERS:
        raise InvalidOptionError(f"unknown rejection_sample_method {name!r}; choose one of {', '.join(VERIFIERS)}")
    try:
        return VERIFIERS[name](**options)
    except TypeError as error:
        raise InvalidOptionError(f"rejection_sample_method {name!r} does not take {options}: {error}") from error
