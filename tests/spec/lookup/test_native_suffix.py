"""Suffix drafts made natively against those made in Python: the same to the bit, whatever the text."""

import gc
import random
import weakref
from importlib import import_module
from types import SimpleNamespace

import pytest

from paceline.core.tree import DraftTree
from paceline.ops.native import suffix
from paceline.ops.native.suffix import NativeText, suffix_available
from paceline.spec.lookup.hit_rates import Reliability, walk
from paceline.spec.lookup.native_suffix_trees import NativeSuffixTrees
from paceline.spec.lookup.past_outputs import SEPARATOR
from paceline.spec.lookup.suffix import SuffixProposer
from paceline.spec.lookup.suffix_trees import Drafted, PlainSuffixTrees, SuffixOptions, SuffixTrees
from paceline.spec.proposer import Budget
from tests.spec.replaying import SERVICES, replay, speculator

needs_native = pytest.mark.skipif(not suffix_available(), reason="the native kernels are not built")


def some_options(rng: random.Random) -> SuffixOptions:
    return SuffixOptions(
        max_match=rng.choice([1, 2, 3, 5, 16, 24, 64, 128]),
        factor=rng.choice([0.0, 0.7, 1.0, 1.5, 4.0, 64.0]),
        min_prob=rng.choice([0.0, 1e-6, 0.03, 0.3, 0.9, 1.0]),
        max_cached_tokens=rng.choice([0, 40, 150, 1000]),
        max_cached_outputs=rng.choice([0, 1, 5, 1000]),
    )


def some_tokens(rng: random.Random, text: list[int], vocab: int) -> list[int]:
    """What a text goes on with: something new, something that it said before, or its end once more."""
    kind, count = rng.randrange(4), rng.randint(1, 6)
    if kind == 0 or not text:
        return [rng.randrange(vocab) for _ in range(count)]
    if kind == 1:
        start = rng.randrange(len(text))
        return text[start : start + 4 * count]
    if kind == 2:
        return text[-count:] * rng.randint(1, 3)
    return [text[-1]] * count


class Twins:
    """Both implementations, which are told the same and must say the same."""

    def __init__(self, options: SuffixOptions) -> None:
        self.rates = [Reliability(options.max_match) for _ in range(2)]
        self.trees: list[SuffixTrees] = [
            PlainSuffixTrees(options, self.rates[0]),
            NativeSuffixTrees(options, self.rates[1]),
        ]
        self.num_nodes = 0

    def draft(self, request_id: str, text: list[int], budget: Budget) -> Drafted | None:
        plain, native = (trees.draft(request_id, text, budget) for trees in self.trees)
        assert native == plain  # tokens, parents, confidence and lengths
        if plain is not None:
            self.num_nodes += len(plain[0])
        return plain

    def learn(self, drafted: Drafted | None, new_token_ids: list[int]) -> None:
        if drafted is not None:
            tree, lengths = drafted
            for child, hit in walk(tree, new_token_ids):
                for rates in self.rates:
                    rates.record(lengths[child], hit)

    def finish(self, request_id: str, output: list[int]) -> None:
        for trees in self.trees:
            trees.forget(request_id)
            trees.add_output(output)


def follow(rng: random.Random, tree: DraftTree) -> list[int]:
    """The tokens of a path."""
    return [tree.token_ids[node] for node in tree.ancestors(rng.randrange(len(tree)))] if tree else []


@needs_native
@pytest.mark.parametrize("seed", range(8))
def test_the_trees_are_the_same_to_the_bit(seed: int) -> None:
    rng = random.Random(seed)
    num_nodes = 0
    for _ in range(60):
        twins, vocab = Twins(some_options(rng)), rng.choice([1, 2, 3, 8, 50])
        texts: dict[str, list[int]] = {}
        for step in range(60):
            request_id = str(rng.randrange(3))
            text = texts.setdefault(request_id, [])
            text += some_tokens(rng, text, vocab)
            drafted = twins.draft(request_id, text, Budget(rng.randint(1, 64), rng.randint(1, 24)))
            if drafted is not None:
                known = {token for each in texts.values() for token in each} | set(range(vocab))
                assert set(drafted[0].token_ids) <= known, "only what stood in a text is drafted, no separator"
                new = [*(follow(rng, drafted[0]) if rng.random() < 0.7 else []), rng.randrange(vocab)]
                twins.learn(drafted, new)
                text += new
            if rng.random() < 0.1:
                twins.finish(request_id, texts.pop(request_id)[-rng.randint(1, 100) :])
            if len(text) > 400 or step % 25 == 0:
                texts.pop(request_id, None)
                twins.finish(request_id, [])
        num_nodes += twins.num_nodes
    assert num_nodes > 10_000, "most texts give drafts"


