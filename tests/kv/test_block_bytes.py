"""A block's bytes are used whole and for their own block, or not at all."""

import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.kv_tensor import FLOAT8, raw
from paceline.kv.block_bytes import HEADER, MAGIC, TARGET, VERSION, BlockBytes, decode, encode
from paceline.kv.block_pool import BlockPool

PRINT, HASH = b"f" * 16, b"h" * 16
PARTS = {TARGET: bytes(range(64)), "drafter": b"rows"}
DATA = encode(PARTS, PRINT, HASH)


def test_parts_come_back_as_they_were() -> None:
    assert decode(DATA, PRINT, HASH) == PARTS
    assert decode(encode(PARTS, b"", HASH), b"", HASH) == PARTS, "also where no fingerprint is in use"


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_a_changed_byte_is_found_wherever_it_is(place: int, change: int) -> None:
    damaged = bytearray(DATA)
    damaged[place] ^= change
    assert decode(bytes(damaged), PRINT, HASH) is None


@given(st.integers(0, len(DATA) - 1))
def test_a_block_that_was_cut_off_is_found(length: int) -> None:
    assert decode(DATA[:length], PRINT, HASH) is None
    assert decode(DATA + b"x", PRINT, HASH) is None


def test_the_bytes_of_another_block_or_engine_are_refused() -> None:
    assert decode(DATA, b"g" * 16, HASH) is None
    assert decode(DATA, PRINT, b"i" * 16) is None


@pytest.mark.parametrize("body", [b"", b"\xff\xff", struct.pack("<HI", 2, 0) + b"\xff\xfe", DATA[HEADER.size :] + b"x"])
def test_a_checksum_over_nonsense_does_not_make_it_sense(body: bytes) -> None:
    header = HEADER.pack(MAGIC, VERSION, 1 if len(body) < 20 else 2, PRINT, HASH, zlib.crc32(body))
    assert decode(header + body, PRINT, HASH) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FLOAT8])
def test_a_block_is_written_where_it_belongs_and_nowhere_else(dtype: torch.dtype) -> None:
    cache = torch.arange(2 * 2 * 12 * 3).view(2, 2, 12, 1, 3).to(dtype)
    before = cache.clone()
    blocks = BlockBytes(cache, BlockPool(3), 4, lambda: ())
    parts = blocks.read(0)
    assert len(parts[TARGET]) == blocks.target_bytes == 2 * 2 * 4 * 3 * dtype.itemsize
    assert blocks.write(2, parts)
    cache, before = raw(cache), raw(before)  # PyTorch compares no FP8 numbers
    assert torch.equal(cache[:, :, 8:], before[:, :, :4]) and torch.equal(cache[:, :, :8], before[:, :, :8])
    assert not blocks.write(1, {TARGET: parts[TARGET][:-1]}) and not blocks.write(1, {})
    assert torch.equal(cache[:, :, :8], before[:, :, :8]), "what does not fit changes nothing"
