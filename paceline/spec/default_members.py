"""The members of `auto` where the configuration names none: everything useful that this target has.

The training-free methods work on any target. Where a shipped EAGLE-3 drafter fits the target (it is found by itself) it
takes the place of `recycling`: both are for text that was not seen before, both have to be tried to know whether they
pay, and the trained one is right far more often. A drafter with a network takes time for every level it drafts, so it
gets a short chain; the others cost next to nothing and may fill whatever `auto` may offer.
"""

import logging
from collections.abc import Sequence
from typing import Any

from paceline.errors import ModelLoadError, PacelineError
from paceline.models.drafters.load import find_shipped
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.engine_parts import EngineParts
from paceline.spec.merge.members import Members
from paceline.spec.methods import TRAINING_FREE
from paceline.spec.proposer import Budget

logger = logging.getLogger("paceline")

EAGLE3_SIZE, EAGLE3_LEAST = Budget(num_nodes=6, max_depth=6), 0.1  # a chain as long as it stays likely

CANNOT_BUILD = (PacelineError, RuntimeError, MemoryError)  # RuntimeError: torch's, out of memory included


def build_members(
    services: EngineParts, largest: Budget, configs: Sequence[SpeculativeConfig] | None = None
) -> Members:
    """Those that were asked for, or all that this target has. No user asked for the trained one then: where it cannot
    be built, the others draft without it."""
    if configs is not None:
        return Members.build(services, configs)
    found = available_members(services, largest)
    try:
        return Members.build(services, found)
    except CANNOT_BUILD as error:
        if all(member.method in TRAINING_FREE for member in found):
            raise
        logger.warning("auto drafts without the shipped drafter, which does not work here (%s)", error)
    # past the except: what was half built is freed by now
    return Members.build(services, [_member(method, largest) for method in TRAINING_FREE])


def available_members(services: EngineParts, largest: Budget) -> list[SpeculativeConfig]:
    """Configurations of the members for this target, none of them larger than `largest`."""
    members = [_member(method, largest) for method in TRAINING_FREE]
    if _has_shipped("eagle3", services):
        members = [member for member in members if member.method != "recycling"]
        members.append(_member("eagle3", _smaller(EAGLE3_SIZE, largest), draft_min_prob=EAGLE3_LEAST))
    logger.debug("auto drafts with %s", ", ".join(member.method for member in members))
    return members


def _member(method: str, size: Budget, **options: Any) -> SpeculativeConfig:
    config = SpeculativeConfig.parse(
        {"method": method, "num_speculative_tokens": size.max_depth, "node_budget": size.num_nodes, **options}
    )
    assert config is not None
    return config


def _smaller(one: Budget, other: Budget) -> Budget:
    return Budget(min(one.num_nodes, other.num_nodes), min(one.max_depth, other.max_depth))


def _has_shipped(kind: str, services: EngineParts) -> bool:
    if kind in services.stand_ins:
        return True
    if services.decoder is None:
        return False
    try:
        find_shipped(kind, services.decoder.config)
    except ModelLoadError:
        return False
    return True
