"""The end of a worker's parent, seen as the end of its standard input: so no worker outlives who started it."""

import os
import sys
import threading
from collections.abc import Callable


class Parent:
    """Watched from the first moment on: a model takes seconds to load, and nobody may want it by then."""

    def __init__(self) -> None:
        self._when_gone: Callable[[], object] = lambda: os._exit(0)  # there is nothing to tidy up yet
        self._lock = threading.Lock()
        self._is_gone = False
        threading.Thread(target=self._watch, name="paceline-parent", daemon=True).start()

    def when_gone(self, callback: Callable[[], object]) -> None:
        """From now on this is called, in another thread; at once where it is gone already."""
        with self._lock:
            self._when_gone = callback
            if not self._is_gone:
                return
        callback()

    def _watch(self) -> None:
        sys.stdin.read()
        with self._lock:
            self._is_gone = True
            callback = self._when_gone
        callback()
