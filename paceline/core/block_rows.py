"""What a drafter holds beside the target's KV blocks, and may send along with them."""

from typing import Protocol


class BlockRows(Protocol):
    """Rows of a drafter's own KV cache that has the target's slots.

    `use`: how many times the block has been handed out; rows belong to one use of a block."""

    @property
    def name(self) -> str:
        """Equal only where the rows mean the same: the kind of drafter and a digest of its network."""

    def read(self, block: int, use: int) -> bytes | None:
        """The rows of a block, and which of its tokens have one; None where none has."""

    def write(self, block: int, use: int, data: bytes) -> bool:
        """Rows as `read` gave them; False, and nothing is written, where they do not fit."""
