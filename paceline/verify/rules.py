"""Every exact rule, enumerated over random targets, drafters, trees and options."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.errors import RequestFailedError
from paceline.verifiers.block import block_walk
from paceline.verifiers.multi_step import multi_step_walk, rejection_walk
from paceline.verifiers.sample_match import sample_match_walk
from paceline.verifiers.spechub import spechub_walk
from paceline.verify.check import Check
from paceline.verify.enumeration import (
    AnswerRows,
    Rule,
    World,
    largest_difference,
    probs_of_rows,
    tokens_of_rows,
    toy_logits,
)
from paceline.verify.toy_drafter import ToyDrafter

VOCAB = 3
TOLERANCE = 1e-12
STOP_TOKEN = VOCAB - 1


@dataclass(frozen=True, slots=True)
class RuleCase:
    name: str
    rule: Rule
    kinds: tuple[str, ...]  # of drafts, see ToyDrafter
    shapes: tuple[tuple[int, ...], ...]
    members: tuple[int, ...] = (1,)
    answer: AnswerRows = probs_of_rows


CHAINS = ((), (1,), (1, 1))
TREES = ((2,), (1, 2), (2, 1))
RULE_CASES = (
    RuleCase(
        "sample_match",
        lambda tree, dice: sample_match_walk(tree),
        ("fixed", "replacement"),
        ((), (1,), (2,), (1, 1)),
        answer=tokens_of_rows,
    ),
    RuleCase("rejection", rejection_walk, ("replacement", "fixed"), CHAINS),
    RuleCase("multi_step", multi_step_walk, ("replacement", "no_replacement"), TREES),
    RuleCase("multi_step, several drafters", multi_step_walk, ("replacement",), TREES, members=(2,)),
    RuleCase(
        "multi_step, without replacement", partial(multi_step_walk, replacement=False), ("shared_rows",), TREES, (1, 2)
    ),
    RuleCase("block", block_walk, ("replacement", "fixed"), (*CHAINS, (1, 1, 1))),
    RuleCase("spechub", spechub_walk, ("hub_pairs",), ((2,),)),
)

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 2},
    {"top_p": 0.7, "min_p": 0.1},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.8, "presence_penalty": -0.5},
    {"logit_bias": {0: 1.5}, "min_tokens": 2},
    {"allowed_token_ids": [0, 1]},
)


def check_rules(num_worlds: int) -> Iterator[Check]:
    """One check per rule: the largest difference of any probability, over `num_worlds` random worlds."""
    for case in RULE_CASES:
        begin_s = time.perf_counter()
        found = list(differences(case, num_worlds))
        worst = max(found)
        yield Check(
            kind="rules",
            case=case.name,
            passed=worst <= TOLERANCE,
            finding=f"largest error {worst:.1e} of any probability, {len(found)} worlds enumerated",
            figures={"largest_difference": worst, "tolerance": TOLERANCE, "num_worlds": len(found)},
            seconds=time.perf_counter() - begin_s,
        )


def differences(case: RuleCase, num_worlds: int) -> Iterator[float]:
    drafts = itertools.cycle(itertools.product(case.kinds, case.shapes, case.members))
    worlds = (random_world(seed) for seed in itertools.count())
    for _ in range(num_worlds):
        kind, shape, members = next(drafts)
        seed, world = next(worlds)
        drafter = ToyDrafter(VOCAB, seed, shape, kind, members)
        length = len(shape) + 1
        try:
            expected = world.plain(length)
        except RequestFailedError:  # the options left nothing to sample somewhere
            continue
        yield largest_difference(world.emitted(case.rule, drafter, length, case.answer), expected)


def random_world(seed: int) -> tuple[int, World]:
    generator = np.random.default_rng(seed)
    params = SamplingParams(max_tokens=64, stop_token_ids=[STOP_TOKEN], **OPTIONS[seed % len(OPTIONS)])
    prompt = generator.integers(VOCAB, size=2).tolist()
    request = Request("toy", prompt, params, max_tokens=64, seed=0)
    return seed, World(toy_logits(VOCAB, seed), request)
