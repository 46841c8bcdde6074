"""What an EAGLE proposer has to do with rounds on the device: which requests are in them, and how large they are.

The device takes in by itself what requests in rounds bring. Where their pairs lie is noted once, when they leave.
"""

import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

from paceline.models.padded_decoder import PaddedDecoder
from paceline.spec.feature.captured_drafts import CapturedDrafts
from paceline.spec.feature.device_rounds import EagleRounds, WantedOf
from paceline.spec.feature.feature_queue import FeatureQueue
from paceline.spec.feature.round_sizes import OPTIONS, RoundSizes
from paceline.spec.proposer import Budget, StepContext

logger = logging.getLogger("paceline")


class FollowedRounds:
    def __init__(
        self,
        drafts: CapturedDrafts,
        target: PaddedDecoder,
        hidden_layers: Sequence[int],
        wanted_of: WantedOf,
        queue: FeatureQueue,
        largest: Budget,
        *,
        size_by_price: bool,
    ) -> None:
        self.rounds = EagleRounds(drafts, target, hidden_layers, wanted_of)
        self._drafts, self._queue = drafts, queue
        self._largest, self._by_price = largest, size_by_price
        self._load = 1  # requests that ran or waited after the newest pass
        self._first: dict[str, int] = {}  # request id -> position of its first pair that is not noted yet
        self._noted_s: float | None = None  # when the last round was noted, if it followed another one

    @property
    def _sizes(self) -> RoundSizes | None:
        return self.rounds.sizes

    @property
    def is_resting(self) -> bool:
        """Plain decoding is faster now."""
        return self._sizes is not None and self._sizes.choose(self._load) is None

    def prepare(self) -> None:
        begin_s = time.perf_counter()
        if self._by_price:
            self.rounds.prepare_by_price([option for option in OPTIONS if option.nodes <= self._largest.num_nodes])
        else:
            self.rounds.prepare([self._largest])
        logger.info("rounds of drafts and passes are ready, after %.1f s", time.perf_counter() - begin_s)

    def rest(self) -> None:
        if self._sizes is not None:
            self._sizes.rest()

    def observe(self, step: StepContext) -> None:
        """After every pass of which the proposer is told."""
        self._load = max(1, step.load)
        if step.drafted is not None:
            self._follow(step, step.drafted)
            return
        self._noted_s = None
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
        now, before = time.perf_counter(), self._noted_s
        self._noted_s = now
        sizes, count = self._sizes, len(step.passes)
        option = None if sizes is None else sizes.choose(count)
        if sizes is not None and option is not None:
            num_tokens = sum(len(seen.new_token_ids) for seen in step.passes)
            sizes.learn(option, count, num_tokens, None if before is None else now - before)

    def forget(self, name: str) -> None:
        self._first.pop(name, None)

    def within_size(self, budgets: Sequence[Budget]) -> Sequence[Budget]:
        """By price: the first drafts of requests that go on in rounds are as large as those of the rounds."""
        option = None if self._sizes is None else self._sizes.choose(len(budgets))
        if option is None:
            return budgets
        nodes, depth = option.budget[:2]
        return [
            budget._replace(num_nodes=min(budget.num_nodes, nodes), max_depth=min(budget.max_depth, depth))
            for budget in budgets
        ]

    def report(self) -> dict[str, Any]:
        sizes = self._sizes
        if sizes is None:
            return {}
        chosen = sizes.choose(self._load)
        return {
            "num_requests": self._load,
            "nodes": 0 if chosen is None else chosen.nodes,
            "level": sizes.level,
            "expected_tokens_per_s": sizes.speeds(self._load),
        }
