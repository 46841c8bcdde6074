"""Which nodes go into the next pass. The one rule: a thing is bought iff it is expected to bring more tokens than its
seconds are worth, at the batch's present tokens per second.

A node brings the chance that its whole path is accepted, and takes a row of the pass. All requests' nodes are ranked
together by that chance (a parent never ranks below its child, so any first n of them are trees); the first n are bought
for the n with the largest surplus

    sum of the n largest chances - rate x (T(rows + n) - T(rows))

On a smooth curve this keeps each node that is worth its own row. On one with steps, as where passes are padded to
captured sizes, it fills the size that pays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.lab.live_pass_cost import PassCostModel
from paceline.spec.merge.guess import BUCKETS

LEAST_CHANCE = 1.0 / BUCKETS  # of a path; what is known is not exact enough to tell smaller ones apart


@dataclass(slots=True)
class Choice:
    keep: list[list[int]]  # per tree: the nodes bought, ascending
    num_nodes: int
    tokens: float  # expected of them
    seconds: float  # that their rows take


def choose(
    chances: Sequence[Sequence[float]],  # per tree: of each node's whole path
    num_requests: int,  # in the next pass, with or without a tree
    cost: PassCostModel,
    tokens_per_s: float,
) -> Choice:
    ranked = [
        (-chance, i, node)
        for i, tree in enumerate(chances)
        for node, chance in enumerate(tree)
        if chance > LEAST_CHANCE
    ]
    ranked.sort()  # at equal chance a parent stands before its child, because its number is smaller
    seconds = cost.between(num_requests, num_requests + len(ranked), num_requests)
    plain_s = seconds[0]
    tokens = most = bought_tokens = 0.0
    best = 0
    for count, (negative, _, _) in enumerate(ranked, 1):
        tokens -= negative
        surplus = tokens - tokens_per_s * (seconds[count] - plain_s)
        if surplus > most:
            best, most, bought_tokens = count, surplus, tokens
    keep: list[list[int]] = [[] for _ in chances]
    for _, i, node in ranked[:best]:
        keep[i].append(node)
    for nodes in keep:
        nodes.sort()
    return Choice(keep, best, bought_tokens, seconds[best] - plain_s)
