"""What an EAGLE proposer has to do with rounds on the device, beside their size: which requests are in them.

The device takes in by itself what requests in rounds bring. Where their pairs lie is noted once, when they leave.
"""

from collections.abc import Collection

from paceline.spec.feature.captured_drafts import CapturedDrafts
from paceline.spec.feature.feature_queue import FeatureQueue
from paceline.spec.proposer import StepContext


class FollowedRounds:
    def __init__(self, drafts: CapturedDrafts, queue: FeatureQueue) -> None:
        self._drafts, self._queue = drafts, queue
        self._first: dict[str, int] = {}  # request id -> position of its first pair that is not noted yet

    def observe(self, step: StepContext) -> None:
        """After every pass of which the proposer is told."""
        if step.drafted is not None:
            self._follow(step, step.drafted)
            return
        for seen in step.passes if self._first else ():
            first = self._first.pop(seen.request.request_id, None)
            if first is not None:  # what this pass brought was not taken in yet; all that came before it was
                self._queue.note(seen, first, seen.start, step)
                self._drafts.follow(seen.request, first, seen.start)

    def _follow(self, step: StepContext, drafted: Collection[str]) -> None:
        for seen in step.passes:
            request = seen.request
            first = self._first.setdefault(request.request_id, seen.start)
            if request.finished:
                taken_in = 1 + len(seen.accepted) if request.request_id in drafted else 0
                self._queue.note(seen, first, min(seen.start + taken_in, request.num_tokens - 1), step)

    def forget(self, name: str) -> None:
        self._first.pop(name, None)
