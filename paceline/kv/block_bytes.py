"""A KV block as bytes: the target's keys and values of all layers, and the rows of drafters, by name.

    "PLKV" | version, number of parts | fingerprint | block hash | crc32 of what follows | parts
    a part: length of its name, length of its data, name, data

Bytes say themselves which block of which kind of engine they are. What is damaged, or belongs to another block or
engine, is found out before a byte of it is used.
"""

import logging
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.core.block_rows import BlockRows
from paceline.core.kv_tensor import raw
from paceline.kv.block_pool import BlockPool
from paceline.kv.hashes import HASH_BYTES, BlockHash

logger = logging.getLogger("paceline")

MAGIC, VERSION = b"PLKV", 1
HEADER = struct.Struct(f"<4sHH{HASH_BYTES}s{HASH_BYTES}sI")
PART = struct.Struct("<HI")
TARGET = "target"  # the part that must be there

Parts = Mapping[str, bytes]


def encode(parts: Parts, fingerprint: bytes, block_hash: BlockHash) -> bytes:
    pieces: list[bytes] = []
    for name, data in parts.items():
        encoded = name.encode()
        pieces += (PART.pack(len(encoded), len(data)), encoded, data)
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return b"".join((HEADER.pack(MAGIC, VERSION, len(parts), fingerprint, block_hash, crc), *pieces))


def decode(data: bytes, fingerprint: bytes, block_hash: BlockHash) -> dict[str, bytes] | None:
    """The parts; None where the bytes are damaged, of another engine, or of another block."""
    if len(data) < HEADER.size:
        return None
    magic, version, num_parts, made_by, made_for, crc = HEADER.unpack_from(data)
    # A fingerprint that is not in use is padded with zeros in the header.
    if (magic, version, made_by, made_for) != (MAGIC, VERSION, fingerprint.ljust(HASH_BYTES, b"\0"), block_hash):
        return None
    body = memoryview(data)[HEADER.size :]
    if zlib.crc32(body) != crc:
        return None
    try:
        return _parts(body, num_parts)
    except (struct.error, ValueError):  # made so: the crc is right
        return None


def _parts(body: memoryview, num_parts: int) -> dict[str, bytes]:
    parts: dict[str, bytes] = {}
    begin = 0
    for _ in range(num_parts):
        name_length, length = PART.unpack_from(body, begin)
        middle = begin + PART.size + name_length
        name = bytes(body[begin + PART.size : middle]).decode()
        begin = middle + length
        parts[name] = bytes(body[middle:begin])
    if begin != len(body):
        raise ValueError(f"parts of {begin} bytes in {len(body)}")
    return parts


class BlockBytes:
    """Blocks of an engine's pool, out and in."""

    def __init__(
        self, kv_cache: Tensor, pool: BlockPool, block_size: int, drafters: Callable[[], Sequence[BlockRows]]
    ) -> None:
        self._kv_cache = raw(kv_cache)  # [layers, 2, slots, kv heads, head dim]
        self._pool, self._block_size, self._drafters = pool, block_size, drafters
        self.target_bytes = kv_cache[:, :, :block_size].numel() * kv_cache.element_size()  # of a block

    def read(self, block: int) -> dict[str, bytes]:
        """Copies of a block's parts."""
        parts = {TARGET: tensor_bytes(self._rows(block))}
        use = int(self._pool.num_uses[block])
        for rows in self._drafters():
            try:
                data = None if rows.name in parts else rows.read(block, use)  # two proposers may run one network
            except Exception:
                logger.exception("a drafter could not give its rows of a block: the block goes without them")
                continue
            if data is not None:
                parts[rows.name] = data
        return parts

    def write(self, block: int, parts: Parts) -> bool:
        """False, and nothing is written, where the target's part does not fit. Parts of unknown drafters are left."""
        target = parts.get(TARGET)
        if target is None or len(target) != self.target_bytes:
            return False
        place = self._rows(block)
        place.copy_(tensor_of(target, place))
        use = int(self._pool.num_uses[block])
        for rows in self._drafters() if len(parts) > 1 else ():
            try:
                if rows.name in parts:
                    rows.write(block, use, parts[rows.name])
            except Exception:
                logger.exception("a drafter could not take its rows of a block: the block comes without them")
        return True

    def _rows(self, block: int) -> Tensor:
        return self._kv_cache[:, :, block * self._block_size : (block + 1) * self._block_size]


def tensor_bytes(rows: Tensor) -> bytes:
    return rows.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def tensor_of(data: bytes, like: Tensor) -> Tensor:
    """The bytes as a tensor of this shape and type, on the host."""
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return flat.view(like.dtype).view(like.shape)
