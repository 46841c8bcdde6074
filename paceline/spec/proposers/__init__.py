"""The table of drafting methods. Adding one is a file beside this one and a row here.

A row names the class (imported when it is first used), says in a line what the method does, and lists the options that
belong to it. Every method has `num_speculative_tokens` (the longest path) and `node_budget` (nodes in a tree).
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import InvalidOptionError
from paceline.spec.options import Option, choice, either, real, whole, whole_list
from paceline.spec.proposer import Budget, Proposer
from paceline.spec.services import Services

MAX_DRAFT_DEPTH = 128
MAX_DRAFT_NODES = 512


@dataclass(frozen=True, slots=True)
class Method:
    target: str  # "module:Class", called with (services, largest budget, **other options)
    summary: str
    options: Mapping[str, Option] = field(default_factory=dict)
    cross_check: Callable[[Mapping[str, Any]], None] | None = None  # options that must agree with each other
    per_request: bool = True  # a request may choose it although the engine was not set up with it

    def default(self, option: str) -> Any:
        """An option's default; None where the method has no such option."""
        return self.options[option].default if option in self.options else None

    def build(self, services: Services, options: Mapping[str, Any]) -> Proposer:
        module, _, name = self.target.partition(":")
        others = dict(options)
        largest = Budget(others.pop("node_budget", 0), others.pop("num_speculative_tokens", 0))
        proposer: Proposer = getattr(importlib.import_module(module), name)(services, largest, **others)
        return proposer


def _size(depth: int, nodes: int) -> dict[str, Option]:
    return {
        "num_speculative_tokens": Option(depth, whole(1, MAX_DRAFT_DEPTH), "draft tokens along one path"),
        "node_budget": Option(nodes, whole(1, MAX_DRAFT_NODES), "draft nodes in one request's tree"),
    }


def _check_ngram(options: Mapping[str, Any]) -> None:
    low, high = options["prompt_lookup_min"], options["prompt_lookup_max"]
    if low > high:
        raise InvalidOptionError(f"prompt_lookup_min {low} is above prompt_lookup_max {high}: lower the first")


def _members(name: str, value: Any) -> Any:
    """Names or configurations, parsed; a merge of merges would only hide who drafted what."""
    from paceline.spec.config import SpeculativeConfig  # reads this table

    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InvalidOptionError(f"{name} must be a list such as ['ngram', 'suffix'], got {value!r}")
    members = tuple(SpeculativeConfig.parse(member) for member in value)
    for member in members:
        if member is None or member.method in ("auto", "merge", "none"):
            raise InvalidOptionError(f"{name} must be drafting methods other than auto, merge and none, got {value!r}")
    return members


PROPOSERS: dict[str, Method] = {
    "none": Method("paceline.spec.proposers.none:NoProposer", "plain decoding"),
    "ngram": Method(
        "paceline.spec.proposers.ngram:NgramProposer",
        "prompt lookup: copy what followed the last tokens where they stood before",
        _size(4, 4)
        | {
            "prompt_lookup_min": Option(1, whole(1, 32), "shortest n-gram looked up"),
            "prompt_lookup_max": Option(3, whole(1, 32), "longest n-gram looked up"),
        },
        _check_ngram,
    ),
    "suffix": Method(
        "paceline.spec.proposers.suffix:SuffixProposer",
        "suffix decoding: all places where the text's end stood before, here or in past outputs, vote",
        _size(16, 16)
        | {
            "suffix_decoding_max_tree_depth": Option(24, whole(1, 128), "longest match looked for"),
            "suffix_decoding_max_cached_requests": Option(10_000, whole(0, 10**9), "past outputs kept, 0: none"),
            "suffix_decoding_max_cached_tokens": Option(1 << 18, whole(0, 1 << 30), "tokens of past outputs kept"),
            "suffix_decoding_max_spec_factor": Option(4.0, real(0.0, 64.0), "draft length over match length"),
            "suffix_decoding_min_token_prob": Option(0.03, real(0.0, 1.0), "least probability of a path"),
        },
    ),
    "prediction": Method(
        "paceline.spec.proposers.prediction:PredictionProposer",
        "the client's expected text, realigned after each mismatch",
        _size(24, 24),
    ),
    "recycling": Method(
        "paceline.spec.proposers.recycling:RecyclingProposer",
        "token recycling: the target's own likeliest successors of each token fill a tree",
        _size(6, 40) | {"recycling_top_k": Option(8, whole(1, 64), "successors kept for each token")},
    ),
    "merge": Method(
        "paceline.spec.proposers.merge:MergeProposer",
        "several methods on one tree; the budget goes to the likeliest nodes",
        _size(16, 32) | {"members": Option(("ngram", "suffix", "recycling"), _members, "names or configurations")},
    ),
    "auto": Method(
        "paceline.spec.controller:AutoProposer",
        "as merge, but each step drafts only what pays by the costs and acceptance measured so far",
        _size(16, 24) | {"members": Option(("prediction", "ngram", "suffix"), _members, "names or configurations")},
    ),
    "oracle": Method(
        "paceline.spec.proposers.oracle:OracleProposer",
        "drafts known outputs with a chosen accuracy and tree shape: for tests and the lab",
        _size(4, 64)
        | {
            "sequences": Option((), lambda name, value: value, "prompt + output token ids, known beforehand"),
            "accuracy": Option(1.0, real(0.0, 1.0), "chance that the true token is among a true node's children"),
            "shape": Option("chain", either(choice("chain", "random"), whole_list(1, 64)), "or widths by depth"),
            "seed": Option(0, whole(0, 2**63 - 1), "of the wrong tokens, and of where the true one stands"),
        },
        per_request=False,
    ),
}


def build_proposer(method: str, services: Services, options: Mapping[str, Any]) -> Proposer:
    return PROPOSERS[method].build(services, options)
