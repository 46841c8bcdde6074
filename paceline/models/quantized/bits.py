"""Small unsigned integers packed into int32, lowest bits first."""

import torch
from torch import Tensor


def unpacked(packed: Tensor, bits: int, dim: int) -> Tensor:
    """int32 -> uint8, 32 / bits times as long along `dim`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    dim %= packed.dim()
    fields = (packed.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (packed.dim() - dim - 1))) & ((1 << bits) - 1)
    return fields.to(torch.uint8).flatten(dim, dim + 1)


def packed(values: Tensor, bits: int, dim: int) -> Tensor:
    """The reverse: small unsigned integers -> int32, 32 / bits times as short along `dim`, filled up with zeros."""
    per_int, dim = 32 // bits, dim % values.dim()
    missing = -values.shape[dim] % per_int
    if missing:
        filling = values.new_zeros((*values.shape[:dim], missing, *values.shape[dim + 1 :]))
        values = torch.cat([values, filling], dim=dim)
    shape = (*values.shape[:dim], -1, per_int, *values.shape[dim + 1 :])
    fields = values.long().reshape(shape).movedim(dim + 1, -1)  # [..., per_int]
    joined = (fields << torch.arange(0, 32, bits)).sum(-1)  # no two fields share a bit
    return torch.where(joined >= 1 << 31, joined - (1 << 32), joined).int().contiguous()
