"""R3, multi-step (SpecInfer, EAGLE-1, Sequoia), and R2, rejection (Leviathan, Chen): trees and chains sampled from q.

At a node, the children are tried in the order they were drawn. Child x with its own q is let through with probability
min(1, p(x)/q(x)); if not, p becomes norm((p - q)+) and the next child is tried against that. When none is left, the
token is drawn from what p has become. On a chain this is R2.

Each child uses the distribution that it was really drawn from, given its elder siblings. Several drafters may mix;
duplicates stay. Siblings drawn with replacement carry the same q. Siblings drawn without replacement may carry the
conditional rows (nothing more to do), or all the same full row: then `replacement=False` takes the elder siblings of
the same drafter out of q and renormalises, without which the rule is biased.
"""

from paceline.core.tree import DraftTree
from paceline.errors import RequestFailedError
from paceline.ops.random import Purpose
from paceline.ops.sampling_types import Probs
from paceline.verifiers.dice import Dice
from paceline.verifiers.residual import accept_probability, draft_distribution, residual, without
from paceline.verifiers.walk import ROOT, Path, Walk


def rejection_walk(tree: DraftTree, dice: Dice) -> Walk[Probs]:
    require_chain(tree, "rejection", "multi_step")
    return (yield from multi_step_walk(tree, dice))


def multi_step_walk(tree: DraftTree, dice: Dice, replacement: bool = True) -> Walk[Probs]:
    children = children_in_draw_order(tree)
    accepted: list[int] = []
    node = ROOT
    while True:
        (p,) = yield (node,)
        drawn: dict[tuple[str, ...], list[int]] = {}  # drafter -> tokens it has drawn here
        for child in children[node]:
            token = tree.token_ids[child]
            q = draft_distribution(tree, child, len(p))
            if not replacement:
                elder = drawn.setdefault(tree.members[child] if tree.members else (), [])
                q = without(q, elder)
                elder.append(token)
            if dice.accept(accept_probability(p, q, token), Purpose.ACCEPT, child):
                accepted.append(child)
                node = child
                break
            p = residual(p, q)
        else:
            purpose = Purpose.RECOVER if children[node] else Purpose.BONUS
            return Path(accepted, dice.choose(p, purpose))


def children_in_draw_order(tree: DraftTree) -> list[list[int]]:
    """For each node, and at [ROOT] for the root, its children; duplicates are children of their own."""
    children: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for node, parent in enumerate(tree.parents):
        children[parent].append(node)
    return children


def require_chain(tree: DraftTree, rule: str, alternative: str) -> None:
    if not tree.is_chain:
        raise RequestFailedError(
            f"{rule} verifies chains, but the draft is a tree with parents {tree.parents}; "
            f"use {alternative} or sample_match, or a method that drafts chains"
        )
