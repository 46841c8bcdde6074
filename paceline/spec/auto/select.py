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

LEAST_CHANCE = 0.01  # below it a node is not even considered
BAR_ROWS = 4  # over which the cost of a further row is averaged: one alone may be the first of a tile


@dataclass(slots=True)
class Selection:
    keep: list[list[int]]  # per tree: nodes kept, ascending
    gain: float  # expected accepted tokens of the nodes kept
    num_nodes: int
    plain_s: float  # expected time of the pass without drafts
    pass_s: float  # and with the nodes kept
    speedup: float  # expected, over plain decoding, drafting not counted
    token_s: float  # what a token of the next pass costs, drafting counted; at most what it costs plainly
    loss_s: float  # where nothing pays: what the best non-empty choice, or the one asked for, loses; 0.0 otherwise
    bar: float  # a node is worth its row from this chance on

    @property
    def row_s(self) -> float:
        """What each of the nodes kept costs."""
        return (self.pass_s - self.plain_s) / max(1, self.num_nodes)


def path_chances(tree: DraftTree, trust: float = 1.0) -> list[float]:
    """The chance that each node is accepted with all its ancestors, times `trust`."""
    assert tree.confidence is not None
    chances: list[float] = []
    for parent, confidence in zip(tree.parents, tree.confidence, strict=True):
        chances.append(trust * confidence if parent < 0 else confidence * chances[parent])
    return chances


def select(
    chances: Sequence[Sequence[float]],  # per tree: path_chances
    num_requests: int,  # in the next pass, with or without a tree
    cost: PassCostModel,
    margin: float,  # the nodes must save this many times what they cost, else none are kept
    drafting_s: float = 0.0,  # what it took to draft them
    at_least: float | None = None,  # take all nodes from this chance on instead, even where they lose
) -> Selection:
    # (-chance, tree, node): at equal chance a parent stands before its child, because its number is smaller
    ranked = [
        (-chance, i, node)
        for i, tree in enumerate(chances)
        for node, chance in enumerate(tree)
        if chance > LEAST_CHANCE
    ]
    ranked.sort()
    seconds = cost.between(num_requests, num_requests + len(ranked), num_requests)
    plain_s = seconds[0]
    plain_rate = num_requests / plain_s
    tokens, best, best_rate, best_tokens = float(num_requests), 0, 0.0, float(num_requests)
    for count, (negative, _, _) in enumerate(ranked, 1):
        tokens -= negative
        rate = tokens / (drafting_s + seconds[count])
        if rate > best_rate:
            best, best_rate, best_tokens = count, rate, tokens
    if at_least is not None:
        likely = [-negative for negative, _, _ in ranked if -negative >= at_least]
        best, best_tokens = len(likely), num_requests + sum(likely)
    best_s = seconds[best]
    loss_s = 0.0
    saved_s, spent_s = (best_tokens - num_requests) / plain_rate, best_s - plain_s
    if best and saved_s < margin * spent_s:
        loss_s = max(0.0, spent_s - saved_s)
        if at_least is None:
            best, best_s = 0, plain_s
    keep: list[list[int]] = [[] for _ in chances]
    for _, i, node in ranked[:best]:
        keep[i].append(node)
    for nodes in keep:
        nodes.sort()
    gain, speedup, token_s = 0.0, 1.0, 1.0 / plain_rate
    if best:
        gain = best_tokens - num_requests
        speedup, token_s = best_tokens / best_s / plain_rate, min(token_s, (drafting_s + best_s) / best_tokens)
    pays = best > 0 and loss_s == 0.0
    base, before_s = (best, best_s) if pays else (0, plain_s)
    rows_s = cost.at(num_requests + base + BAR_ROWS, num_requests) - before_s
    bar = max(LEAST_CHANCE, (1.0 if pays else margin) * rows_s / BAR_ROWS / token_s)
    if pays:
        bar = min(bar, -ranked[best - 1][0])  # where further rows are expensive, nodes like those kept still pay
    return Selection(keep, gain, best, plain_s, best_s, speedup, token_s, loss_s, bar)


def whole(priced: Selection, chances: Sequence[Sequence[float]], num_requests: int, cost: PassCostModel) -> Selection:
    """All nodes, of trees that mean nothing in part; the bar stays."""
    num_nodes, gain = sum([len(tree) for tree in chances]), sum([sum(tree) for tree in chances])
    pass_s = cost.at(num_requests + num_nodes, num_requests)
    speedup = (1.0 + gain / num_requests) * priced.plain_s / pass_s
    keep = [list(range(len(tree))) for tree in chances]
    return replace(priced, keep=keep, gain=gain, num_nodes=num_nodes, pass_s=pass_s, speedup=speedup)


def above_bar(chances: Sequence[Sequence[float]], bar: float) -> list[list[int]]:
    """`keep` of a selection without computing a new one: the nodes whose chance reaches the bar of the last one."""
    return [[node for node, chance in enumerate(tree) if chance >= bar] for tree in chances]