@needs_native
def test_a_long_text_with_many_words_is_found_in_too() -> None:
    rng = random.Random(1)
    twins = Twins(SuffixOptions(24, 4.0, 0.03, 1 << 14, 1000))
    phrases = [[rng.randrange(50_000) for _ in range(rng.randint(2, 40))] for _ in range(60)]
    for request in range(12):
        text: list[int] = []
        while len(text) < 3_000:
            text += rng.choice(phrases)
            if rng.random() < 0.2:
                drafted = twins.draft(str(request), text, Budget(16, 16))
                twins.learn(drafted, rng.choice(phrases))
        twins.finish(str(request), text)
    assert twins.num_nodes > 1_000


@needs_native
def test_texts_too_short_for_any_match() -> None:
    twins = Twins(SuffixOptions(24, 4.0, 0.0, 1000, 10))
    assert twins.draft("a", [], Budget(4, 4)) is None
    assert twins.draft("a", [7], Budget(4, 4)) is None
    drafted = twins.draft("a", [7, 7], Budget(4, 4))
    assert drafted is not None and drafted[0].token_ids == [7, 7, 7, 7]


@needs_native
def test_a_separator_ends_a_continuation_and_is_no_place() -> None:
    twins = Twins(SuffixOptions(24, 64.0, 0.0, 1000, 10))
    for output in ([1, 2, 3], [3, 4], [5, 1, 2]):
        twins.finish("gone", output)
    drafted = twins.draft("a", [9, 1, 2], Budget(8, 8))
    assert drafted is not None and drafted[0].token_ids == [3]
    assert twins.draft("b", [9, 4], Budget(8, 8)) is None
    separated = twins.draft("c", [1, 2, SEPARATOR, 6, 1, 2, 8, SEPARATOR, 1, 2], Budget(8, 8))
    assert separated is not None and SEPARATOR not in separated[0].token_ids


@needs_native
def test_more_nodes_than_there_was_room_for() -> None:
    twins = Twins(SuffixOptions(24, 64.0, 0.0, 1000, 10))
    drafted = twins.draft("a", [1, 2, 3] * 20, Budget(1000, 500))
    assert drafted is not None and len(drafted[0]) > 64


@needs_native
def test_a_request_that_ended_leaves_no_text_behind() -> None:
    trees = NativeSuffixTrees(SuffixOptions(8, 4.0, 0.0, 1000, 10), Reliability(8))
    trees.draft("a", [1, 2, 1], Budget(4, 4))
    text = weakref.ref(trees._texts["a"])
    assert text() is not None
    trees.forget("a")
    gc.collect()
    assert text() is None


def proposer() -> SuffixProposer:
    return SuffixProposer(
        SERVICES,
        Budget(16, 16),
        suffix_decoding_max_tree_depth=24,
        suffix_decoding_max_cached_requests=100,
        suffix_decoding_max_cached_tokens=1000,
        suffix_decoding_max_spec_factor=4.0,
        suffix_decoding_min_token_prob=0.03,
    )


def steps_of_two_requests() -> list[int]:
    rng = random.Random(3)
    spec, words = speculator({"method": "suffix"}), [[rng.randrange(9) for _ in range(12)] for _ in range(4)]
    output = [token for _ in range(40) for token in rng.choice(words)]
    return [emitted for name in "ab" for emitted in replay(spec, words[0], output, name)]


@pytest.mark.parametrize(
    "found", [(None, "not built"), (SimpleNamespace(pl_forward=None), None)], ids=["no library", "one built before"]
)
def test_without_the_native_functions_python_drafts_the_same(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    natively = steps_of_two_requests()
    monkeypatch.setattr(import_module("paceline.ops.native.library"), "load", lambda: found)
    suffix._library.cache_clear()
    try:
        assert not suffix_available()
        assert isinstance(proposer()._trees[""], PlainSuffixTrees)
        with pytest.raises(RuntimeError, match="build"):
            NativeText([1])
        assert steps_of_two_requests() == natively
    finally:
        suffix._library.cache_clear()


@needs_native
def test_with_them_they_are_used() -> None:
    assert isinstance(proposer()._trees[""], NativeSuffixTrees)


def test_a_walk_visits_the_first_child_of_each_node_on_the_path() -> None:
    rng = random.Random(2)
    for _ in range(2000):
        size = rng.randint(0, 12)
        tree = DraftTree([rng.randrange(3) for _ in range(size)], [rng.randint(-1, i - 1) for i in range(size)])
        new_token_ids = [rng.randrange(3) for _ in range(rng.randint(0, 6))]
        expected, at = [], -1
        for token in new_token_ids:
            children = [node for node, parent in enumerate(tree.parents) if parent == at]
            expected += [(child, tree.token_ids[child] == token) for child in children[:1]]
            right = [child for child in children if tree.token_ids[child] == token]
            if not right:
                break
            at = right[0]
        assert list(walk(tree, new_token_ids)) == expected
