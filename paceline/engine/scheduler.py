"""Who runs in the next pass, and with how many tokens.

There is no prefill phase and no decode phase: every request wants its `num_computed_tokens` to catch up with
`num_tokens_with_spec`. A prompt chunk, a decode step and a tree verification are all "some tokens to compute", taken
first come, first served from one token budget. When blocks run out, the newest request is preempted: its blocks are
given back and it is computed again later (its prefix may still be cached by then).

Rows of a prompt or a draft make the pass longer for everybody in it. Where `max_token_delay_s` is set and others are
decoding, a pass takes only as many of them as that time allows, by the time that rows took so far.
"""

from collections import deque
from dataclasses import dataclass, field

from paceline.core.request import Request, RequestStatus
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.kv.manager import KVCacheManager


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_token_delay_s: float | None = None  # None: passes may be as long as `max_num_batched_tokens` makes them


@dataclass(slots=True)
class ScheduledRequest:
    """Rows of one request: tokens [start, start + num_committed), then the draft's nodes."""

    request: Request
    start: int
    num_committed: int
    draft: DraftTree = EMPTY_TREE

    @property
    def reaches_end(self) -> bool:
        """The last token is among the rows, so that the pass says what comes next."""
        return self.start + self.num_committed == self.request.num_tokens

    @property
    def num_rows(self) -> int:
        return self.num_committed + len(self.draft)


@dataclass(slots=True)
class SchedulerOutput:
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(entry.num_rows for entry in self.scheduled)


LEAST_ROWS = 16  # of prompts, whatever they take: a prompt must get on; about what a pass of one row costs anyway
ROW_TIME_WEIGHT = 0.5  # of the newest pass: rows of a long context take longer, so what was just measured counts most


class Scheduler:
    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.row_s: float | None = None  # a row's share of a pass, as measured
        self._num_decoding = 0  # requests that wait for their next token in this pass
        self._prompt_rows = 0  # that this pass may still take
        self.num_lookahead_tokens = 0  # slots kept past the last token, for drafters that write KV while drafting

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self, num_lookahead_tokens: int = 0) -> SchedulerOutput:
        self.num_lookahead_tokens = num_lookahead_tokens
        self._num_decoding = sum(request.num_tokens - request.num_computed_tokens <= 1 for request in self.running)
        self._prompt_rows = self._rows_in_time() if self._num_decoding else self.config.max_num_batched_tokens
        output = SchedulerOutput()
        budget = self._schedule_running(output, self.config.max_num_batched_tokens)
        if not output.preempted:  # whoever was just preempted must not be overtaken into the room it made
            self._schedule_waiting(output, budget)
        return output

    def note_pass(self, num_rows: int, seconds: float) -> None:
        """How long a pass took; small ones say little about a row's share."""
        if self.row_s is None:
            self.row_s = seconds / num_rows
        elif num_rows >= LEAST_ROWS:
            self.row_s += ROW_TIME_WEIGHT * (seconds / num_rows - self.row_s)

    def _rows_in_time(self) -> int:
        """How many rows beyond one for each decoding request a pass may take."""
        limit_s, everything = self.config.max_token_delay_s, self.config.max_num_batched_tokens
        if limit_s is None or self.row_s is None:
            return everything
        return min(everything, max(LEAST_ROWS, int(limit_s / self.row_s)))

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and give its blocks back."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.draft = EMPTY_TREE
        self.kv.release(request)

    def update(self, entry: ScheduledRequest, num_accepted: int) -> None:
        """After the pass: `num_accepted` nodes of the draft are now tokens with KV; the other slots go back."""
        request = entry.request
        num_computed = entry.start + entry.num_committed + num_accepted
        request.num_computed_tokens = min(num_computed, request.num_tokens)  # it may have ended inside the path
        request.draft = EMPTY_TREE
        self.kv.register_prefix(request)
        self.kv.trim(request, request.num_tokens + self.num_lookahead_tokens)

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            if self._is_prompt(request) and self._prompt_rows <= 0:
                index += 1
                continue
            owed = len(self.running) - index - 1  # one row for each request behind this one, before any draft
            entry = self._entry(request, budget, owed)
            while not self._reserve(entry):
                victim = self.running[-1]
                self._preempt(victim, output)
                if victim is request:
                    return budget
            self._schedule_entry(output, entry)
            budget -= entry.num_rows
            index += 1
        return budget

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        while self.waiting and budget > 0 and self._prompt_rows > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            request.num_computed_tokens = self.kv.reuse_prefix(request)
            entry = self._entry(request, budget, owed=0)
            if not self._reserve(entry):
                self.kv.release(request)
                request.num_computed_tokens = 0
                return
            self.waiting.popleft()
            if request.num_preemptions == 0:
                request.num_cached_tokens = request.num_computed_tokens
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            self._schedule_entry(output, entry)
            budget -= entry.num_rows

    @staticmethod
    def _is_prompt(request: Request) -> bool:
        """More than its last token has no KV yet."""
        return request.num_tokens - request.num_computed_tokens > 1

    def _schedule_entry(self, output: SchedulerOutput, entry: ScheduledRequest) -> None:
        output.scheduled.append(entry)
        if entry.num_committed > 1:
            self._prompt_rows -= entry.num_committed

    def _entry(self, request: Request, budget: int, owed: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        missing = request.num_tokens - start
        num_committed = min(missing, budget) if missing <= 1 else min(missing, budget, self._prompt_rows)
        entry = ScheduledRequest(request, start, num_committed)
        if entry.reaches_end and request.draft:
            room = max(0, budget - owed - num_committed)
            if self._num_decoding > 1:
                room = min(room, self._rows_in_time())
            entry.draft = request.draft.up_to_depth(request.max_draft_depth).first(room)
        return entry

    def _reserve(self, entry: ScheduledRequest) -> bool:
        """Slots for the rows and the next draft; where blocks are short, the next draft goes first, then this one."""
        request = entry.request
        needed = entry.start + entry.num_committed
        with_draft = request.num_tokens + len(entry.draft)
        # the accepted path and one more token, then the next draft's slots behind them
        with_lookahead = with_draft + 1 + self.num_lookahead_tokens
        if entry.reaches_end and self.num_lookahead_tokens and self.kv.reserve(request, with_lookahead):
            return True
        if entry.draft and self.kv.reserve(request, with_draft):
            return True
        entry.draft = EMPTY_TREE
        return self.kv.reserve(request, needed)

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        self.running.remove(request)
        self.kv.release(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.draft = EMPTY_TREE
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        output.preempted.append(request)

    def check_integrity(self) -> None:
        """Assert that no block is lost, shared by mistake or freed twice, and every request stands in one place."""
        assert all(request.status is RequestStatus.RUNNING for request in self.running)
        assert all(request.status is RequestStatus.WAITING and not request.block_ids for request in self.waiting)
        assert len({id(request) for request in [*self.running, *self.waiting]}) == len(self.running) + len(self.waiting)
        self.kv.check_integrity(self.running)
