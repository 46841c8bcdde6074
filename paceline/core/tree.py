"""Draft trees: what a drafter proposes and a verifier walks.

A chain is a tree of width 1 and plain decoding is the empty tree. Nodes are numbered so that a parent comes before its
children; the parent -1 is the last committed token.

>>> tree = DraftTree.merge([DraftTree.chain([5, 6]), DraftTree.chain([5, 7])])
>>> tree.token_ids, tree.parents
([5, 6, 7], [-1, 0, 0])
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.errors import InvalidOptionError


@dataclass(frozen=True, slots=True)
class DraftTree:
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # parents[i] < i; -1 hangs on the last committed token
    draft_probs: Tensor | None = None  # [nodes, vocab]: the distribution each token was really drawn from
    members: list[tuple[str, ...]] | None = None  # drafters of each node: several, where their drafts were joined
    confidence: list[float] | None = None  # the drafter's estimate, 0..1, that a node is accepted if its parent is

    @staticmethod
    def chain(token_ids: Sequence[int]) -> "DraftTree":
        return DraftTree(list(token_ids), list(range(-1, len(token_ids) - 1)))

    @staticmethod
    def merge(trees: Iterable["DraftTree"]) -> "DraftTree":
        """One trie of all trees: siblings with the same token become one node (token identity only, no q)."""
        token_ids: list[int] = []
        parents: list[int] = []
        node_of: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for tree in trees:
            to_merged = {-1: -1}
            for i, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
                key = (to_merged[parent], token)
                if key not in node_of:
                    node_of[key] = len(token_ids)
                    token_ids.append(token)
                    parents.append(key[0])
                to_merged[i] = node_of[key]
        return DraftTree(token_ids, parents)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    def depths(self) -> list[int]:
        """Depth of every node; a top node has depth 1, so it would sit one position after the last token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def ancestors(self, node: int) -> list[int]:
        """The path from the top node down to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def children(self) -> list[dict[int, int]]:
        """For each node, and at [-1] for the root: token -> child node (the first, where siblings repeat)."""
        children: list[dict[int, int]] = [{} for _ in range(len(self) + 1)]
        for node, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            children[parent].setdefault(token, node)
        return children

    def by(self, member: str) -> "DraftTree":
        """The same, said to be drafted by one member."""
        return DraftTree(self.token_ids, self.parents, self.draft_probs, [(member,)] * len(self), self.confidence)

    def cut(self, max_nodes: int, max_depth: int | None = None) -> "DraftTree":
        """What fits the limits: the first `max_nodes` of the nodes that are no deeper than `max_depth`.

        Always a tree, because parents come before children and are less deep."""
        nodes: Sequence[int] = range(len(self))
        if max_depth is not None and len(self) > max_depth:  # a tree is no deeper than it has nodes
            nodes = [node for node, depth in enumerate(self.depths()) if depth <= max_depth]
        return self.keep(nodes[: max(0, max_nodes)])  # no room at all is room for none

    def keep(self, nodes: Sequence[int]) -> "DraftTree":
        """The tree of these nodes (ascending, closed under parents), with everything that is known of each."""
        if len(nodes) == len(self):
            return self
        if not nodes or nodes[-1] == len(nodes) - 1:  # the first ones: nothing is renumbered
            return self._first(len(nodes))
        new_index = {-1: -1} | {old: new for new, old in enumerate(nodes)}
        return DraftTree(
            [self.token_ids[i] for i in nodes],
            [new_index[self.parents[i]] for i in nodes],
            None if self.draft_probs is None else self.draft_probs[list(nodes)],
            None if self.members is None else [self.members[i] for i in nodes],
            None if self.confidence is None else [self.confidence[i] for i in nodes],
        )

    def _first(self, num_nodes: int) -> "DraftTree":
        return DraftTree(
            self.token_ids[:num_nodes],
            self.parents[:num_nodes],
            None if self.draft_probs is None else self.draft_probs[:num_nodes],
            None if self.members is None else self.members[:num_nodes],
            None if self.confidence is None else self.confidence[:num_nodes],
        )

    def likeliest_path(self) -> "DraftTree":
        """The chain, from the root to a leaf, that is expected to have most tokens accepted; equal ones: the first."""
        expected = [0.0] * (len(self) + 1)  # accepted tokens below each node, if it is accepted; at [-1] of the root
        best_child = [-1] * (len(self) + 1)
        for node in reversed(range(len(self))):
            chance = 1.0 if self.confidence is None else self.confidence[node]
            worth, parent = chance * (1.0 + expected[node]), self.parents[node]
            if worth >= expected[parent]:
                expected[parent], best_child[parent] = worth, node
        path, node = [], best_child[-1]
        while node >= 0:
            path.append(node)
            node = best_child[node]
        return self.keep(path)

    def sources(self, accepted: Sequence[int]) -> list[str]:
        """Where each token of a verified pass came from: the accepted nodes' drafters, then the last token's kind."""
        if not self.token_ids:
            return ["target"]
        drafters = ["draft" if self.members is None else "+".join(self.members[node]) for node in accepted]
        last = accepted[-1] if accepted else -1
        return [*drafters, "recovered" if last in self.parents else "bonus"]

    def check(self, vocab_size: int) -> None:
        """Raise unless this is a tree over the vocabulary."""
        if len(self.token_ids) != len(self.parents):
            raise InvalidOptionError(f"tree has {len(self.token_ids)} tokens but {len(self.parents)} parents")
        for i, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if not -1 <= parent < i:
                raise InvalidOptionError(f"node {i} has parent {parent}; a parent is -1 or an earlier node")
            if not 0 <= token < vocab_size:
                raise InvalidOptionError(f"node {i} has token {token}, outside the vocabulary of {vocab_size}")


EMPTY_TREE = DraftTree()


def likeliest(chances: Sequence[float], max_nodes: int, least: float) -> Sequence[int]:
    """Nodes to keep, ascending: those whose paths have the largest `chances`, at most so many, and none below `least`.

    `chances` (or their logarithms) are those of whole paths. A path is never likelier than its beginning, and at equal
    chances the earlier node is taken first, so a node's parent is always among them."""
    if len(chances) > max_nodes:
        ranked = sorted(range(len(chances)), key=lambda node: -chances[node])[: max(0, max_nodes)]
        return sorted(node for node in ranked if chances[node] >= least)
    if not chances or min(chances) >= least:
        return range(len(chances))
    return [node for node, chance in enumerate(chances) if chance >= least]
