"""Draft trees: paths, merging and cutting keep every root-to-node path intact."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.tree import EMPTY_TREE, DraftTree, likeliest
from paceline.errors import InvalidOptionError


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12) -> DraftTree:
    size = draw(st.integers(0, max_nodes))
    parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    members: list[tuple[str, ...]] = [(f"drafter {i}", "all") for i in range(size)]
    token_ids, confidence = [draw(st.integers(0, 4)) for _ in range(size)], [i / 16 for i in range(size)]
    return DraftTree(token_ids, parents, torch.eye(max_nodes)[:size], members, confidence)


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.token_ids[i] for i in tree.ancestors(node)) for node in range(len(tree))}


def says(tree: DraftTree, nodes: Sequence[int] | None = None) -> list[tuple[object, ...]]:
    """Of each of these nodes: its path, and everything else that the tree says of it."""
    assert tree.draft_probs is not None and tree.members is not None and tree.confidence is not None
    assert len(tree) == len(tree.draft_probs) == len(tree.members) == len(tree.confidence)
    return [
        (
            tuple(tree.token_ids[i] for i in tree.ancestors(node)),
            [tree.members[i] for i in tree.ancestors(node)],
            tree.draft_probs[node].tolist(),
            tree.confidence[node],
        )
        for node in (range(len(tree)) if nodes is None else nodes)
    ]


@given(st.lists(trees(), max_size=4))
def test_a_merged_tree_has_exactly_the_paths_of_its_parts(parts: list[DraftTree]) -> None:
    merged = DraftTree.merge(parts)
    merged.check(5)
    assert paths(merged) == set().union(*(paths(tree) for tree in parts))
    assert len(merged) == len(paths(merged)), "siblings with the same token are one node"


@given(trees(), st.integers(-1, 12), st.none() | st.integers(0, 12))
def test_a_cut_tree_keeps_its_limits_and_whole_paths(tree: DraftTree, max_nodes: int, max_depth: int | None) -> None:
    cut = tree.cut(max_nodes, max_depth)
    cut.check(5)
    shallow = [n for n, depth in enumerate(tree.depths()) if max_depth is None or depth <= max_depth]
    kept = shallow[: max(0, max_nodes)]
    assert says(cut) == says(tree, kept), "the first nodes that are not too deep, in their order, and no others"
    assert len(cut) == min(len(shallow), max(0, max_nodes)) and paths(cut) <= paths(tree)
    assert max(cut.depths(), default=0) <= (12 if max_depth is None else max_depth)
    assert (cut is tree) == (len(kept) == len(tree)), "what fits is not copied"


@given(trees(), st.integers(0, 12))
def test_cutting_by_one_limit_keeps_all_that_fits_it(tree: DraftTree, limit: int) -> None:
    first = tree.cut(limit)
    assert len(first) == min(limit, len(tree)) and first.token_ids == tree.token_ids[:limit]
    shallow = tree.cut(len(tree), limit)
    assert paths(shallow) == {path for path in paths(tree) if len(path) <= limit}


@given(trees(), st.data())
def test_nodes_that_are_kept_keep_everything_known_of_them(tree: DraftTree, data: st.DataObject) -> None:
    drawn = data.draw(st.sets(st.integers(0, max(0, len(tree) - 1)))) if len(tree) else set()
    nodes = sorted({ancestor for node in drawn for ancestor in tree.ancestors(node)})
    kept = tree.keep(nodes)
    kept.check(5)
    assert says(kept) == says(tree, nodes)


@given(trees(), st.data())
def test_the_likeliest_nodes_are_a_tree_within_the_limits(tree: DraftTree, data: st.DataObject) -> None:
    chances: list[float] = []
    for parent in tree.parents:  # halves are exact, so paths of equal chance do occur
        chances.append(data.draw(st.sampled_from((1.0, 0.5, 0.25))) * (1.0 if parent < 0 else chances[parent]))
    max_nodes, least = data.draw(st.integers(-1, 12)), data.draw(st.sampled_from((0.0, 0.1, 0.25, 0.5)))
    nodes = likeliest(chances, max_nodes, least)
    assert list(nodes) == sorted(set(nodes)) and len(nodes) <= max(0, max_nodes)
    assert all(tree.parents[node] == -1 or tree.parents[node] in nodes for node in nodes)
    out = [chance for node, chance in enumerate(chances) if node not in nodes and chance >= least]
    assert all(chances[node] >= max([least, *out]) for node in nodes), "nobody likelier is left out"
    assert len(nodes) == min(max(0, max_nodes), sum(chance >= least for chance in chances)), "room is used"
    assert says(tree.keep(nodes)) == says(tree, list(nodes))


@given(trees())
def test_depths_children_and_ancestors_agree(tree: DraftTree) -> None:
    children = tree.children()
    for node, depth in enumerate(tree.depths()):
        assert len(tree.ancestors(node)) == depth
        assert tree.token_ids[node] in children[tree.parents[node]]
    assert tree.is_chain == (tree.parents == DraftTree.chain(tree.token_ids).parents)


def test_sources_name_the_drafter_and_the_kind_of_the_last_token() -> None:
    tree = DraftTree([5, 6, 7], [-1, 0, 0], members=[("ngram",), ("ngram", "suffix"), ("suffix",)])
    assert tree.sources([]) == ["recovered"]
    assert tree.sources([0]) == ["ngram", "recovered"]
    assert tree.sources([0, 2]) == ["ngram", "suffix", "bonus"]
    assert tree.sources([0, 1]) == ["ngram", "ngram+suffix", "bonus"]
    assert EMPTY_TREE.sources([]) == ["target"]


@pytest.mark.parametrize("tree", [DraftTree([1], [0]), DraftTree([1, 2], [-1]), DraftTree([9], [-1])])
def test_what_is_not_a_tree_is_refused(tree: DraftTree) -> None:
    with pytest.raises(InvalidOptionError):
        tree.check(5)


@given(trees())
def test_the_likeliest_path_is_the_best_of_all_paths(tree: DraftTree) -> None:
    def worth(path: list[int]) -> float:
        assert tree.confidence is not None
        total, chance = 0.0, 1.0
        for node in path:
            chance *= tree.confidence[node]
            total += chance
        return total

    leaves = set(range(len(tree))) - set(tree.parents)
    chosen = tree.likeliest_path()
    assert chosen.is_chain
    best = max((worth(tree.ancestors(leaf)) for leaf in leaves), default=0.0)
    assert any(
        says(chosen) == says(tree.keep(tree.ancestors(leaf))) and worth(tree.ancestors(leaf)) == pytest.approx(best)
        for leaf in leaves
    ) or (not leaves and not chosen)


def test_without_confidence_the_likeliest_path_is_the_longest_and_then_the_first() -> None:
    tree = DraftTree([1, 2, 3, 4, 5], [-1, -1, 1, 0, 3])
    assert tree.likeliest_path().token_ids == [1, 4, 5]
    assert DraftTree([1, 2], [-1, -1]).likeliest_path().token_ids == [1]
    assert EMPTY_TREE.likeliest_path() == EMPTY_TREE
