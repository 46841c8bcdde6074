"""What a worker tells of its prefix cache: blocks stored, removed, all gone. In vLLM's wire format, with numbers.

A batch is MessagePack [time, [event, ...], rank]; an event is a dictionary with its "type", as vLLM has written them
since it left arrays; arrays (["BlockStored", hashes, ...]) can be read too. Batches are numbered 0, 1, 2, ...

The writer (`EventLog`) keeps the last batches for replay, and what is stored now for a snapshot. The reader
(`EventReader`) takes batches in order only: one that was seen is skipped, and after a gap it says from where it needs
a replay. Until that comes, the index is old: that makes a worse route, never a wrong token.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.cluster.msgpack import MessagePackError, pack, unpack

FROM_SNAPSHOT = -1  # "replay from here" that no log keeps: it answers with a snapshot
MEDIUM = "GPU"  # vLLM's name for the memory that passes read from, whatever it is


@dataclass(frozen=True, slots=True)
class BlockStored:
    block_hashes: tuple[int, ...]  # index.routing_key of each
    parent_block_hash: int | None = None  # of the block before the first
    token_ids: tuple[int, ...] = ()
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class InvalidEventError(ValueError):
    """A batch that is not in vLLM's format."""


def encode_batch(events: Sequence[Event], timestamp: float, rank: int = 0) -> bytes:
    return pack([timestamp, [_as_map(event) for event in events], rank])


def _as_map(event: Event) -> dict[str, Any]:
    if isinstance(event, BlockStored):
        return {
            "type": "BlockStored",
            "block_hashes": list(event.block_hashes),
            "parent_block_hash": event.parent_block_hash,
            "token_ids": list(event.token_ids),
            "block_size": event.block_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
        }
    if isinstance(event, BlockRemoved):
        return {"type": "BlockRemoved", "block_hashes": list(event.block_hashes), "medium": MEDIUM}
    return {"type": "AllBlocksCleared"}


def decode_batch(payload: bytes) -> list[Event]:
    """The events of a batch; kinds that are not known are left out, as a newer writer may send them."""
    try:
        batch = unpack(payload)
        found = [_event(entry) for entry in batch[1]]
    except (MessagePackError, TypeError, IndexError, KeyError, ValueError) as error:
        raise InvalidEventError(f"not a batch of KV events: {error!r}") from error
    return [event for event in found if event is not None]


_ARRAY_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size"),
    "BlockRemoved": ("block_hashes",),
    "AllBlocksCleared": (),
}


def _event(entry: Any) -> Event | None:
    if isinstance(entry, list):
        kind = entry[0]
        values = dict(zip(_ARRAY_FIELDS.get(kind, ()), entry[1:], strict=False))
    else:
        kind, values = entry["type"], entry
    if kind == "BlockStored":
        parent = values.get("parent_block_hash")
        tokens = tuple(int(token) for token in values.get("token_ids") or ())
        size = int(values.get("block_size") or 16)
        return BlockStored(_keys(values), None if parent is None else _key(parent), tokens, size)
    if kind == "BlockRemoved":
        return BlockRemoved(_keys(values))
    return AllBlocksCleared() if kind == "AllBlocksCleared" else None


def _keys(values: dict[str, Any]) -> tuple[int, ...]:
    return tuple(_key(value) for value in values["block_hashes"])


def _key(value: Any) -> int:
    """64 bits, whether the writer sent a number (perhaps a negative one) or the whole hash."""
    number = int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else int(value)
    return number % 2**64


@dataclass(frozen=True, slots=True)
class Snapshot:
    next_sequence: int  # of the first batch that is not in it
    keys: frozenset[int]


Replay = list[tuple[int, bytes]] | Snapshot


class EventLog:
    """A worker's side. Not thread-safe."""

    def __init__(self, num_kept: int = 10_000) -> None:
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=num_kept)
        self._next = 0
        self._stored: set[int] = set()

    def append(self, events: Sequence[Event]) -> tuple[int, bytes]:
        """The batch of these events and its number, ready to send."""
        for event in events:
            if isinstance(event, BlockStored):
                self._stored.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self._stored.difference_update(event.block_hashes)
            else:
                self._stored.clear()
        batch = (self._next, encode_batch(events, time.time()))
        self._kept.append(batch)
        self._next += 1
        return batch

    def kept(self) -> list[tuple[int, bytes]]:
        return list(self._kept)

    def replay(self, start: int) -> Replay:
        """All batches from `start` on; where these are not kept any more, what is stored now."""
        first = self._kept[0][0] if self._kept else self._next
        if first <= start <= self._next:
            return [batch for batch in self._kept if batch[0] >= start]
        return Snapshot(self._next, frozenset(self._stored))


class BlockListener(Protocol):
    """Where a reader puts what it read: a router has this, for one worker."""

    def stored(self, worker_id: str, keys: Sequence[int]) -> None: ...

    def removed(self, worker_id: str, keys: Sequence[int]) -> None: ...

    def cleared(self, worker_id: str) -> None: ...


@dataclass(slots=True)
class EventReader:
    """The router's side of one worker's events. `ask` is called with the number to replay from, once per gap."""

    worker_id: str
    listener: BlockListener
    ask: Callable[[int], None]
    next_sequence: int = 0
    num_gaps: int = field(default=0, init=False)
    _is_waiting: bool = field(default=False, init=False)

    def feed(self, sequence: int, payload: bytes) -> None:
        if sequence < self.next_sequence:
            return  # seen
        if sequence > self.next_sequence:
            self._ask(self.next_sequence)
        elif self._apply(payload):
            self.next_sequence = sequence + 1
        else:
            self._ask(FROM_SNAPSHOT)  # a replay would bring the same bytes

    def feed_replay(self, replay: Replay) -> None:
        self._is_waiting = False
        if isinstance(replay, Snapshot):
            self.listener.cleared(self.worker_id)
            self.listener.stored(self.worker_id, sorted(replay.keys))
            self.next_sequence = replay.next_sequence
            return
        for sequence, payload in replay:
            if not self._is_waiting:
                self.feed(sequence, payload)

    def _ask(self, start: int) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            self.num_gaps += 1
            self.ask(start)

    def _apply(self, payload: bytes) -> bool:
        try:
            events = decode_batch(payload)
        except InvalidEventError:
            return False
        for event in events:
            if isinstance(event, BlockStored):
                self.listener.stored(self.worker_id, event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.listener.removed(self.worker_id, event.block_hashes)
            else:
                self.listener.cleared(self.worker_id)
        return True
