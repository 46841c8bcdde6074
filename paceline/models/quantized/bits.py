"""Small unsigned integers packed into int32, lowest bits first."""

import torch
from torch import Tensor


def unpacked(packed: Tensor, bits: int, dim: int) -> Tensor:
    """int32 -> uint8, 32 / bits times as long along `dim`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    dim %= packed.dim()
    fields = (packed.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (packed.dim() - dim - 1))) & ((1 << bits) - 1)
    return fields.to(torch.uint8).flatten(dim, dim + 1)
