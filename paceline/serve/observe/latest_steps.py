"""What the server remembers of the engine's steps: the latest trees, the time saved, and what became of predictions.

It is called in the engine's thread after every pass and read from the event loop. Single assignments and appends are
all that is shared, so there is no lock: at worst a reader sees the state of a moment ago.
"""

from collections import deque
from dataclasses import dataclass

from paceline.core.draft_counts import DraftCounts
from paceline.core.step_record import PassRecord, StepRecord
from paceline.serve.observe.saving import Savings

NUM_RECENT_TREES = 8


@dataclass(slots=True)
class TimeSaved:
    seconds: float = 0.0  # may be negative: then speculation lost time


class LatestSteps:
    def __init__(self) -> None:
        self.recent_trees: deque[PassRecord] = deque(maxlen=NUM_RECENT_TREES)  # newest last
        self.saved: dict[str, TimeSaved] = {}  # by method
        self._followed: dict[str, DraftCounts] = {}
        self._savings = Savings()

    def follow(self, request_id: str) -> DraftCounts:
        """Count for this sequence from now until `forget`."""
        counts = self._followed[request_id] = DraftCounts()
        return counts

    def forget(self, request_id: str) -> None:
        self._followed.pop(request_id, None)

    def observe(self, step: StepRecord) -> None:
        for record in step.passes:
            if len(record.draft):
                self.recent_trees.append(record)
            counts = self._followed.get(record.request_id)
            if counts is not None:
                counts.add(record.counts)
        for method, seconds in self._savings.of_step(step).items():
            self.saved.setdefault(method, TimeSaved()).seconds += seconds
