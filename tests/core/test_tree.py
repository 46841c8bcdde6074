"""Draft trees: paths, merging and cutting keep every root-to-node path intact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.errors import InvalidOptionError


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12) -> DraftTree:
    size = draw(st.integers(0, max_nodes))
    parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    return DraftTree([draw(st.integers(0, 4)) for _ in range(size)], parents)


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.token_ids[i] for i in tree.ancestors(node)) for node in range(len(tree))}


@given(st.lists(trees(), max_size=4))
def test_a_merged_tree_has_exactly_the_paths_of_its_parts(parts: list[DraftTree]) -> None:
    merged = DraftTree.merge(parts)
    merged.check(5)
    assert paths(merged) == set().union(*(paths(tree) for tree in parts))
    assert len(merged) == len(paths(merged)), "siblings with the same token are one node"


@given(trees(), st.integers(0, 12))
def test_cutting_keeps_whole_paths(tree: DraftTree, limit: int) -> None:
    first = tree.first(limit)
    first.check(5)
    assert len(first) == min(limit, len(tree)) and paths(first) <= paths(tree)
    shallow = tree.up_to_depth(limit)
    shallow.check(5)
    assert paths(shallow) == {path for path in paths(tree) if len(path) <= limit}


@given(trees())
def test_depths_children_and_ancestors_agree(tree: DraftTree) -> None:
    children = tree.children()
    for node, depth in enumerate(tree.depths()):
        assert len(tree.ancestors(node)) == depth
        assert tree.token_ids[node] in children[tree.parents[node]]
    assert tree.is_chain == (tree.parents == DraftTree.chain(tree.token_ids).parents)


def test_sources_name_the_drafter_and_the_kind_of_the_last_token() -> None:
    tree = DraftTree([5, 6, 7], [-1, 0, 0], members=["ngram", "ngram", "suffix"])
    assert tree.sources([]) == ["recovered"]
    assert tree.sources([0]) == ["ngram", "recovered"]
    assert tree.sources([0, 2]) == ["ngram", "suffix", "bonus"]
    assert EMPTY_TREE.sources([]) == ["target"]


@pytest.mark.parametrize("tree", [DraftTree([1], [0]), DraftTree([1, 2], [-1]), DraftTree([9], [-1])])
def test_what_is_not_a_tree_is_refused(tree: DraftTree) -> None:
    with pytest.raises(InvalidOptionError):
        tree.check(5)
