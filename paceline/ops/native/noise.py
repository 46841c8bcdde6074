"""Keyed noise made natively: the same uniforms, bit for bit, as `ops/random.py`, and logarithms in float32.

`src/noise.cpp` has the other side.
"""

import ctypes
from ctypes import c_int32, c_uint64, c_void_p
from functools import cache

import numpy as np

from paceline.ops.native.library import Signatures, load_with
from paceline.ops.random import BitRow
from paceline.ops.sampling_types import FloatRow

_SIGNATURES: Signatures = {
    "pl_keyed_gumbel": (None, [c_void_p, c_int32, c_uint64, c_void_p]),
}


@cache
def _library() -> ctypes.CDLL | None:
    return load_with(_SIGNATURES)


def noise_available() -> bool:
    return _library() is not None


def keyed_gumbel(key: int, id_constants: BitRow) -> FloatRow:
    """Gumbel noise of the ids whose constants are given, to about 1e-6: for drafts, whose noise may be off a little."""
    library = _library()
    assert library is not None
    noise = np.empty(len(id_constants), dtype=np.float32)
    library.pl_keyed_gumbel(id_constants.ctypes.data, len(id_constants), key, noise.ctypes.data)
    return noise
