"""R4, SpecHub: the best use of two candidates, when they were drawn as a hub pair.

With a = argmax q and i any other token, the drafter draws the pair (i, a) with probability q(i), or (a, i) with
q(a) q(i) / (1 - q(a)), as `draft_tokens(mode="spechub")` does.
The hub a is in every pair, so its target mass can always be met in full:

- token i is let through from (i, a) up to q(i), and from (a, i) for what is still missing of p(i);
- whatever is left over goes to a, with the same probability for every pair, so that a gets exactly p(a);
- the rest is drawn from norm((p(i) - q(i)/(1 - q(a)))+) over i != a.

A node with one child is verified as in R2.
"""

import numpy as np

from paceline.core.tree import DraftTree
from paceline.errors import RequestFailedError
from paceline.ops.random import Purpose
from paceline.ops.sampling_types import Probs
from paceline.verifiers.dice import Dice
from paceline.verifiers.multi_step import children_in_draw_order
from paceline.verifiers.residual import accept_probability, draft_distribution, residual
from paceline.verifiers.walk import ROOT, Path, Walk


def spechub_walk(tree: DraftTree, dice: Dice) -> Walk[Probs]:
    children = children_in_draw_order(tree)
    accepted: list[int] = []
    node = ROOT
    while True:
        (p,) = yield (node,)
        if not children[node]:
            return Path(accepted, dice.choose(p, Purpose.BONUS))
        if len(children[node]) == 1:
            (child,) = children[node]
            q = draft_distribution(tree, child, len(p))
            if not dice.accept(accept_probability(p, q, tree.token_ids[child]), Purpose.ACCEPT, child):
                return Path(accepted, dice.choose(residual(p, q), Purpose.RECOVER))
        else:
            chosen = _try_pair(tree, children[node], p, dice)
            if chosen is None:
                q = draft_distribution(tree, children[node][0], len(p))
                return Path(accepted, dice.choose(pair_residual(p, q), Purpose.RECOVER))
            child = chosen
        accepted.append(child)
        node = child


def _try_pair(tree: DraftTree, pair: list[int], p: Probs, dice: Dice) -> int | None:
    """The child that is let through, if any. The other token comes first, the hub takes what is left."""
    q = draft_distribution(tree, pair[0], len(p))
    hub = int(q.argmax())
    tokens = [tree.token_ids[child] for child in pair]
    if len(pair) != 2 or tokens.count(hub) != 1:
        raise RequestFailedError(
            f"spechub verifies pairs of the drafter's likeliest token {hub} and another, got siblings {tokens}; "
            "draw them with mode='spechub', or use multi_step"
        )
    hub_child = pair[tokens.index(hub)]
    other_child = pair[1 - tokens.index(hub)]
    other = tree.token_ids[other_child]
    hub_first = tokens[0] == hub
    if dice.accept(other_probability(p, q, other, hub, hub_first), Purpose.ACCEPT, other_child):
        return other_child
    return hub_child if dice.accept(hub_probability(p, q, hub), Purpose.ACCEPT, hub_child) else None


def other_probability(p: Probs, q: Probs, other: int, hub: int, hub_first: bool) -> float:
    wanted, drawn = float(p[other]), float(q[other])
    if not hub_first:
        return min(1.0, wanted / drawn)
    pair_mass = float(q[hub]) * drawn / (1.0 - float(q[hub]))
    return min(1.0, max(0.0, wanted - drawn) / pair_mass)


def hub_probability(p: Probs, q: Probs, hub: int) -> float:
    """p(a) over the mass of all pairs whose other token was not let through."""
    let_through = np.minimum(p, q / (1.0 - q[hub]))
    let_through[hub] = 0.0
    left_over = 1.0 - float(let_through.sum())
    return min(1.0, float(p[hub]) / left_over) if left_over > 0.0 else 0.0


def pair_residual(p: Probs, q: Probs) -> Probs:
    hub = int(q.argmax())
    left = (p - q / (1.0 - q[hub])).clip(min=0.0)
    left[hub] = 0.0
    return left if float(left.sum()) > 0.0 else p
