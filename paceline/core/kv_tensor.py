"""Room for keys and values: the target's, and that of every drafter with attention of its own."""

import ctypes
import math
import mmap

import numpy as np
import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig

CACHE_LINE = 64  # bytes
FLOAT8 = torch.float8_e4m3fn  # four bits of exponent, three of mantissa, no infinity
FLOAT8_LARGEST = 448.0
SCALE_BYTES = 4  # of a head's keys or values at one position, where they are integers
TILE_SLOTS = 16  # int16: as many slots lie together, in the order of ops/native/src/kernels.h


def head_elements(config: ModelConfig, dtype: torch.dtype) -> int:
    """What one head of one position takes: its numbers, and where they are integers, a float32 scale beside them."""
    return config.head_dim + (0 if dtype.is_floating_point else SCALE_BYTES // dtype.itemsize)


def as_float8(x: Tensor) -> Tensor:
    """The nearest numbers of FLOAT8, ties to even; what is larger than the largest becomes the largest."""
    return x.float().clamp(-FLOAT8_LARGEST, FLOAT8_LARGEST).to(FLOAT8)


def raw(pool: Tensor) -> Tensor:
    """Keys and values as numbers that PyTorch copies and gathers on any device: FLOAT8 as bytes."""
    return pool.view(torch.uint8) if pool.dtype == FLOAT8 else pool


def allocate_kv(config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[layers, 2 (keys, values), slots, kv heads, `head_elements`]. Zeroed, so that a masked slot can never hold a NaN.
    What int16 slots hold lies in tiles of `TILE_SLOTS`: whole blocks may be copied, a slot alone may not.

    On a CPU the system hands out a page, zeroed, when it is first written to (numpy asks for memory that way): a pool
    of gigabytes is there at once, and takes only what is used of it. It begins with a cache line, so that a head's
    keys lie in as few of them as they can."""
    shape = (config.num_layers, 2, num_slots, config.num_kv_heads, head_elements(config, dtype))
    if device.type != "cpu":
        stored = torch.uint8 if dtype == FLOAT8 else dtype
        return torch.zeros(shape, dtype=stored, device=device).view(dtype)
    memory = np.zeros(math.prod(shape) * dtype.itemsize + CACHE_LINE, dtype=np.uint8)
    begin = -memory.ctypes.data % CACHE_LINE
    pool = torch.from_numpy(memory[begin : begin + memory.size - CACHE_LINE]).view(dtype).view(shape)
    touch(pool, slice(0, 1))
    return pool


def touch(pool: Tensor, *parts: slice) -> None:
    """Take the memory of these slots, which hold nothing yet, now instead of in the request that needs them first: it
    would wait 2 to 5 ms for every huge page."""
    for slots in parts:
        raw(pool)[:, :, slots].zero_()


MADV_POPULATE_WRITE = 23  # Linux 5.14: make the pages, leave what is in them
POPULATED_AT_ONCE = 16 << 20  # bytes: other threads that need a page wait for one call at most


def populate(pool: Tensor) -> bool:
    """Take all of a pool's memory now instead of as it is used, also while others use it. False: not possible here.

    A huge page is zeroed when it is first written to, and all layers need new ones at the same token: the step that
    meets them takes a few hundred milliseconds longer. A server takes its memory when it starts."""
    if pool.device.type != "cpu":
        return True
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return False  # not Linux
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    begin = -(-pool.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (pool.data_ptr() + pool.numel() * pool.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    for address in range(begin, end, POPULATED_AT_ONCE):
        if madvise(address, min(POPULATED_AT_ONCE, end - address), MADV_POPULATE_WRITE) != 0:
            return False
    return True
