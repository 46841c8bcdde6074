"""Room for keys and values: the target's, and that of every drafter with attention of its own."""

import numpy as np
import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig


def allocate_kv(config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[layers, 2 (keys, values), slots, kv heads, head dim]. Zeroed, so that a masked slot can never hold a NaN.

    On a CPU the system hands out a page, zeroed, when it is first written to (numpy asks for memory that way): a pool
    of gigabytes is there at once, and takes only what is used of it."""
    shape = (config.num_layers, 2, num_slots, config.num_kv_heads, config.head_dim)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pool = torch.from_numpy(np.zeros((*shape, dtype.itemsize), dtype=np.uint8)).view(dtype).squeeze(-1)
    pool[:, :, :1] = 0  # the first pages now, not in the first request
    return pool
