"""The enumerated output distribution of every exact rule equals the target's, on random worlds and options."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from paceline.core.bad_words import BadWords
from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.errors import RequestFailedError
from paceline.verifiers.block import block_walk
from paceline.verifiers.multi_step import multi_step_walk, rejection_walk
from paceline.verifiers.sample_match import sample_match_walk
from paceline.verifiers.spechub import spechub_walk
from paceline.verify.enumeration import Rule, World, largest_difference, tokens_of_rows, toy_logits
from paceline.verify.toy_drafter import ToyDrafter

EXACT = 1e-12
COMMON: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "derandomize": True}


@st.composite
def options(draw: st.DrawFn, vocab: int) -> SamplingParams:
    """Any mixture of options that leaves something to sample."""
    given: dict[str, Any] = {"temperature": draw(st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0]))}
    maybe = {
        "top_k": st.integers(1, vocab),
        "top_p": st.floats(0.3, 1.0),
        "min_p": st.floats(0.0, 0.4),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(st.integers(0, vocab - 1), st.floats(-3.0, 3.0), max_size=2),
        "min_tokens": st.integers(0, 3),
        "allowed_token_ids": st.lists(st.integers(0, vocab - 2), min_size=2, max_size=vocab, unique=True),
    }
    for name in draw(st.lists(st.sampled_from(sorted(maybe)), unique=True, max_size=4)):
        given[name] = draw(maybe[name])
    return SamplingParams(max_tokens=64, stop_token_ids=[vocab - 1], **given)


@st.composite
def worlds(draw: st.DrawFn, vocab: int = 3) -> World:
    bad_words = draw(st.sampled_from([(), ((1, 0),), ((0,),), ((2, 2), (1, 1, 0))]))
    params = SamplingParams() if bad_words == ((0,),) else draw(options(vocab))
    request = Request("toy", [0, 1], params, max_tokens=64, seed=0, bad_words=BadWords(bad_words))
    return World(toy_logits(vocab, draw(st.integers(0, 10**6))), request)


def check_exact(world: World, rule: Rule, drafter: Any, length: int, **kwargs: Any) -> None:
    try:
        expected = world.plain(length)
    except RequestFailedError:  # the options left nothing to sample somewhere: nothing to compare
        reject()
    found = world.emitted(rule, drafter, length, **kwargs)
    assert largest_difference(found, expected) < EXACT


SEEDS = st.integers(0, 10**6)


@settings(max_examples=60, **COMMON)
@given(worlds(), SEEDS, st.sampled_from([(), (1,), (2,), (1, 1), (2, 1), (1, 2), (3, 1)]))
def test_sample_match_on_fixed_trees(world: World, seed: int, shape: Sequence[int]) -> None:
    drafter = ToyDrafter(3, seed, shape, kind="fixed")
    check_exact(world, lambda tree, dice: sample_match_walk(tree), drafter, len(shape) + 1, answer=tokens_of_rows)


@settings(max_examples=15, **COMMON)
@given(
    worlds(), SEEDS, st.sampled_from([(1,), (2,), (1, 1), (2, 1)]), st.sampled_from(["replacement", "no_replacement"])
)
def test_sample_match_on_sampled_trees(world: World, seed: int, shape: Sequence[int], kind: str) -> None:
    drafter = ToyDrafter(3, seed, shape, kind=kind)
    check_exact(world, lambda tree, dice: sample_match_walk(tree), drafter, len(shape) + 1, answer=tokens_of_rows)


@settings(max_examples=40, **COMMON)
@given(worlds(), SEEDS, st.integers(0, 2), st.sampled_from(["replacement", "fixed"]))
def test_rejection(world: World, seed: int, length: int, kind: str) -> None:
    check_exact(world, rejection_walk, ToyDrafter(3, seed, (1,) * length, kind=kind), length + 1)


@settings(max_examples=40, **COMMON)
@given(worlds(), SEEDS, st.integers(0, 3), st.sampled_from(["replacement", "fixed"]))
def test_block(world: World, seed: int, length: int, kind: str) -> None:
    check_exact(world, block_walk, ToyDrafter(3, seed, (1,) * length, kind=kind), length + 1)


@settings(max_examples=40, **COMMON)
@given(
    worlds(),
    SEEDS,
    st.sampled_from([(), (1,), (2,), (3,), (1, 2), (2, 1)]),
    st.sampled_from(["replacement", "no_replacement", "fixed"]),
    st.integers(1, 2),
)
def test_multi_step_with_the_rows_drawn_from(
    world: World, seed: int, shape: Sequence[int], kind: str, members: int
) -> None:
    drafter = ToyDrafter(3, seed, shape, kind=kind, num_members=members)
    check_exact(world, multi_step_walk, drafter, len(shape) + 1)


@settings(max_examples=30, **COMMON)
@given(worlds(), SEEDS, st.sampled_from([(2,), (3,), (2, 1), (1, 2)]), st.integers(1, 2), st.booleans())
def test_multi_step_without_replacement(
    world: World, seed: int, shape: Sequence[int], members: int, conditional: bool
) -> None:
    """replacement=False is right whether siblings share the full row or already carry the conditional ones."""
    kind = "no_replacement" if conditional else "shared_rows"
    drafter = ToyDrafter(3, seed, shape, kind=kind, num_members=members)
    check_exact(world, partial(multi_step_walk, replacement=False), drafter, len(shape) + 1)


@settings(max_examples=30, **COMMON)
@given(worlds(vocab=4), SEEDS)
def test_spechub(world: World, seed: int) -> None:
    check_exact(world, spechub_walk, ToyDrafter(4, seed, (2,), kind="hub_pairs"), 2)
