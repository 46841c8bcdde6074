"""Past outputs, kept for drafting: a bounded text in a few chunks; when it is full, the oldest chunk goes.

Each chunk is one text with its own n-gram index, so forgetting costs nothing and memory never passes the bound. The
index is brought up to date when somebody looks into it: where nobody drafts, outputs are only kept. A separator that is
no token stands between two outputs: no match runs from one into the next.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.spec.ngram_index import NgramIndex

SEPARATOR = -1
NUM_CHUNKS = 4


@dataclass(slots=True)
class Chunk:
    index: NgramIndex
    text: list[int] = field(default_factory=list)
    num_outputs: int = 0

    def matches(self, suffix: Sequence[int]) -> Iterator[tuple[int, int]]:
        """As `NgramIndex.matches`."""
        self.index.extend(self.text, len(self.text))
        return self.index.matches(suffix)


class PastOutputs:
    def __init__(self, sizes: Sequence[int], max_tokens: int, max_outputs: int) -> None:
        self._sizes = tuple(sizes)
        self._max_tokens, self._max_outputs = max_tokens, max_outputs
        self.chunks: deque[Chunk] = deque()  # oldest first

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
            newest = Chunk(NgramIndex(self._sizes))
            self.chunks.append(newest)
        newest.text += [*kept, SEPARATOR]
        newest.num_outputs += 1
        while self.num_tokens > self._max_tokens or self.num_outputs > self._max_outputs:
            self.chunks.popleft()
