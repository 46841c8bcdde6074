"""A draft tree under construction: siblings with the same token are one node."""

from collections.abc import Sequence

from paceline.core.tree import EMPTY_TREE, DraftTree


class Trie:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.confidence: list[float] = []
        self._node_of: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def __len__(self) -> int:
        return len(self.token_ids)

    def child(self, parent: int, token: int) -> int | None:
        return self._node_of.get((parent, token))

    def add(self, parent: int, token: int, confidence: float) -> int:
        """The child of `parent` with this token: a new node, or the one that is there already."""
        key = (parent, token)
        node = self._node_of.get(key)
        if node is None:
            node = self._node_of[key] = len(self.token_ids)
            self.token_ids.append(token)
            self.parents.append(parent)
            self.confidence.append(confidence)
        return node

    def add_path(self, path: Sequence[int], confidence: float, max_nodes: int) -> None:
        """A path from the root, cut where the trie would outgrow `max_nodes`."""
        node = -1
        for token in path:
            known = self.child(node, token)
            if known is None and len(self) >= max_nodes:
                return
            node = self.add(node, token, confidence) if known is None else known

    def tree(self) -> DraftTree:
        if not self.token_ids:
            return EMPTY_TREE
        return DraftTree(self.token_ids, self.parents, confidence=self.confidence)
