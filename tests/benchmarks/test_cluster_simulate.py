"""benchmarks/cluster.py simulate-check: what is asked follows from --lengths, --answer and --seed alone."""

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class Words:
    """A tokenizer of characters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.fixture(scope="module")
def simulate() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("cluster_simulate")


def asked(simulate: ModuleType, seed: int, lengths: tuple[int, ...] = (60, 150, 330), answer: int = 24) -> list[Any]:
    args = argparse.Namespace(tokenizer=Words(), seconds=10.0, lengths=list(lengths), answer=answer, seed=seed)
    return [ask for row in range(12) for ask in simulate.load(args, 4.0, simulate.load_seed(args, row))]


def test_a_load_is_the_same_for_the_same_seed_and_shares_nothing_with_that_of_another(simulate: ModuleType) -> None:
    first, other = asked(simulate, 0), asked(simulate, 1)
    assert first == asked(simulate, 0)
    assert not {ask.arrival_s for ask in first} & {ask.arrival_s for ask in other}
    assert not {tuple(ask.prompt) for ask in first} & {tuple(ask.prompt) for ask in other}


def test_prompts_and_answers_have_the_lengths_that_were_given(simulate: ModuleType) -> None:
    asks = asked(simulate, 0, (40, 90), 7)
    assert {len(ask.prompt) for ask in asks} == {40, 90} and {ask.num_tokens for ask in asks} == {7}
