"""How the native threads behave between two calls, for measuring. `src/pool.h` has the other side.

>>> from paceline.ops.native.team import set_waiting
>>> set_waiting("spin")
"""

import ctypes
from ctypes import c_int32, c_int64

from paceline.errors import InvalidOptionError
from paceline.ops.native.library import Signatures, declare, library

WAITING = ("auto", "spin", "sleep")  # `PlWaiting` of src/pool.h

_SIGNATURES: Signatures = {
    "pl_set_waiting": (None, [c_int32]),
    "pl_set_read_ahead": (None, [c_int64]),
    "pl_last_threads": (c_int32, []),
}


def set_waiting(how: str) -> None:
    """auto: spin, and leave threads out where other programs take their time and fewer are faster; spin: all threads,
    always; sleep: all threads, which give up their processor as soon as they have nothing to do."""
    if how not in WAITING:
        raise InvalidOptionError(f"threads cannot wait by {how!r}; choose from {', '.join(WAITING)}")
    _library().pl_set_waiting(WAITING.index(how))


def set_read_ahead(most_bytes: int | None) -> None:
    """How much of the weights that are read next waiting threads fetch; None: by the size of the last cache."""
    _library().pl_set_read_ahead(-1 if most_bytes is None else most_bytes)


def last_num_threads() -> int:
    """How many threads ran the last pass or part of one."""
    return int(_library().pl_last_threads())


def _library() -> ctypes.CDLL:
    native = library()
    declare(native, _SIGNATURES)
    return native
