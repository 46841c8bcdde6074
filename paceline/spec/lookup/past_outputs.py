"""Past outputs, kept for drafting: a bounded text in a few chunks; when it is full, the oldest chunk goes.

Each chunk is one text with its own index, so forgetting costs nothing and memory never passes the bound. The
drafter says what an index is and brings it up to date when it looks into it: without drafts, outputs are only kept. A
separator that is no token stands between two outputs: no match runs from one into the next.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

SEPARATOR = -1
NUM_CHUNKS = 4

Index = TypeVar("Index")


@dataclass(slots=True)
class Chunk(Generic[Index]):
    index: Index
    text: list[int] = field(default_factory=list)
    num_outputs: int = 0


class PastOutputs(Generic[Index]):
    def __init__(self, new_index: Callable[[], Index], max_tokens: int, max_outputs: int) -> None:
        self._new_index = new_index
        self._max_tokens, self._max_outputs = max_tokens, max_outputs
        self.chunks: deque[Chunk[Index]] = deque()  # oldest first
        self.num_added = 0  # outputs so far: whether something is new

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.text) for chunk in self.chunks)

    @property
    def num_outputs(self) -> int:
        return sum(chunk.num_outputs for chunk in self.chunks)

    def add(self, tokens: Sequence[int]) -> None:
        """Keep one output; what is longer than a chunk may be keeps its end."""
        if not tokens or not self._max_outputs:
            return
        chunk_tokens = self._max_tokens // NUM_CHUNKS
        chunk_outputs = max(1, self._max_outputs // NUM_CHUNKS)
        kept = list(tokens[-(chunk_tokens - 1) :]) if chunk_tokens > 1 else []
        if not kept:
            return
        newest = self.chunks[-1] if self.chunks else None
        if newest is None or len(newest.text) + len(kept) + 1 > chunk_tokens or newest.num_outputs >= chunk_outputs:
            newest = Chunk(self._new_index())
            self.chunks.append(newest)
        newest.text += [*kept, SEPARATOR]
        newest.num_outputs += 1
        self.num_added += 1
        while self.num_tokens > self._max_tokens or self.num_outputs > self._max_outputs:
            self.chunks.popleft()
