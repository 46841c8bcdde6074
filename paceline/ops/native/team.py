"""How the native threads behave between two calls, for measuring. `src/pool.h` has the other side.

>>> from paceline.ops.native.team import set_waiting
>>> set_waiting("spin")
"""

import ctypes
from ctypes import c_int32

from paceline.errors import InvalidOptionError
from paceline.ops.native.library import Signatures, declare, library

WAITING = ("auto", "spin", "sleep")  # `PlWaiting` of src/pool.h

_SIGNATURES: Signatures = {
    "pl_set_waiting": (None, [c_int32]),
    "pl_last_threads": (c_int32, []),
}


def set_waiting(how: str) -> None:
    """auto: spin, and leave threads out where other programs take their time and fewer are faster; spin: all threads,
    always; sleep: all threads, which give up their processor as soon as they have nothing to do."""
    if how not in WAITING:
        raise InvalidOptionError(f"threads cannot wait by {how!r}; choose from {', '.join(WAITING)}")
    _library().pl_set_waiting(WAITING.index(how))


def last_num_threads() -> int:
    """How many threads ran the last pass or part of one."""
    return int(_library().pl_last_threads())


def _library() -> ctypes.CDLL:
    native = library()
    declare(native, _SIGNATURES)
    return native
