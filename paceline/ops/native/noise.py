"""Keyed noise made natively: the same uniforms, bit for bit, as `ops/random.py`.

`keyed_gumbel` has logarithms in float32, good enough for drafts. `race_winner` is exact: it gives the token that numpy
would give, or says that it cannot tell.

`src/noise.cpp` has the other side.
"""

import ctypes
from ctypes import c_float, c_int32, c_uint64, c_void_p
from functools import cache

import numpy as np

from paceline.ops.native.library import Signatures, load_with
from paceline.ops.random import BitRow, id_constants
from paceline.ops.sampling_types import FloatRow

_SIGNATURES: Signatures = {
    "pl_keyed_gumbel": (None, [c_void_p, c_int32, c_uint64, c_void_p]),
    "pl_race": (c_int32, [c_void_p, c_void_p, c_int32, c_uint64, c_float]),
}


@cache
def _library() -> ctypes.CDLL | None:
    return load_with(_SIGNATURES)


def noise_available() -> bool:
    return _library() is not None


def keyed_gumbel(key: int, constants: BitRow) -> FloatRow:
    """Gumbel noise of the ids with these constants, to about 1e-6."""
    library = _library()
    assert library is not None
    noise = np.empty(len(constants), dtype=np.float32)
    library.pl_keyed_gumbel(constants.ctypes.data, len(constants), key, noise.ctypes.data)
    return noise


def race_winner(logits: FloatRow, temperature: float, key: int) -> int | None:
    """`race` over all of (logits - max) / temperature; None where numpy has to say.

    That is without the kernels, for rows that cannot be sampled, next to no temperature, and where two tokens are too
    close to call."""
    library = _library()
    is_plain = logits.dtype == np.float32 and logits.flags.c_contiguous
    if library is None or not is_plain:
        return None
    size = len(logits)
    token: int = library.pl_race(logits.ctypes.data, id_constants(size).ctypes.data, size, key, temperature)
    return token if token >= 0 else None
