"""C++ kernels for the CPU: whole-model passes over packed weights, behind a plain C interface.

>>> from paceline.ops import native
>>> native.available() or print(native.unavailable_reason())
"""

from collections.abc import Sequence
from ctypes import addressof, c_int64

import torch
from torch import Tensor

from paceline.core.kv_tensor import SCALE_BYTES
from paceline.core.processors import usable_processors
from paceline.errors import InvalidOptionError, InvalidRequestError
from paceline.ops.native.library import INSTRUCTION_SETS, STATUS, library, load, select

__all__ = [
    "INSTRUCTION_SETS",
    "argmax",
    "available",
    "default_num_threads",
    "instruction_set",
    "measure_bandwidth",
    "move_slots",
    "select_instruction_set",
    "unavailable_reason",
    "usable_instruction_sets",
]


def available() -> bool:
    return load()[0] is not None


def unavailable_reason() -> str | None:
    """One line for the user, or None where the kernels are there."""
    return load()[1]


def default_num_threads() -> int:
    """One for each processor."""
    return usable_processors()


def instruction_set() -> str:
    """Whose kernels run: the best that this machine has, unless PACELINE_INSTRUCTION_SET or a call chose another."""
    return str(library().pl_instruction_set().decode())


def select_instruction_set(name: str) -> None:
    """Use another set's kernels from now on, for tests and comparisons. Bits may differ between sets."""
    select(library(), name)


def usable_instruction_sets() -> tuple[str, ...]:
    """Those that this machine and this build have, the best first; none without the kernels."""
    if not available():
        return ()
    current, usable = instruction_set(), []
    for name in INSTRUCTION_SETS:
        try:
            select_instruction_set(name)
            usable.append(name)
        except InvalidOptionError:
            continue
    select_instruction_set(current)
    return tuple(usable)


def measure_bandwidth(num_threads: int | None = None, *, num_bytes: int = 1 << 29, repeats: int = 5) -> float:
    """Bytes per second that `num_threads` read from memory together, the best of `repeats`."""
    return float(library().pl_measure_bandwidth(num_bytes, num_threads or default_num_threads(), repeats))


def move_slots(kv_cache: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copy int16 keys and values (in tiles, src/kernels.h) of all layers from slot to slot, as if all at once."""
    layers, _, num_slots, heads, elements = kv_cache.shape
    sources, targets = [(c_int64 * len(moves))(*slots) for slots in zip(*moves, strict=True)]
    status = library().pl_move_slots(
        kv_cache.data_ptr(),
        layers,
        num_slots,
        heads,
        elements - SCALE_BYTES // kv_cache.element_size(),
        len(moves),
        addressof(sources),
        addressof(targets),
    )
    if status:
        raise InvalidRequestError(f"keys and values were not moved: {STATUS[status]}")


def argmax(logits: Tensor, *, num_threads: int | None = None) -> Tensor:
    """The first largest of each row. logits: [rows, vocab] float32 -> [rows] int32"""
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise InvalidOptionError(
            f"argmax takes [rows, vocab] float32 with contiguous rows; given {list(logits.shape)} {logits.dtype}"
        )
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int32)
    threads = num_threads or default_num_threads()
    library().pl_argmax(logits.data_ptr(), rows, vocab, logits.stride(0), threads, out.data_ptr())
    return out
