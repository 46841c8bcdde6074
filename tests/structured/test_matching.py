"""A request's place in its grammar is a function of its output: masks, pruning and forced tokens follow from that."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.constraint import Constraint
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.errors import RequestFailedError
from tests.structured.small_vocabulary import AB, END, REGEXES, VOCAB, A, B, constrained, constrained_by

TEXT = {A: "a", B: "b", AB: "ab", END: ""}


def constraint_of(request: Request) -> Constraint:
    assert request.constraint is not None
    return request.constraint


def allowed_ids(request: Request, path: Sequence[int] = ()) -> set[int]:
    return set(np.flatnonzero(constraint_of(request).allowed(path)).tolist())


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    size = draw(st.integers(0, 8))
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
    return DraftTree(tokens, [draw(st.integers(-1, i - 1)) for i in range(size)])


def path_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(tree.token_ids[i] for i in tree.ancestors(node))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(REGEXES), trees())
def test_masks_along_a_tree_are_those_of_each_path_alone(regex: str, tree: DraftTree) -> None:
    request = constrained(regex)
    constraint_of(request).prepare(tree)
    for node in range(-1, len(tree)):
        path = path_of(tree, node)
        alone = constrained(regex)
        assert allowed_ids(request, path) == allowed_ids(alone, path)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(REGEXES), trees())
def test_pruning_keeps_exactly_the_nodes_that_the_masks_allow(regex: str, tree: DraftTree) -> None:
    request = constrained(regex)
    possible = []
    for node in range(len(tree)):
        path = path_of(tree, node)
        steps = (path[i] in allowed_ids(constrained(regex), path[:i]) for i in range(len(path)))
        possible.append(all(steps))
    kept = constraint_of(request).prune(tree)
    assert sorted(path_of(kept, node) for node in range(len(kept))) == sorted(
        path_of(tree, node) for node in range(len(tree)) if possible[node]
    )


PATHS = st.lists(st.integers(0, VOCAB - 1), max_size=4)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(REGEXES), st.lists(st.tuples(PATHS, st.integers(0, VOCAB - 1)), max_size=12), PATHS)
def test_a_wanted_token_comes_exactly_where_the_mask_allows_it(
    regex: str, asked: list[tuple[list[int], int]], choices: list[int]
) -> None:
    """Whatever was asked before, and while the output grows."""
    request = constrained(regex)
    output: list[int] = []
    for choice in [*choices, 0]:
        for path, token in asked:
            allowed = allowed_ids(constrained(regex, output), path)
            settled = constraint_of(request).settled(path, token)
            assert (settled == token) == (token in allowed)
            assert settled in (None, token) or allowed == {settled}
        may_come = sorted(allowed_ids(constrained(regex, output)))
        output.append(may_come[choice % len(may_come)])
        request.token_ids.append(output[-1])


@pytest.mark.parametrize("regex", REGEXES)
def test_asking_about_single_tokens_leaves_masks_pruning_and_forced_tokens_as_they_are(regex: str) -> None:
    tree = DraftTree([A, B, AB, AB, B, A], [-1, 0, 1, 0, 3, 4])
    request, alone = constrained(regex), constrained(regex)
    for token in range(VOCAB):
        constraint_of(request).settled((), token)
        constraint_of(request).settled((A,), token)
        assert allowed_ids(request) == allowed_ids(alone)
        assert constraint_of(request).forced(8) == constraint_of(alone).forced(8)
        assert constraint_of(request).prune(tree) == constraint_of(alone).prune(tree)


def test_after_an_output_outside_the_grammar_nothing_is_settled() -> None:
    request = constrained("ab", [B])
    assert all(constraint_of(request).settled((), token) is None for token in range(VOCAB))


@pytest.mark.parametrize(("regex", "output", "only"), [("ab", [], AB), ("ab", [AB], END), ("ab", [AB, END], END)])
def test_the_only_token_that_may_come_comes_whatever_is_wanted(regex: str, output: list[int], only: int) -> None:
    for token in range(VOCAB):
        assert constraint_of(constrained(regex, output)).settled((), token) == only


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(REGEXES), trees(), st.lists(st.integers(0, VOCAB - 1), max_size=4))
def test_what_was_looked_at_before_does_not_matter(regex: str, tree: DraftTree, choices: list[int]) -> None:
    """Trees are looked at and thrown away; only the output counts."""
    request = constrained(regex)
    output: list[int] = []
    for choice in choices:
        constraint_of(request).prune(tree)
        constraint_of(request).prepare(tree)
        constraint_of(request).forced(8)
        may_come = sorted(allowed_ids(request))
        assert may_come == sorted(allowed_ids(constrained(regex, output)))
        output.append(may_come[choice % len(may_come)])
        request.token_ids.append(output[-1])


@pytest.mark.parametrize("regex", REGEXES)
def test_certain_tokens_are_the_only_ones_that_the_mask_allows(regex: str) -> None:
    waiting: list[list[int]] = [[]]
    while waiting:
        output = waiting.pop()
        request = constrained(regex, output)
        forced = constraint_of(request).forced(6)
        for i in range(forced.num_certain):
            assert allowed_ids(request, forced.token_ids[:i]) == {forced.token_ids[i]}
        for i in range(forced.num_certain, len(forced.token_ids)):
            assert forced.token_ids[i] in allowed_ids(request, forced.token_ids[:i])
        if len(output) < 3 and END not in output:
            waiting += [[*output, token] for token in allowed_ids(request)]


def test_forced_tokens_are_spelled_as_the_tokenizer_would() -> None:
    forced = constraint_of(constrained("ababb")).forced(8)
    assert forced.token_ids == [AB, AB, B, END] and forced.num_certain == 4
    assert constraint_of(constrained("ababb")).forced(2).token_ids == [AB, AB]


def test_after_the_end_only_end_tokens_follow() -> None:
    request = constrained("ab", [AB, END])
    assert allowed_ids(request) == {END} and allowed_ids(request, [END, END]) == {END}
    assert constraint_of(request).forced(4).token_ids == []


def test_an_end_token_may_come_where_the_text_is_complete_and_nowhere_else() -> None:
    assert END in allowed_ids(constrained("a(b|a)*", [A])) and END not in allowed_ids(constrained("a(b|a)*"))
    kept = constraint_of(constrained("ab?")).prune(DraftTree([END, A, END, A], [-1, -1, 1, 2]))
    assert kept.token_ids == [A, END]


def test_tokens_taken_back_are_forgotten() -> None:
    request = constrained("ab|ba", [A])
    assert allowed_ids(request) == {B}
    request.token_ids[-1:] = []
    assert allowed_ids(request) == {B, A, AB}


def test_a_closed_constraint_is_built_anew_when_it_is_asked() -> None:
    request = constrained("ab|ba", [A])
    before = allowed_ids(request)
    constraint_of(request).close()
    assert allowed_ids(request) == before


def test_an_output_outside_the_grammar_ends_the_request_with_the_reason() -> None:
    request = constrained("ab", [B])
    assert len(constraint_of(request).prune(DraftTree.chain([A]))) == 0  # no draft, no exception
    with pytest.raises(RequestFailedError, match="does not allow token"):
        constraint_of(request).allowed(())


@pytest.mark.parametrize("grammar", ["start: <[0]> <[1]> <[2]>", 'start: "a" <[2]> ("b" <[0]>)* | "a" "b"'])
def test_tokens_named_in_a_grammar_are_walked_like_any_others(grammar: str) -> None:
    """llguidance cannot take back a named token that it had forced."""
    request, alone = constrained_by(grammar), constrained_by(grammar)
    tree = DraftTree([A, B, AB, AB, B, A], [-1, 0, 1, 0, 3, 4])
    before = allowed_ids(alone)
    constraint_of(request).prepare(tree)
    constraint_of(request).forced(8)
    kept = constraint_of(request).prune(tree)
    for node in range(-1, len(kept)):
        path = path_of(kept, node)
        assert allowed_ids(request, path) == allowed_ids(constrained_by(grammar), path)
    assert len(kept) > 1 and before == allowed_ids(request)
    for token in range(VOCAB):
        settled = constraint_of(request).settled((A,), token)
        assert (settled == token) == (token in allowed_ids(constrained_by(grammar), (A,)))
    request.token_ids.append(A)
    assert allowed_ids(request) == allowed_ids(constrained_by(grammar, [A]))
