"""What a drafter learns from one request for others, kept apart by `Request.cache_salt`.

Two clients with different salts must not find each other's text in their drafts: an accepted draft would tell one what
the other was answered. A drafter that remembers anything across requests keeps it here.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Memory = TypeVar("Memory")

MAX_SALTS = 64  # least recently used go first: a client that invents salts costs memory for this many


class BySalt(Generic[Memory]):
    def __init__(self, new_memory: Callable[[], Memory]) -> None:
        self._new_memory = new_memory
        self._memories: OrderedDict[str, Memory] = OrderedDict()

    def __getitem__(self, salt: str) -> Memory:
        memory = self._memories.get(salt)
        if memory is None:
            memory = self._memories[salt] = self._new_memory()
            if len(self._memories) > MAX_SALTS:
                self._memories.popitem(last=False)
        elif len(self._memories) > 1:
            self._memories.move_to_end(salt)
        return memory

    def __len__(self) -> int:
        return len(self._memories)
