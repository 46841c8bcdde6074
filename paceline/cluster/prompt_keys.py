"""The routing keys of a prompt, as its workers' events will name them."""

from collections.abc import Sequence

from paceline.cluster.index import routing_key
from paceline.kv.hashes import block_keys, root_hash


class PromptKeys:
    """For workers of one fingerprint (a digest) and block size."""

    def __init__(self, block_size: int, fingerprint: bytes) -> None:
        self._block_size, self._fingerprint = block_size, fingerprint

    def __call__(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """Of the full blocks of all but the last token, which is always computed."""
        root = root_hash(salt, self._fingerprint)
        return [routing_key(key.hash) for key in block_keys(token_ids[:-1], self._block_size, root)]
