"""What a proposer has to do with its rounds on the device, whoever it is: how large they are, and whether they pay.

    sized = SizedRounds("ngram", draft, target, largest, size_by_price=True)
    sized.prepare()        # once
    sized.observe(step)    # after every pass of which the proposer is told
    sized.is_resting       # plain decoding is faster now

`RoundsProposer` does so for its proposer.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

from paceline.models.padded_decoder import PaddedDecoder
from paceline.spec.buckets import largest_bucket
from paceline.spec.captured_rounds import CapturedRounds
from paceline.spec.engine_parts import EngineParts
from paceline.spec.proposer import Budget, Proposer, StepContext
from paceline.spec.round_draft import RoundDraft, RoundRoom
from paceline.spec.round_sizes import OPTIONS, RoundSizes

logger = logging.getLogger("paceline")


class SizedRounds:
    def __init__(
        self, method: str, draft: RoundDraft, target: PaddedDecoder, largest: Budget, *, size_by_price: bool
    ) -> None:
        self.rounds = CapturedRounds(draft, target)
        self._method, self._largest, self._by_price = method, largest, size_by_price
        self._load = 1  # requests that ran or waited after the newest pass
        self._noted_s: float | None = None  # when the last round was noted, if it followed another one
        self._rested_s: float | None = None  # when the last plain step was, if no round came after it

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
            options = [option for option in OPTIONS[self._method] if option.nodes <= self._largest.num_nodes]
            self.rounds.prepare_by_price(options)
        else:
            self.rounds.prepare([self._largest])
        logger.info("rounds of drafts and passes are ready, after %.1f s", time.perf_counter() - begin_s)

    def rest(self) -> None:
        now, before = time.perf_counter(), self._rested_s
        self._rested_s = now
        if self._sizes is not None:
            self._sizes.rest(self._load, None if before is None else now - before)

    def observe(self, step: StepContext) -> None:
        """After every pass of which the proposer is told."""
        self._load = max(1, step.load)
        size = self.rounds.current_size
        if step.drafted is None or size is None:
            self._noted_s = None
            return
        self._load = size.count_for(self._load)
        now, before = time.perf_counter(), self._noted_s
        self._noted_s, self._rested_s = now, None
        sizes = self._sizes
        option = None if sizes is None else sizes.option_of(size.budget)
        if sizes is not None and option is not None:
            num_tokens = sum(len(seen.new_token_ids) for seen in step.passes)
            seconds = None if before is None else now - before
            sizes.learn(option, len(step.passes), num_tokens, seconds, captured=size.num_requests)

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


def round_room(services: EngineParts, largest: Budget) -> RoundRoom:
    return RoundRoom(largest_bucket(services.max_num_seqs), largest.num_nodes, largest.max_depth)


class RoundsProposer(Proposer):
    """A proposer that drafts in rounds where it has them; elsewhere, and between rounds, as it always does."""

    _rounds: SizedRounds | None = None

    def rounds(self) -> CapturedRounds | None:
        return None if self._rounds is None else self._rounds.rounds

    def prepare(self) -> None:
        if self._rounds is not None:
            self._rounds.prepare()

    def skips_next_step(self) -> bool:
        return self._rounds is not None and self._rounds.is_resting

    def skip_step(self) -> None:
        if self._rounds is not None:
            self._rounds.rest()

    def report(self) -> dict[str, Any]:
        return {} if self._rounds is None else self._rounds.report()

    def observe(self, step: StepContext) -> None:
        if self._rounds is not None:
            self._rounds.observe(step)

    def _within_size(self, budgets: Sequence[Budget]) -> Sequence[Budget]:
        return budgets if self._rounds is None else self._rounds.within_size(budgets)
