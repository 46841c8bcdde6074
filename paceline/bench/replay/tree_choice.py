"""The tree for a drafting method, chosen from a recording instead of by hand (Sequoia's idea, on our replay).

1. Replay the method with more room than it will get, and count how often its 1st, 2nd, ... child of a right node at
   each depth was right.
2. From these chances the dynamic programme (spec/config/tree_shape.py) gives, for a number of nodes, the shape with
   the most expected tokens; the pass cost curve says which number pays.
3. Replay every candidate as the configuration that a user would set. The model proposes, the replay decides.

Chances come from one half of the requests and the candidates are judged on the other, so that none is chosen for
what it has seen.

The model takes all steps to be alike, and on real text it expects too few tokens. A likely reason: a smaller tree's
steps begin more often inside easy text, where the large tree of the measurement would have gone on.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.replay.recording import Recorded
from paceline.bench.replay.replay import Replay, ReplayResult
from paceline.core.tree import DraftTree
from paceline.errors import InvalidOptionError
from paceline.lab.pass_cost import FREE, PassCost
from paceline.spec.config.method import MAX_DRAFT_DEPTH, MAX_DRAFT_NODES
from paceline.spec.config.tree_shape import TreeShape, fastest_shape, optimal_shape
from paceline.spec.merge.merge import MergeProposer
from paceline.spec.methods import PROPOSERS

TUNABLE = ("ngram", "suffix", "recycling", "merge")  # they draft without a model and have a size to choose
PRIOR_TRIALS = 16.0  # that the average over depths counts for, where few drafts reached a depth
WORTH_IT = 0.01  # a larger tree, or a start from the recording, must be faster by this much
MIN_PROBE_NODES, MIN_DEPTH = 64, 8


@dataclass(slots=True)
class RankCounts:
    """How often the child of each rank was right, by the depth of its parent; the root has depth 0."""

    max_depth: int
    num_steps: int = 0
    num_drafts: int = 0
    reached: Counter[int] = field(default_factory=Counter)  # depth -> right nodes there, of which children were due
    hits: Counter[tuple[int, int]] = field(default_factory=Counter)  # (depth, rank)

    def count(self, tree: DraftTree, future: Sequence[int]) -> None:
        self.num_steps += 1
        if not tree:
            return
        self.num_drafts += 1
        children, at = tree.children(), -1
        for depth, token in enumerate(future[: self.max_depth]):
            self.reached[depth] += 1
            if token not in children[at]:
                return
            self.hits[depth, list(children[at]).index(token)] += 1
            at = children[at][token]

    @property
    def draft_share(self) -> float:
        """Of the steps, those that had a draft at all."""
        return self.num_drafts / self.num_steps if self.num_steps else 0.0

    def chances(self) -> list[list[float]]:
        """[depth][rank], for `optimal_shape`. A step without a draft counts as a miss of the first level."""
        ranks = range(1 + max((rank for _, rank in self.hits), default=0))
        rows = [[self.hits[0, rank] / max(1, self.num_steps) for rank in ranks]]
        deeper = [depth for depth in sorted(self.reached) if depth > 0]
        trials = sum(self.reached[depth] for depth in deeper)
        average = [sum(self.hits[depth, rank] for depth in deeper) / max(1, trials) for rank in ranks]
        for depth in deeper:
            weight = self.reached[depth] + PRIOR_TRIALS
            rows.append([(self.hits[depth, rank] + PRIOR_TRIALS * average[rank]) / weight for rank in ranks])
        return rows


@dataclass(frozen=True, slots=True)
class TreeChoice:
    """A tree of one size: what the model expects of it, and what the replay found."""

    shape: TreeShape
    expected_speedup: float  # by the curve; drafting itself is not counted
    config: dict[str, Any]
    replayed: ReplayResult  # drafting counted

    @property
    def nodes_by_depth(self) -> list[int]:
        depths = Counter(DraftTree([0] * len(self.shape), self.shape.parents).depths())
        return [depths[depth] for depth in sorted(depths)]


@dataclass(frozen=True, slots=True)
class TunedTree:
    counts: RankCounts
    choices: list[TreeChoice]  # by size
    best: TreeChoice | None  # None: plain decoding is faster
    without_start: ReplayResult | None  # the best one's size, without what the recording gave it to start with
    num_learned: int  # requests that the chances come from
    num_judged: int  # others that the replay judged on; 0: there were no others


def choose_tree(
    recorded: Sequence[Recorded],
    config: Mapping[str, Any],  # the method, and options of its own
    sizes: Sequence[int],  # nodes to choose from; with a curve the model adds a size of its own
    *,
    max_depth: int | None = None,
    pass_cost: PassCost = FREE,
) -> TunedTree:
    method = _check(recorded, config, sizes)
    depth = max_depth or max(MIN_DEPTH, PROPOSERS[method].default("num_speculative_tokens"))
    if not 1 <= depth <= MAX_DRAFT_DEPTH:
        raise InvalidOptionError(f"the depth of a tree is 1 to {MAX_DRAFT_DEPTH}, got {depth}")
    learned, judged = halves([one for one in recorded if one.output_token_ids])
    counts, start = _measure(learned, config, max(sizes), depth)
    seconds = _pass_seconds(counts.draft_share, pass_cost)
    chances = counts.chances()
    wanted = set(sizes)
    if pass_cost is not FREE:
        wanted.add(len(fastest_shape(chances, max(sizes), depth, seconds, lambda deep: 0.0)))
    shapes = {len(shape): shape for shape in (optimal_shape(chances, size, depth) for size in sorted(wanted))}
    choices = []
    for size, shape in sorted(shapes.items()):
        if size > 0:
            speedup = shape.expected_tokens * seconds(0) / seconds(size)
            sized = dict(config) | {"num_speculative_tokens": _depth(shape), "node_budget": size} | start
            choices.append(TreeChoice(shape, speedup, sized, _replay(judged, sized, pass_cost)))
    best, without = _best(choices, start, judged, pass_cost)
    return TunedTree(counts, choices, best, without, len(learned), 0 if judged is learned else len(judged))


def halves(recorded: Sequence[Recorded]) -> tuple[list[Recorded], list[Recorded]]:
    """Every other request of each category; the same list twice where no category has two."""
    parts: tuple[list[Recorded], list[Recorded]] = ([], [])
    seen: Counter[str] = Counter()
    for one in recorded:
        parts[seen[one.category] % 2].append(one)
        seen[one.category] += 1
    return parts[0], parts[1] or parts[0]


def _check(recorded: Sequence[Recorded], config: Mapping[str, Any], sizes: Sequence[int]) -> str:
    method = config.get("method")
    if method not in TUNABLE:
        raise InvalidOptionError(
            f"a recording can size the trees of {', '.join(TUNABLE)}, not of {method!r}: a replay runs without "
            "a model; compare sizes of other methods live, with `paceline bench sweep`"
        )
    if not sizes or not all(1 <= size <= MAX_DRAFT_NODES for size in sizes):
        raise InvalidOptionError(f"a tree has 1 to {MAX_DRAFT_NODES} nodes, got {list(sizes)}")
    if not any(one.output_token_ids for one in recorded):
        raise InvalidOptionError("the recording holds no answers: make one with `paceline bench record --out FILE`")
    return str(method)


def _measure(
    recorded: Sequence[Recorded], config: Mapping[str, Any], largest: int, max_depth: int
) -> tuple[RankCounts, dict[str, Any]]:
    """The counts, and options with which a new engine starts from them."""
    room = min(MAX_DRAFT_NODES, max(2 * largest, MIN_PROBE_NODES))
    counts = RankCounts(max_depth)
    sized = dict(config) | {"num_speculative_tokens": max_depth, "node_budget": room}
    replay = Replay(recorded, sized, on_draft=counts.count)
    replay.run()
    proposer = replay.speculator.proposers[config["method"]]
    if isinstance(proposer, MergeProposer):
        return counts, {"credit": [list(row) for row in proposer.credit.rows()]}
    if config["method"] == "recycling":
        return counts, {"recycling_acceptance": [[round(one, 3) for one in row] for row in counts.chances()]}
    return counts, {}


def _pass_seconds(draft_share: float, pass_cost: PassCost) -> Callable[[int], float]:
    """Of a step with so many nodes, averaged over the steps that have a draft and those that have none."""
    return lambda nodes: (1.0 - draft_share) * pass_cost(1) + draft_share * pass_cost(1 + nodes)


def _replay(recorded: Sequence[Recorded], config: Mapping[str, Any], pass_cost: PassCost) -> ReplayResult:
    return Replay(recorded, config, pass_cost=pass_cost).run()


def _depth(shape: TreeShape) -> int:
    return max(DraftTree([0] * len(shape), shape.parents).depths())


def _best(
    choices: Sequence[TreeChoice], start: Mapping[str, Any], judged: Sequence[Recorded], pass_cost: PassCost
) -> tuple[TreeChoice | None, ReplayResult | None]:
    """The smallest tree that is as fast as any; started from the recording only where that is faster."""
    fastest = max((choice.replayed.speedup for choice in choices), default=0.0)
    if fastest <= 1.0:
        return None, None
    best = next(choice for choice in choices if choice.replayed.speedup >= fastest * (1.0 - WORTH_IT))
    if not start:
        return best, None
    config = {key: value for key, value in best.config.items() if key not in start}
    without = _replay(judged, config, pass_cost)
    if without.speedup * (1.0 + WORTH_IT) >= best.replayed.speedup:
        return TreeChoice(best.shape, best.expected_speedup, config, without), without
    return best, without
