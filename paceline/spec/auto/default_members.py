"""The members of `auto` where the configuration names none: everything useful that this target has.

The training-free methods work on any target. Where a shipped EAGLE-3 drafter fits the target (it is found by itself) it
takes the place of `recycling`: both are for text that was not seen before, and the trained one is right far more often.
Its network takes time for every node, so its tree is small; the others may fill whatever `auto` may offer.
"""

import logging

from paceline.errors import ModelLoadError, PacelineError
from paceline.models.drafters.load import find_shipped
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.engine_parts import EngineParts
from paceline.spec.merge.merge import MergeProposer
from paceline.spec.methods import TRAINING_FREE
from paceline.spec.proposer import Budget

logger = logging.getLogger("paceline")

CANNOT_BUILD = (PacelineError, RuntimeError, MemoryError)  # RuntimeError: torch's, out of memory included


def default_drafters(services: EngineParts, largest: Budget) -> MergeProposer:
    """The members, merged. No user asked for the trained one: where it cannot be built, the others draft without it."""
    members = available_members(services, largest)
    try:
        return MergeProposer(services, largest, members=members)
    except CANNOT_BUILD as error:
        if all(member.method in TRAINING_FREE for member in members):
            raise
        logger.warning("auto drafts without the shipped drafter, which does not work here (%s)", error)
    free = [_member(method, largest) for method in TRAINING_FREE]
    return MergeProposer(services, largest, members=free)  # past the except: what was half built is freed by now


def available_members(services: EngineParts, largest: Budget) -> list[SpeculativeConfig]:
    """Configurations of the members for this target, none of them larger than `largest`."""
    members = [_member(method, largest) for method in TRAINING_FREE]
    if not _has_shipped("eagle3", services):
        return members
    own = SpeculativeConfig.parse({"method": "eagle3"})
    assert own is not None
    nodes = min(own.options["draft_width"], largest.num_nodes)  # as many as a level has paths; some are left out later
    size = Budget(nodes, min(own.num_speculative_tokens, largest.max_depth))
    least = own.options["draft_min_prob"]
    return [*[member for member in members if member.method != "recycling"], _member("eagle3", size, least)]


def _member(method: str, size: Budget, draft_min_prob: float | None = None) -> SpeculativeConfig:
    given = {"method": method, "num_speculative_tokens": size.max_depth, "node_budget": size.num_nodes}
    config = SpeculativeConfig.parse(given if draft_min_prob is None else given | {"draft_min_prob": draft_min_prob})
    assert config is not None
    return config


def _has_shipped(kind: str, services: EngineParts) -> bool:
    if services.decoder is None:
        return False
    try:
        find_shipped(kind, services.decoder.config)
    except ModelLoadError:
        return False
    return True
