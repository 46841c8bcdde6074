"""A linear layer on the CPU whose result for a row has the same bits wherever the row stands.

A BLAS picks its kernel by the shape of the product and the addresses of its operands, so a row alone and the same row
among others may round differently. Here rows are always multiplied in tiles of one fixed size and alignment, the last
one filled up with zeros: every product has the same shape. That a row's place inside the tile does not matter either is
no promise of any BLAS, so it is measured, once per weight shape, and where it does not hold each row is multiplied
alone.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.ops import reference
from paceline.ops.alignment import aligned

TILE_ROWS = 16


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [rows, in], weight: [out, in] -> [rows, out]"""
    num_out, num_in = weight.shape
    if not place_in_tile_is_free(num_out, num_in, weight.dtype, torch.get_num_threads(), bias is not None):
        return reference.linear(x, weight, bias)
    num_rows = x.shape[0]
    padded = x.new_zeros(num_rows + -num_rows % TILE_ROWS, num_in)
    padded[:num_rows] = x
    weight = aligned(weight)
    return torch.cat([F.linear(aligned(tile), weight, bias) for tile in torch.split(padded, TILE_ROWS)])[:num_rows]


@cache
def place_in_tile_is_free(
    num_out: int, num_in: int, dtype: torch.dtype, num_threads: int, has_bias: bool = False
) -> bool:
    """Whether a row's bits are the same at each place of a tile, for this shape, dtype and number of threads.

    A tile of random rows is turned until each of them has stood at every place."""
    generator = torch.Generator().manual_seed(0)
    tile = torch.randn(TILE_ROWS, num_in, generator=generator).to(dtype)
    weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
    bias = torch.randn(num_out, generator=generator).to(dtype) if has_bias else None
    product = F.linear(tile, weight, bias)
    turned = (F.linear(tile.roll(places, 0), weight, bias).roll(-places, 0) for places in range(1, TILE_ROWS))
    return all(torch.equal(found, product) for found in turned)
