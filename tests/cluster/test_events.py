"""KV events: the bytes that vLLM's readers expect, and an index that is right again after any loss."""

import contextlib
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventLog,
    EventReader,
    InvalidEventError,
    Snapshot,
    decode_batch,
    encode_batch,
)
from paceline.cluster.msgpack import MessagePackError, pack, unpack

STORED = BlockStored((2**64 - 1, 5), 7, tuple(range(32)), 16)


def test_a_batch_has_vllms_bytes() -> None:
    """[time, [{"type": ..., ...}], rank], spelled out byte by byte for the smallest one."""
    assert encode_batch([AllBlocksCleared()], 1.0) == (
        b"\x93\xcb" + struct.pack(">d", 1.0) + b"\x91\x81\xa4type\xb0AllBlocksCleared\x00"
    )
    stored = unpack(encode_batch([STORED], 1.0))[1][0]
    assert list(stored) == [
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    ]  # fmt: skip
    assert stored["medium"] == "GPU" and stored["block_hashes"] == [2**64 - 1, 5]


def test_batches_come_back_as_they_went() -> None:
    events: list[Event] = [STORED, BlockRemoved((1, 2)), AllBlocksCleared()]
    assert decode_batch(encode_batch(events, 12.5)) == events


def test_older_and_other_forms_can_be_read() -> None:
    """Arrays, as vLLM wrote them first; signed or whole hashes; kinds of events that are not known."""
    whole = bytes(8) + (5).to_bytes(8, "big")
    payload = pack([1.0, [["BlockStored", [-1, whole], None, [1, 2], 2, None], ["Newer", 1], ["AllBlocksCleared"]]])
    assert decode_batch(payload) == [BlockStored((2**64 - 1, 5), None, (1, 2), 2), AllBlocksCleared()]


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93", pack(3), pack([1.0]), pack([1.0, [{"type": "BlockRemoved"}]])]
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidEventError):
        decode_batch(payload)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
    max_leaves=40,
)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_messagepack_comes_back_as_it_went(value: object) -> None:
    assert unpack(pack(value)) == value


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(MessagePackError):
        unpack(data)


def test_long_things_have_wider_lengths() -> None:
    for value in ("x" * 70_000, b"x" * 70_000, [0] * 70_000, dict.fromkeys(range(70000), 0), "x" * 200, [1] * 300):
        assert unpack(pack(value)) == value
    for value in (2**64, object()):
        with pytest.raises(MessagePackError):
            pack(value)


class Table:
    """What a router's index would hold for one worker."""

    def __init__(self) -> None:
        self.keys: set[int] = set()

    def stored(self, worker_id: str, keys: object) -> None:
        self.keys.update(keys)  # type: ignore[call-overload]

    def removed(self, worker_id: str, keys: object) -> None:
        self.keys.difference_update(keys)  # type: ignore[call-overload]

    def cleared(self, worker_id: str) -> None:
        self.keys.clear()


def test_a_gap_asks_once_for_what_is_missing_and_duplicates_are_skipped() -> None:
    log, table, asked = EventLog(), Table(), list[int]()
    reader = EventReader("w", table, asked.append)
    batches = [log.append([BlockStored((i,))]) for i in range(6)]
    reader.feed(*batches[0])
    reader.feed(*batches[0])
    for lost_before in (3, 4, 5):
        reader.feed(*batches[lost_before])
    assert asked == [1] and table.keys == {0}
    reader.feed_replay(log.replay(asked[0]))
    assert table.keys == set(range(6)) and reader.next_sequence == 6


def test_what_is_not_kept_any_more_comes_as_a_snapshot() -> None:
    log = EventLog(num_kept=2)
    for i in range(9):
        log.append([BlockStored((i,))])
    log.append([BlockRemoved((0, 1))])
    assert log.replay(0) == Snapshot(10, frozenset(range(2, 9)))
    assert isinstance(log.replay(11), Snapshot)  # a reader of another life of this worker
    assert [number for number, _ in log.replay(8)] == [8, 9]  # type: ignore[union-attr]


def test_a_damaged_batch_leads_to_a_snapshot_and_not_to_the_same_batch_again() -> None:
    log, table, asked = EventLog(), Table(), list[int]()
    reader = EventReader("w", table, asked.append)
    log.append([BlockStored((1,))])
    reader.feed(0, b"\xc1")
    reader.feed_replay(log.replay(asked[-1]))
    assert table.keys == {1} and len(asked) == 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 50))
def test_after_any_losses_the_index_is_right_again(seed: int, num_kept: int) -> None:
    """Batches are lost, doubled and late; each question is answered at some later moment."""
    dice, log, table, asked = random.Random(seed), EventLog(num_kept), Table(), list[int]()
    reader, truth = EventReader("w", table, asked.append), set[int]()
    for _ in range(60):
        key = dice.randrange(12)
        kind = dice.randrange(8)
        event: Event = BlockStored((key,)) if kind < 5 else BlockRemoved((key,)) if kind < 7 else AllBlocksCleared()
        truth = truth | {key} if kind < 5 else truth - {key} if kind < 7 else set()
        batch = log.append([event])
        for _ in range(dice.choice([0, 1, 1, 2])):
            reader.feed(*batch)
        if asked and dice.random() < 0.3:
            reader.feed_replay(log.replay(asked.pop()))
    reader.feed(*log.append([]))
    if asked:
        reader.feed_replay(log.replay(asked.pop()))
    assert table.keys == truth
