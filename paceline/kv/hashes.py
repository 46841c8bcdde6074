"""What a full KV block is called: a hash of its tokens and of everything before them.

    hash of block i = H(hash of block i-1, its tokens): equal hashes mean equal tokens from the start of the sequence.

The chain begins with the request's salt, so that requests with different salts never find each other's blocks, and,
once blocks leave the process or come from outside, with the engine's fingerprint (fingerprint.py): then equal hashes
also mean the same model computed in the same way.

>>> root = root_hash("alice")
>>> [first, second] = block_keys([1, 2, 3, 4, 5], block_size=2, root=root)
>>> second.parent == first.hash, second.token_ids
(True, (3, 4))
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

BlockHash = bytes
ROOT_HASH: BlockHash = b""
HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockKey:
    """A full block by name, with what the name was made of."""

    hash: BlockHash
    parent: BlockHash  # of the block before it; of a first block: the root
    token_ids: tuple[int, ...]

    @property
    def is_true(self) -> bool:
        return self.hash == hash_block(self.parent, self.token_ids)


def root_hash(salt: str, fingerprint: bytes = b"") -> BlockHash:
    """Where the chain of a request's blocks begins."""
    if not salt and not fingerprint:
        return ROOT_HASH
    return hashlib.blake2b(salt.encode(), key=fingerprint, digest_size=HASH_BYTES).digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    return hashlib.blake2b(parent + array("i", token_ids).tobytes(), digest_size=HASH_BYTES).digest()


def block_keys(token_ids: Sequence[int], block_size: int, root: BlockHash) -> list[BlockKey]:
    """Of the full blocks of a sequence, in order."""
    keys: list[BlockKey] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = tuple(token_ids[start : start + block_size])
        parent = keys[-1].hash if keys else root
        keys.append(BlockKey(hash_block(parent, tokens), parent, tokens))
    return keys
