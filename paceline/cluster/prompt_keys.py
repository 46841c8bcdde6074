"""The routing keys of a prompt, as its workers' events will name them."""

import importlib
from collections.abc import Sequence
from typing import Any

from paceline.cluster.index import routing_key


class PromptKeys:
    """For workers of one fingerprint (a digest) and block size."""

    def __init__(self, block_size: int, fingerprint: bytes) -> None:
        self._hashes: Any = importlib.import_module("paceline.kv.hashes")
        self._block_size, self._fingerprint = block_size, fingerprint

    def __call__(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """Of the full blocks of all but the last token, which is always computed."""
        root = self._hashes.root_hash(salt, self._fingerprint)
        return [routing_key(key.hash) for key in self._hashes.block_keys(token_ids[:-1], self._block_size, root)]
