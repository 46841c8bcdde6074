"""Threads and processes that the engine goes before, where all of them want the processors."""

import os
import sys
import threading

# On a processor that others want all of, Linux gives such a thread a quarter. A choice: at 0 it is a half, and a pass
# beside it takes twice as long; at 10 a tenth, and on a busy machine a large grammar compiles for seconds.
NICENESS = 5


def go_behind_others() -> None:
    """For the calling thread, from now on."""
    if sys.platform == "linux":  # elsewhere a thread has no niceness of its own
        thread = threading.get_native_id()
        if os.getpriority(os.PRIO_PROCESS, thread) < NICENESS:
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
