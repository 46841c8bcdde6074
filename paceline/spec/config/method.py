"""A row of the methods' table, and what rows have in common."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, Protocol, runtime_checkable

from paceline.errors import InvalidOptionError
from paceline.spec.config.options import Option, choice, flag, optional, real, text, whole, whole_list
from paceline.spec.engine_parts import EngineParts
from paceline.spec.proposer import Budget, Proposer

MAX_DRAFT_DEPTH = 128
MAX_DRAFT_NODES = 512
LEAST_LIKELY = 0.1  # probability of a path, by the drafter


@runtime_checkable
class Loaded(Protocol):
    """A model that is in memory already."""

    decoder: Any
    tokenizer: Any


@dataclass(frozen=True, slots=True)
class Method:
    target: str  # "module:Class", a `Proposer`, called with (services, largest budget, **other options)
    summary: str
    options: Mapping[str, Option] = field(default_factory=dict)
    derive: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # defaults that depend on what was given
    cross_check: Callable[[Mapping[str, Any]], None] | None = None  # options that must agree with each other
    chain: Callable[[Mapping[str, Any]], bool] = lambda options: False  # it drafts chains only, never branches
    per_request: bool = True  # a request may choose it although the engine was not set up with it
    # For code that runs all methods, such as the conformance suite:
    example: Mapping[str, Any] = field(default_factory=dict)  # options with which it drafts on any target
    told_by: str | None = None  # where it is told what to draft: an option of whole sequences, or a request's own key
    drafts: bool = True  # False: it is plain decoding
    priced: bool = True  # without a size of the user's, an engine on a CPU drafts with it only as much as pays
    by_time: bool = False  # it decides by measured time, so what it drafts is not the same in two runs

    def default(self, option: str) -> Any:
        """An option's default; None where the method has no such option."""
        return self.options[option].default if option in self.options else None

    def build(self, services: EngineParts, options: Mapping[str, Any]) -> Proposer:
        module, _, name = self.target.partition(":")
        others = dict(options)
        largest = Budget(others.pop("node_budget", 0), others.pop("num_speculative_tokens", 0))
        proposer: Proposer = getattr(importlib.import_module(module), name)(services, largest, **others)
        return proposer


def size(depth: int, nodes: int) -> dict[str, Option]:
    return {
        "num_speculative_tokens": Option(depth, whole(1, MAX_DRAFT_DEPTH), "draft tokens along one path"),
        "node_budget": Option(nodes, whole(1, MAX_DRAFT_NODES), "draft nodes in one request's tree"),
    }


def model_options() -> dict[str, Option]:
    """What every method that drafts with a model has."""
    modes = choice("greedy", "sampled", "coupled")
    return size(4, 4) | {
        "draft_sampling": Option(None, optional(modes), "how tokens are taken from its logits; coupled if it can"),
        "tree_widths": Option(None, optional(whole_list(1, 64)), "children of each node by depth; a chain without"),
    }


def feature_options(depth: int, nodes: int) -> dict[str, Option]:
    """What every trained drafter on the target's hidden states has."""
    modes = choice("greedy", "sampled", "coupled")
    return size(depth, nodes) | {
        "model": Option(None, optional(text), "the drafter's file or folder; without: the one shipped for the target"),
        "draft_sampling": Option(None, optional(modes), "how tokens are taken from its logits; coupled if it can"),
        "draft_width": Option(8, whole(1, 64), "children of a node, and paths extended at each depth"),
        "draft_min_prob": Option(0.0, real(0.0, 1.0), "least probability, by the drafter, of a path that is offered"),
    }


# Of the drafters that draft whole trees on a GPU.
BY_PRICE = {
    "size_by_price": Option(False, flag, "on a GPU: only as much as pays for so many requests, node_budget at most")
}


def likely_paths(given: dict[str, Any]) -> dict[str, Any]:
    """A `node_budget` that was asked for is filled. Without one, whatever `num_speculative_tokens` says, a node must be
    likely enough to pay for its row of the pass: on a CPU a row costs a few percent of a pass, and a wrong one is for
    nothing."""
    return given if "node_budget" in given else {"draft_min_prob": LEAST_LIKELY} | given


def is_chain(options: Mapping[str, Any]) -> bool:
    """There is room for one path only."""
    return bool(options["node_budget"] <= options["num_speculative_tokens"])


def check_features(options: Mapping[str, Any]) -> None:
    if options["draft_sampling"] == "sampled" and not is_chain(options):
        raise InvalidOptionError(
            "draft_sampling 'sampled' drafts chains, because a tree whose shape follows the drawn tokens would bias "
            f"the output; set node_budget (now {options['node_budget']}) to num_speculative_tokens "
            f"({options['num_speculative_tokens']}), or use 'coupled' or 'greedy'"
        )


def derive_from_widths(given: dict[str, Any]) -> dict[str, Any]:
    """A width schedule says how deep and how large the tree is."""
    widths = given.get("tree_widths")
    if isinstance(widths, Sequence) and widths and all(isinstance(width, int) for width in widths):
        sizes = {"num_speculative_tokens": len(widths), "node_budget": num_nodes(widths)}
        return sizes | given
    return given


def check_widths(options: Mapping[str, Any]) -> None:
    widths = options["tree_widths"]
    if widths is None:
        return
    if num_nodes(widths) > options["node_budget"]:
        raise InvalidOptionError(
            f"tree_widths {list(widths)} make {num_nodes(widths)} nodes, more than the {options['node_budget']} slots "
            "of node_budget: raise it or narrow the tree"
        )
    if len(widths) != options["num_speculative_tokens"]:
        raise InvalidOptionError(
            f"tree_widths {list(widths)} are {len(widths)} levels, but num_speculative_tokens is "
            f"{options['num_speculative_tokens']}: leave it out"
        )


def num_nodes(widths: Sequence[int]) -> int:
    return sum(accumulate(widths, mul))


def feature_method(
    target: str, summary: str, *, depth: int, nodes: int, options: Mapping[str, Option] | None = None
) -> Method:
    """The row of a trained drafter on the target's hidden states, with options of its own."""
    return Method(
        target,
        summary,
        feature_options(depth, nodes) | dict(options or {}),
        derive=likely_paths,
        cross_check=check_features,
        chain=is_chain,
        per_request=False,
        # Random weights are sure of nothing: without a floor and with a branch or two, they are right now and then.
        example={"model": "untrained", "draft_min_prob": 0.0, "node_budget": depth + 2},
    )
