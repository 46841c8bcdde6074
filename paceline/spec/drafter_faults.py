"""What becomes of a drafting method that raises: its drafts are left out, and after some failures in a row it is off.

A draft never decides what the output is, so a failing drafter costs speed and nothing else.
"""

import logging
from typing import Any

logger = logging.getLogger("paceline")

# A choice. Half of it switches off a drafter that fails on one request; at twice of it a broken one costs time longer.
MOST_FAILED_STEPS = 8


class DrafterFaults:
    def __init__(self) -> None:
        self.off: set[str] = set()  # methods that are not asked any more, for the rest of the process
        self.counts: dict[str, int] = {}  # method -> times that it raised
        self._failed_steps: dict[str, int] = {}  # method -> steps in a row in which it raised
        self._failed_now: set[str] = set()  # in this step

    def note(self, method: str, error: BaseException) -> None:
        """Count and log what a method raised, which goes no further, unless the process is told to stop."""
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise error
        if method not in self.counts:
            logger.error("drafting method %r raised; requests go on without its draft", method, exc_info=error)
        self.counts[method] = self.counts.get(method, 0) + 1
        if method in self._failed_now:
            return
        self._failed_now.add(method)
        self._failed_steps[method] = self._failed_steps.get(method, 0) + 1
        if self._failed_steps[method] >= MOST_FAILED_STEPS:
            self.off.add(method)
            logger.error(
                "drafting method %r is switched off: it raised in %d steps in a row, the last time %r",
                method,
                MOST_FAILED_STEPS,
                error,
            )

    def add_to(self, figures: dict[str, dict[str, Any]]) -> None:
        """What is said of methods that raised at all, beside their other figures."""
        for method, count in list(self.counts.items()):  # a list: the engine's thread may add one meanwhile
            figures.setdefault(method, {}).update(num_failures=count, is_off=method in self.off)

    def end_step(self) -> None:
        if self._failed_steps:  # nearly never
            self._failed_steps = {name: count for name, count in self._failed_steps.items() if name in self._failed_now}
            self._failed_now = set()
