"""Which draft nodes go into the next pass: those that raise the whole batch's tokens per second, and no others.

A node brings the chance that its whole path is accepted. All requests' nodes are ranked together by that chance (a
parent never ranks below its child, so any first n of them are trees), and n is chosen to maximize

    (requests + the n largest chances) / (drafting + T(requests + n))     T: the learned cost of a step of so many rows

The time that drafting took is spent already, whatever is chosen: the longer it was, the larger n becomes. n = 0 is
plain decoding. One sort and one walk decide for the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.core.tree import DraftTree
from paceline.lab.live_pass_cost import PassCostModel


@dataclass(slots=True)
class Selection:
    keep: list[list[int]]  # per tree: nodes kept, ascending
    gain: float  # expected accepted tokens of the nodes kept
    num_nodes: int
    plain_s: float  # expected time of the pass without drafts
    pass_s: float  # and with the nodes kept
    token_s: float  # what a token of the next pass costs, drafting counted; at most what it costs plainly
    bar: float  # a node is worth its row from this chance on


def path_chances(tree: DraftTree) -> list[float]:
    """The chance that each node is accepted with all its ancestors."""
    chances: list[float] = []
    for parent, confidence in zip(tree.parents, tree.confidence or (), strict=False):
        chances.append(confidence if parent < 0 else confidence * chances[parent])
    return chances


def select(
    chances: Sequence[Sequence[float]],  # per tree: path_chances
    num_requests: int,  # in the next pass, with or without a tree
    cost: PassCostModel,
    margin: float,  # the nodes must save this many times what they cost, else none are kept
    drafting_s: float = 0.0,  # what it took to draft them
) -> Selection:
    # (-chance, tree, node): at equal chance a parent stands before its child, because its number is smaller
    ranked = sorted([(-chance, i, node) for i, tree in enumerate(chances) for node, chance in enumerate(tree)])
    seconds = cost.between(num_requests, num_requests + len(ranked), num_requests)
    plain_s = seconds[0]
    tokens, best, best_rate, best_gain = float(num_requests), 0, 0.0, 0.0
    for count, (negative, _, _) in enumerate(ranked, 1):
        tokens -= negative
        rate = tokens / (drafting_s + seconds[count])
        if rate > best_rate:
            best, best_rate, best_gain = count, rate, tokens - num_requests
    if best_gain * plain_s / num_requests < margin * (seconds[best] - plain_s):
        best, best_gain = 0, 0.0
    keep: list[list[int]] = [[] for _ in chances]
    for _, i, node in ranked[:best]:
        keep[i].append(node)
    for nodes in keep:
        nodes.sort()
    token_s = plain_s / num_requests
    if best:
        token_s = min(token_s, (drafting_s + seconds[best]) / (num_requests + best_gain))
    # What a further row costs, averaged over one for each request: one alone may be the first of a tile.
    further_s = cost.at(2 * num_requests + best, num_requests) - seconds[best]
    bar = (1.0 if best else margin) * further_s / num_requests / token_s
    if best:
        bar = min(bar, -ranked[best - 1][0])  # where further rows are expensive, nodes like those kept still pay
    return Selection(keep, best_gain, best, plain_s, seconds[best], token_s, bar)


def whole(priced: Selection, chances: Sequence[Sequence[float]], num_requests: int, cost: PassCostModel) -> Selection:
    """All nodes, of trees that mean nothing in part; the bar stays."""
    num_nodes, gain = sum([len(tree) for tree in chances]), sum([sum(tree) for tree in chances])
    keep = [list(range(len(tree))) for tree in chances]
    return replace(
        priced, keep=keep, gain=gain, num_nodes=num_nodes, pass_s=cost.at(num_requests + num_nodes, num_requests)
    )


def above_bar(chances: Sequence[Sequence[float]], bar: float) -> list[list[int]]:
    """`keep` of a selection without computing a new one: the nodes whose chance reaches the bar of the last one."""
    return [[node for node, chance in enumerate(tree) if chance >= bar] for tree in chances]
