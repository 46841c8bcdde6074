"""A processor that something else in the process needs for a moment, and the native kernels leave to it.

The kernels have a thread on every processor, and their threads wait for each other some hundred times in a pass. Where
other work takes the processor of one, it keeps it at least until the scheduler's next tick (4 ms on most Linuxes),
longer than a pass of a small model, and the others wait that long. Work that goes on for many steps therefore borrows a
processor: meanwhile passes run on one thread less. They take longer, but all of them alike, and never twice as long.

    with borrowed_processor():
        compile_something()

PyTorch's threads do the same for some milliseconds after each operation that used them: they spin until the next one.
What a step leaves to PyTorch beside native kernels (a copy of some rows of logits) is therefore done by one thread:

    with_one_torch_thread(step)
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

_lock = threading.Lock()
_num_borrowers = 0  # of one processor, which they share


@contextmanager
def borrowed_processor() -> Iterator[None]:
    global _num_borrowers
    with _lock:
        _num_borrowers += 1
    try:
        yield
    finally:
        with _lock:
            _num_borrowers -= 1


def threads_left(num_threads: int) -> int:
    """How many of these threads the next pass runs on: one less, where a processor is lent and none is free."""
    if _num_borrowers == 0 or num_threads < usable_processors():
        return num_threads
    return max(1, num_threads - 1)


def with_one_torch_thread(call: Callable[[], T]) -> T:
    """PyTorch's operations in there run on the caller's thread alone. Other threads keep the number they have; one that
    uses PyTorch for the first time meanwhile begins with one, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


def usable_processors() -> int:
    """As many as this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
