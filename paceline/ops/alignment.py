"""Where a tensor must lie in memory so that a product over it has the same bits every time.

A BLAS chooses its kernel not only by the shapes of a product but also by the addresses of its operands: on some
machines a row that begins 4 bytes after a multiple of 64 is added up in another order than its own copy. So whatever
is promised to be the same to the bit is computed on operands that begin at a multiple of 64 bytes and are contiguous.
Elementwise operations and reductions of PyTorch read unaligned vectors and give the same bits.
"""

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64  # a cache line and the widest vector; PyTorch allocates all CPU memory at multiples of it


def aligned(x: Tensor) -> Tensor:
    """x itself where it is contiguous and begins at a multiple of ALIGNMENT_BYTES, else a copy that does."""
    return x if x.is_contiguous() and x.data_ptr() % ALIGNMENT_BYTES == 0 else aligned_copy(x)


def aligned_copy(x: Tensor) -> Tensor:
    """A contiguous copy in fresh memory. Its strides are those of its shape alone, also along dimensions of size 1."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
