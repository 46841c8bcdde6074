"""Room for keys and values: the target's, and that of every drafter with attention of its own."""

import math

import numpy as np
import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig

CACHE_LINE = 64  # bytes


def allocate_kv(config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[layers, 2 (keys, values), slots, kv heads, head dim]. Zeroed, so that a masked slot can never hold a NaN.

    On a CPU the system hands out a page, zeroed, when it is first written to (numpy asks for memory that way): a pool
    of gigabytes is there at once, and takes only what is used of it. It begins with a cache line, so that a head's
    keys lie in as few of them as they can."""
    shape = (config.num_layers, 2, num_slots, config.num_kv_heads, config.head_dim)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize + CACHE_LINE, dtype=np.uint8)
    begin = -memory.ctypes.data % CACHE_LINE
    pool = torch.from_numpy(memory[begin : begin + memory.size - CACHE_LINE]).view(dtype).view(shape)
    pool[:, :, :1] = 0  # the first pages now, not in the first request
    return pool
