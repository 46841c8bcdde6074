"""Under a grammar the enumerated output distribution of every exact rule equals constrained plain decoding's.

The drafts are those of any drafter, pruned by the grammar as the engine prunes them. The other options come along."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from paceline.core.tree import DraftTree
from paceline.errors import RequestFailedError
from paceline.verifiers.block import block_walk
from paceline.verifiers.dice import Dice
from paceline.verifiers.multi_step import multi_step_walk, rejection_walk
from paceline.verifiers.sample_match import sample_match_walk
from paceline.verifiers.spechub import spechub_walk
from paceline.verify.enumeration import Rule, World, largest_difference, tokens_of_rows, toy_logits
from paceline.verify.toy_drafter import ToyDrafter
from tests.structured.small_vocabulary import AB, REGEXES, VOCAB, A, B, constrained

EXACT = 1e-12
COMMON: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "derandomize": True}
SEEDS = st.integers(0, 10**6)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    given: dict[str, Any] = {"temperature": draw(st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0]))}
    maybe = {
        "top_k": st.integers(1, VOCAB),
        "top_p": st.floats(0.3, 1.0),
        "min_p": st.floats(0.0, 0.4),
        "repetition_penalty": st.floats(0.5, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-3.0, 3.0), max_size=2),
        "min_tokens": st.integers(0, 3),
        "logits_processors": st.just([lambda tokens, logits: logits.clip(min=-1.0)]),  # undoes every earlier mask
    }
    for name in draw(st.lists(st.sampled_from(sorted(maybe)), unique=True, max_size=3)):
        given[name] = draw(maybe[name])
    return given


@st.composite
def worlds(draw: st.DrawFn) -> World:
    regex = draw(st.sampled_from(REGEXES))
    begun = draw(st.sampled_from([(), (A,), (AB,), (B,)]))
    request = constrained(regex, begun, **draw(options()))
    assert request.constraint is not None
    try:
        request.constraint.allowed(())
    except RequestFailedError:  # the grammar does not begin like this
        reject()
    return World(toy_logits(VOCAB, draw(SEEDS)), request)


def pruned(world: World, draft: Callable[[Dice], DraftTree]) -> Callable[[Dice], DraftTree]:
    constraint = world.request.constraint
    assert constraint is not None
    return lambda dice: constraint.prune(draft(dice))


def check_exact(world: World, rule: Rule, drafter: Any, length: int, **kwargs: Any) -> None:
    expected = world.plain(length)
    for draft in (drafter, pruned(world, drafter)):
        assert largest_difference(world.emitted(rule, draft, length, **kwargs), expected) < EXACT


def match(tree: DraftTree, dice: Dice) -> Any:
    return sample_match_walk(tree)


@settings(max_examples=60, **COMMON)
@given(worlds(), SEEDS, st.sampled_from([(), (1,), (2,), (1, 1), (2, 1), (3, 1), (1, 1, 1)]))
def test_sample_match_on_fixed_trees(world: World, seed: int, shape: Sequence[int]) -> None:
    drafter = ToyDrafter(VOCAB, seed, shape, kind="fixed")
    check_exact(world, match, drafter, len(shape) + 1, answer=tokens_of_rows)


@settings(max_examples=15, **COMMON)
@given(worlds(), SEEDS, st.sampled_from([(1,), (2,), (1, 1)]), st.sampled_from(["replacement", "no_replacement"]))
def test_sample_match_on_sampled_trees(world: World, seed: int, shape: Sequence[int], kind: str) -> None:
    drafter = ToyDrafter(VOCAB, seed, shape, kind=kind)
    check_exact(world, match, drafter, len(shape) + 1, answer=tokens_of_rows)


@settings(max_examples=30, **COMMON)
@given(worlds(), SEEDS, st.integers(0, 2), st.sampled_from(["replacement", "fixed"]))
def test_rejection(world: World, seed: int, length: int, kind: str) -> None:
    check_exact(world, rejection_walk, ToyDrafter(VOCAB, seed, (1,) * length, kind=kind), length + 1)


@settings(max_examples=30, **COMMON)
@given(worlds(), SEEDS, st.integers(0, 3), st.sampled_from(["replacement", "fixed"]))
def test_block(world: World, seed: int, length: int, kind: str) -> None:
    check_exact(world, block_walk, ToyDrafter(VOCAB, seed, (1,) * length, kind=kind), length + 1)


@settings(max_examples=12, **COMMON)
@given(
    worlds(), SEEDS, st.sampled_from([(1,), (2,), (1, 2), (2, 1)]), st.sampled_from(["replacement", "no_replacement"])
)
def test_multi_step(world: World, seed: int, shape: Sequence[int], kind: str) -> None:
    check_exact(world, multi_step_walk, ToyDrafter(VOCAB, seed, shape, kind=kind), len(shape) + 1)


@settings(max_examples=8, **COMMON)
@given(worlds(), SEEDS, st.sampled_from([(2,), (3,)]))
def test_multi_step_without_replacement(world: World, seed: int, shape: Sequence[int]) -> None:
    drafter = ToyDrafter(VOCAB, seed, shape, kind="shared_rows")
    check_exact(world, partial(multi_step_walk, replacement=False), drafter, len(shape) + 1)


@settings(max_examples=25, **COMMON)
@given(worlds(), SEEDS)
def test_spechub(world: World, seed: int) -> None:
    check_exact(world, spechub_walk, ToyDrafter(VOCAB, seed, (2,), kind="hub_pairs"), 2)
