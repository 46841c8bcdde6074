"""What was learned from a recording can be given to a new engine: a tree's chances, and the members' credit."""

import random
from typing import Any

import pytest

from paceline.core.tree import DraftTree
from paceline.errors import InvalidOptionError
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.merge.credit import START_GUESSES, Credit, make_guess
from paceline.spec.merge.merge import MergeProposer
from paceline.spec.proposer import RequestPass, StepContext
from tests.spec.replaying import request, speculator

FIRST, SECOND = make_guess("a", 1, 0, None), make_guess("b", 2, 1, 0.4)


def learned() -> Credit:
    credit = Credit()
    rng = random.Random(0)
    for _ in range(150):
        credit.record([FIRST], False, rng.random() < 0.9)
        credit.record([SECOND], False, rng.random() < 0.1)
    return credit


def test_a_credit_made_from_the_rows_of_another_estimates_the_same() -> None:
    old = learned()
    new = Credit(old.rows())
    for guess in (FIRST, SECOND, make_guess("a", 3, 0, 0.7)):  # the last was never judged: it falls back
        assert new.chance([guess], False) == pytest.approx(old.chance([guess], False))
    assert Credit().chance([FIRST], False) < 0.5 < new.chance([FIRST], False)


def test_new_guesses_soon_weigh_more_than_the_given_rows() -> None:
    rows = [(member, rank, bucket, depth, 0.0, 1e6) for member, rank, bucket, depth in (FIRST,)]
    credit = Credit(rows)
    for _ in range(2 * int(START_GUESSES)):
        credit.record([FIRST], False, True)
    assert credit.chance([FIRST], False) > 0.6


def merged(config: dict[str, Any]) -> MergeProposer:
    proposer = speculator({"method": "merge"} | config).proposers["merge"]
    assert isinstance(proposer, MergeProposer)
    return proposer


def test_merge_starts_with_the_credit_rows_it_is_given() -> None:
    guess = make_guess("suffix", 1, 0, 0.5)
    rows = [["ngram", 0, 7, 1, 5, 100], ["suffix", *guess[1:], 90, 100]]
    proposer = merged({"members": ["ngram", "suffix"], "credit": rows})
    assert proposer.credit.chance([guess], False) > 0.8
    assert proposer.credit.chance([make_guess("ngram", 1, 0, 0.75)], False) < 0.2
    assert merged({}).credit.rows() == []


@pytest.mark.parametrize(
    "rows",
    [3, "rows.json", [3], [["ngram", 0, 7, 1, 5]], [["ngram", 0, 7, 1, 50, 40]], [["ngram", 0, 7, 1, -1, 4]]],
    ids=str,
)
def test_malformed_credit_rows_are_refused(rows: Any) -> None:
    with pytest.raises(InvalidOptionError, match="credit"):
        SpeculativeConfig.parse({"method": "merge", "credit": rows})


def test_credit_rows_of_a_method_that_is_no_member_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="credit names 'suffix', but the members are ngram"):
        merged({"members": ["ngram"], "credit": [["suffix", 0, 7, 1, 5, 10]]})


def first_tree(config: dict[str, Any]) -> DraftTree:
    """After a prompt in which 1 has had three successors, each of which had some too."""
    spec = speculator({"method": "recycling", "num_speculative_tokens": 3, "node_budget": 4} | config)
    job = request([1, 2, 5, 1, 3, 6, 1, 4, 7, 8, 9, 1])
    spec.observe(StepContext([], [RequestPass(job, range(12), 0, 12)]))
    [tree] = spec.propose(StepContext([job]))
    return tree


def test_recycling_shapes_its_tree_by_the_chances_it_is_given() -> None:
    chain = first_tree({"recycling_acceptance": [[0.9, 0.01, 0.01]]})
    fork = first_tree({"recycling_acceptance": [[0.4, 0.35, 0.3], [0.2]]})
    late_fork = first_tree({"recycling_acceptance": [[0.5], [0.9], [0.4, 0.3]]})
    assert max(chain.depths()) == 3
    assert fork.depths() == [1, 1, 1, 2]
    assert late_fork.depths()[:3] == [1, 2, 3]  # these tables hold no second successor for the fork to use


@pytest.mark.parametrize("table", [[], [[]], [0.5], "0.5", [[0.5, 1.5]], [[None]], 0.5], ids=str)
def test_malformed_acceptance_tables_are_refused(table: Any) -> None:
    with pytest.raises(InvalidOptionError, match="recycling_acceptance"):
        SpeculativeConfig.parse({"method": "recycling", "recycling_acceptance": table})
