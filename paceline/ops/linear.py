"""A linear layer on the CPU whose result for a row has the same bits wherever the row stands.

A BLAS picks its kernel by the shape of the product, so a row alone and the same row among others may round differently.
Here rows are always multiplied in tiles of one fixed size, the last one filled up with zeros: every product has the
same shape. That a row's place inside the tile does not matter either is no promise of any BLAS, so it is measured, once
per weight shape, and where it does not hold each row is multiplied alone.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.ops import reference

TILE_ROWS = 16


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [rows, in], weight: [out, in] -> [rows, out]"""
    if not place_in_tile_is_free(weight.shape[0], weight.shape[1], weight.dtype, torch.get_num_threads()):
        return reference.linear(x, weight, bias)
    num_rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -num_rows % TILE_ROWS))
    return torch.cat([F.linear(tile, weight, bias) for tile in torch.split(padded, TILE_ROWS)])[:num_rows]


@cache
def place_in_tile_is_free(num_out: int, num_in: int, dtype: torch.dtype, num_threads: int) -> bool:
    """Whether equal rows of a tile give equal bits, for this shape, dtype and number of threads."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, num_in, generator=generator).to(dtype)
    weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
    product = F.linear(row.repeat(TILE_ROWS, 1), weight)
    return bool((product == product[0]).all())
