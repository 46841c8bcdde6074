"""Who holds which prefix: after any sequence of events, the same as a plain table says."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.index import PrefixIndex, routing_key


def test_overlap_is_the_number_of_leading_blocks() -> None:
    index = PrefixIndex()
    index.stored(0, [1, 2, 3])
    index.stored(5, [1, 3])  # without 2 its 3 is of no use
    assert index.overlaps([1, 2, 3, 4]) == {0: 3, 5: 1}
    assert index.overlaps([9, 1]) == {}
    assert index.overlaps([]) == {}


def test_what_is_removed_or_cleared_is_not_found() -> None:
    index = PrefixIndex()
    index.stored(0, [1, 2])
    index.stored(1, [1, 2])
    index.removed(0, [2, 77])
    assert index.overlaps([1, 2]) == {0: 1, 1: 2}
    index.cleared(1)
    assert index.overlaps([1, 2]) == {0: 1}
    assert index.num_blocks == 1 and index.num_held(1) == 0


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "cleared"]), st.integers(0, 70), st.lists(st.integers(0, 6), max_size=4)
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(EVENTS, st.lists(st.integers(0, 6), max_size=6))
def test_the_index_agrees_with_a_plain_table(events: list[tuple[str, int, list[int]]], prompt: list[int]) -> None:
    index, table = PrefixIndex(), {worker: set[int]() for worker in range(71)}
    for kind, worker, keys in events:
        if kind == "cleared":
            index.cleared(worker)
            table[worker].clear()
        elif kind == "stored":
            index.stored(worker, keys)
            table[worker].update(keys)
        else:
            index.removed(worker, keys)
            table[worker].difference_update(keys)
    index.check_integrity()
    expected = {}
    for worker, held in table.items():
        depth = next((i for i, key in enumerate(prompt) if key not in held), len(prompt))
        if depth:
            expected[worker] = depth
    assert index.overlaps(prompt) == expected


def test_a_routing_key_is_64_bits_of_the_hash() -> None:
    block_hash = random.Random(0).randbytes(16)
    assert routing_key(block_hash) == int.from_bytes(block_hash, "big") % 2**64
