"""The speculator asks proposers what they declare, and acts on it."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.spec.auto.controller import AutoProposer
from paceline.spec.config.speculative_config import SpeculativeConfig, at_default_size
from paceline.spec.methods import PROPOSERS
from paceline.spec.proposer import Budget, Needs, Proposer, RequestPass, StepContext
from paceline.spec.speculator import Speculator
from tests.spec.replaying import SERVICES, request, speculator


class Drowsy(Proposer):
    """Wants to be skipped for some steps, and counts what happens to it."""

    def __init__(self, num_to_skip: int) -> None:
        self.num_to_skip = num_to_skip
        self.num_skipped = self.num_asked = self.num_told = 0

    def skips_next_step(self) -> bool:
        return self.num_skipped < self.num_to_skip

    def skip_step(self) -> None:
        self.num_skipped += 1

    def observe(self, step: StepContext) -> None:
        self.num_told += 1

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        self.num_asked += 1
        return [EMPTY_TREE for _ in budgets]


def run(spec: Speculator, num_steps: int, gone_at: int = -1) -> None:
    job = request([1, 2, 3])
    for i in range(num_steps):
        spec.observe(StepContext([], [RequestPass(job, range(1), 0, 1)], [job] if i == gone_at else []))
        spec.propose(StepContext([job]))


def with_proposers(**proposers: Proposer) -> Speculator:
    spec = speculator({"method": "ngram"})
    spec._proposers.clear()
    spec._proposers.update(proposers)
    return spec


def test_a_proposer_that_says_so_is_neither_asked_nor_told() -> None:
    ngram = Drowsy(num_to_skip=3)
    run(with_proposers(ngram=ngram), num_steps=5)
    assert (ngram.num_skipped, ngram.num_asked) == (3, 2)
    assert ngram.num_told == 2  # of the first pass, before anything was skipped, and of the last one


def test_in_skipped_steps_it_is_told_which_requests_ended() -> None:
    ngram = Drowsy(num_to_skip=10)
    run(with_proposers(ngram=ngram), num_steps=5, gone_at=3)
    assert ngram.num_told == 2


def test_a_step_is_skipped_only_where_all_proposers_agree() -> None:
    ngram, suffix = Drowsy(num_to_skip=3), Drowsy(num_to_skip=0)
    run(with_proposers(ngram=ngram, suffix=suffix), num_steps=5)
    assert (ngram.num_skipped, ngram.num_asked, ngram.num_told) == (0, 5, 5)
    assert suffix.num_told == 5


def test_what_a_proposer_declares_by_default_changes_nothing() -> None:
    class Least(Proposer):
        def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
            return [EMPTY_TREE for _ in budgets]

    spec = speculator({"method": "ngram"})
    least = Least(spec.services, Budget(4, 4))
    least.check_params(SamplingParams())
    least.observe(StepContext([]))
    assert least.needs == Needs() and not least.keeps_min_prob and not least.skips_next_step()
    assert least.report() == {} and least.member_figures() == {}


def test_the_clock_reaches_members_too() -> None:
    given: list[Callable[[], float]] = []

    class Timed(Drowsy):
        def use_clock(self, clock: Callable[[], float]) -> None:
            given.append(clock)

    for method in ("merge", "auto"):
        spec = speculator({"method": method, "members": ["ngram"]})
        proposer = spec.proposers[method]
        merged = proposer if method == "merge" else proposer.drafters  # type: ignore[attr-defined]
        merged.members["ngram"] = Timed(0)  # type: ignore[attr-defined]
        spec.use_clock(lambda: 7.0)
        assert merged.usefulness.clock() == 7.0  # type: ignore[attr-defined]
    assert len(given) == 2


@pytest.mark.parametrize("method", PROPOSERS)
def test_every_method_inherits_what_is_asked_of_it(method: str) -> None:
    """So no caller has to check whether a proposer has an attribute."""
    module, _, name = PROPOSERS[method].target.partition(":")
    assert issubclass(getattr(importlib.import_module(module), name), Proposer)


@pytest.mark.parametrize(
    ("given", "by_price"),
    [
        ({"method": "recycling"}, True),
        ({"method": "merge", "members": ["ngram", {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0}]}, True),
        ({"method": "lookahead"}, True),
        ({"method": "recycling", "node_budget": 12}, False),
        ({"method": "recycling", "num_speculative_tokens": 3}, False),
        ({"method": "merge", "members": ["ngram", {"method": "suffix", "node_budget": 4}]}, False),
        ({"method": "lookahead", "window_size": 4}, False),
        ({"method": "recycling", "rejection_sample_method": "multi_step"}, False),
        ({"method": "draft_model", "num_draft_layers": 1, "draft_sampling": "sampled"}, False),
        ({"method": "auto"}, False),
        ({"method": "none"}, False),
    ],
    ids=str,
)
def test_a_size_that_is_given_is_kept_and_others_go_by_price(given: dict[str, Any], by_price: bool) -> None:
    config = SpeculativeConfig.parse(given)
    assert config is not None and config.sized_by_price == by_price
    fixed = at_default_size(given)
    assert not fixed.sized_by_price
    assert (fixed.options, fixed.is_sized) == (config.options, config.is_sized)


def test_an_engine_drafts_by_price_what_it_was_given_no_size_for() -> None:
    priced = Speculator({"method": "suffix"}, SERVICES, by_price=True)
    suffix = priced.proposers["suffix"]
    assert isinstance(suffix, AutoProposer) and set(suffix.drafters.members) == {"suffix"}
    assert priced.stats()["suffix"]["size"] == "by price, at most 16 nodes, depth 16"
    kept = Speculator({"method": "suffix", "node_budget": 5}, SERVICES, by_price=True)
    assert not isinstance(kept.proposers["suffix"], AutoProposer) and kept.max_nodes == 5
    assert kept.stats()["suffix"]["size"] == "as given, 5 nodes, depth 16"
    whole = Speculator({"method": "ngram", "rejection_sample_method": "rejection"}, SERVICES, by_price=True)
    assert "whether it pays or not: the rule" in whole.stats()["ngram"]["size"]
    assert not isinstance(Speculator({"method": "suffix"}, SERVICES).proposers["suffix"], AutoProposer)


def test_the_members_and_the_record_of_merge_go_by_price_too() -> None:
    credit = (("ngram", 0, 7, 1, 30.0, 40.0),)
    spec = Speculator({"method": "merge", "members": ["ngram", "suffix"], "credit": credit}, SERVICES, by_price=True)
    merged = spec.proposers["merge"]
    assert isinstance(merged, AutoProposer) and set(merged.drafters.members) == {"ngram", "suffix"}
    assert merged.drafters.credit.rows() == list(credit)


def test_a_method_that_a_request_brings_has_its_default_size() -> None:
    spec = Speculator({"method": "suffix"}, SERVICES, by_price=True)
    spec.check_request(SamplingParams(speculative={"method": "ngram"}))
    assert not isinstance(spec.proposers["ngram"], AutoProposer)
