"""Where the time of a pass goes: stages of a quantized product, and steps of a whole pass. `src/profile.cpp` has the
other side.

>>> from paceline.ops.native.profile import product_stages
>>> product_stages("Q4_1", rows=16).share_of_peak
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_double, c_int32, c_void_p
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidOptionError
from paceline.ops.native.library import SOURCES, STATUS, Signatures, declare, library

STAGES = ("unpacking", "dots", "scales", "sums")  # `LeftOut` of src/kernels.h, from 1 on
STEPS = ("embed", "norm", "qkv", "rotate", "attend", "o", "gate_up", "down", "logits")  # `PlStep` of src/api.h
BLOCK = "16 outputs x 32 inputs of one row"

_SIGNATURES: Signatures = {
    "pl_profile_product": (c_int32, [c_int32, c_int32, c_int32, c_double, c_void_p]),
    "pl_model_profile": (None, [c_void_p, c_void_p]),
}


@dataclass(frozen=True, slots=True)
class ProductStages:
    """Seconds per block (16 outputs x 32 inputs of one row) on one thread, with everything in the caches."""

    rows: int
    block_s: float  # as it runs
    dots_alone_s: float  # a bare loop of the same byte dot products: the peak
    stages_s: dict[str, float] | None  # what leaving out each stage saves; None where the kernel is not taken apart

    @property
    def share_of_peak(self) -> float:
        return self.dots_alone_s / self.block_s


def product_stages(kind: str, rows: int, *, inputs: int = 576, limit_s: float = 0.05) -> ProductStages:
    """The least times seen within `limit_s`. kind: a GGUF block name, as weights of that kind are held here."""
    best = (c_double * (3 + len(STAGES)))()
    native = _library()
    status = native.pl_profile_product(native.pl_natural_format(SOURCES[kind]), inputs, rows, limit_s, best)
    if status:
        raise InvalidOptionError(f"no profile of {kind} with {inputs} inputs and {rows} rows: {STATUS[status]}")
    as_run, alone, whole, *without = best
    stages = None if whole < 0 else {name: whole - left for name, left in zip(STAGES, without, strict=True)}
    return ProductStages(rows, as_run, alone, stages)


@contextmanager
def profiled_steps(model: int, num_threads: int) -> Iterator[NDArray[np.float64]]:
    """Seconds [threads, STEPS, (working, waiting)] that passes of a native decoder add up while this is open."""
    seconds = np.zeros((num_threads, len(STEPS), 2))
    _library().pl_model_profile(model, seconds.ctypes.data)
    try:
        yield seconds
    finally:
        _library().pl_model_profile(model, None)


def _library() -> ctypes.CDLL:
    native = library()
    declare(native, _SIGNATURES)
    return native
