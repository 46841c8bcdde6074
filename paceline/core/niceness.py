"""Threads and processes that the engine goes before, where all of them want the processors."""

import os
import sys
import threading

# Linux gives such a thread about a tenth of what it gives others. A choice: at 5 it is a quarter, and passes take as much
# longer; at 15 a twenty-fifth, and on a busy machine a large grammar compiles for seconds.
NICENESS = 10


def go_behind_others() -> None:
    """For the calling thread, from now on."""
    if sys.platform == "linux":  # elsewhere a thread has no niceness of its own
        thread = threading.get_native_id()
        if os.getpriority(os.PRIO_PROCESS, thread) < NICENESS:
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
