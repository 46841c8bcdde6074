"""Which requests run in the next pass, and with how many tokens.

There is no prefill phase and no decode phase: every request wants its `num_computed_tokens` to catch up with
`num_tokens_with_spec`. A prompt chunk, a decode step and a tree verification are all "some tokens to compute", taken
first come, first served from one token budget. When blocks run out, the newest request is preempted: its blocks are
given back and it is computed again later (its prefix may still be cached by then).

Rows of a prompt or a draft make the pass longer for every request in it. Where `max_token_delay_s` is set and other
requests are decoding, a pass takes only as many of these rows as that time allows, by what rows took so far. The
shortest prompts go first, so that a short prompt does not wait for a long one. The oldest always gets a share. Of a
call with many samples one is in every pass, and the others as far as there is time for them (many_samples.py).
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.request import Request, RequestStatus
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.engine.many_samples import note_waiting, samples_to_wait
from paceline.engine.row_cost import RowCost
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
        return self.start + self.num_committed == len(self.request.token_ids)

    @property
    def num_rows(self) -> int:
        return self.num_committed + len(self.draft.token_ids)


@dataclass(slots=True)
class SchedulerOutput:
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(entry.num_rows for entry in self.scheduled)


# Of the oldest prompt, whatever they take: it must make progress, and its context is read once for one row or four.
LEAST_ROWS = 4
OLDEST_SHARE = 0.25  # of the time for prompts, for the oldest one, whatever is shorter
SOLO_DELAYS = 8  # where no request decodes, a pass may be so many times as long: a new request waits for its end


def _missing(request: Request) -> int:
    """Tokens without KV. One is the last token of a request that decodes; more are a prompt, or what was preempted."""
    return request.num_tokens - request.num_computed_tokens


class Scheduler:
    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.row_cost = RowCost()
        self._num_decoding = 0  # requests that wait for their next token in this pass
        self._shares: dict[str, int] | None = None  # rows that each prompt may take in this pass; None: all it needs
        self._waiting_samples: set[str] = set()  # of those that decode: not in this pass
        self.num_lookahead_tokens = 0  # slots kept past the last token, for drafters that write KV while drafting

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self, num_lookahead_tokens: int = 0) -> SchedulerOutput:
        self.num_lookahead_tokens = num_lookahead_tokens
        prompts = [request for request in self.running if _missing(request) > 1]
        decoding = [request for request in self.running if _missing(request) <= 1]
        self._num_decoding = len(decoding)
        limit_s = self.config.max_token_delay_s
        if limit_s is not None:
            self._shares = self._share_rows(limit_s, prompts)
            self._waiting_samples = samples_to_wait(decoding, self.row_cost.at, limit_s)
            note_waiting(decoding, self._waiting_samples)
        output = SchedulerOutput()
        budget = self._schedule_running(output, self.config.max_num_batched_tokens)
        if not output.preempted:  # no waiting request may take the blocks that a preempted one has just given back
            self._schedule_waiting(output, budget)
        return output

    def go_on(self, scheduled: Sequence[ScheduledRequest]) -> tuple[list[ScheduledRequest], list[int]] | None:
        """While a pass runs that gives each running request its next token: the pass after it, with one row for each,
        and the indices of those that got a new block.

        The same as `schedule` would plan, for less time; None where there is more to plan than that."""
        if self.waiting or len(self.running) != len(scheduled):
            return None
        block_size, is_limited = self.kv.block_size, self.config.max_token_delay_s is not None
        following: list[ScheduledRequest] = []
        grown: list[int] = []
        for i, entry in enumerate(scheduled):
            request, start = entry.request, entry.start + 1
            if entry.num_committed != 1 or start != len(request.token_ids) or request.finished:
                return None
            if request.num_output_tokens + 1 >= request.max_tokens or (is_limited and request.sampling_params.n > 1):
                return None
            if start >= len(request.block_ids) * block_size:
                if not self.kv.reserve(request, start + 1):
                    return None
                grown.append(i)
            following.append(ScheduledRequest(request, start, 1))
        return following, grown

    def note_pass(self, scheduled: Sequence[ScheduledRequest], seconds: float) -> None:
        """How long a pass took, sampling included."""
        seconds -= sum(entry.request.sampling_s for entry in scheduled if entry.reaches_end)
        num_context = sum(entry.num_rows * (entry.start + entry.num_rows // 2) for entry in scheduled)
        self.row_cost.learn(sum(entry.num_rows for entry in scheduled), num_context, seconds)

    def _rows_within(self, seconds: float, request: Request, most: int) -> int:
        """How many more rows of a request take no longer than `seconds`."""
        return self.row_cost.rows_within(seconds, request.num_computed_tokens, most)

    def _share_rows(self, limit_s: float, running: list[Request]) -> dict[str, int]:
        """How many rows of this pass each prompt may take, by request id: those that run, and those that wait."""
        prompts = [*running, *self._next_in_line()]
        if not prompts:
            return {}
        left_s = limit_s * (1 if self._num_decoding else SOLO_DELAYS)
        left_rows = self.config.max_num_batched_tokens - self._num_decoding
        oldest = prompts[0]
        least, most = min(_missing(oldest), LEAST_ROWS), min(_missing(oldest), int(left_rows * OLDEST_SHARE))
        oldest_s = left_s * OLDEST_SHARE
        shares = {oldest.request_id: max(least, self._rows_within(oldest_s, oldest, most))}
        # Its least rows may take longer than its share: the rest is not taken from the others, which would get nothing.
        left_s -= min(oldest_s, shares[oldest.request_id] * self.row_cost.at(oldest.num_computed_tokens))
        left_rows -= shares[oldest.request_id]
        for request in sorted(prompts, key=_missing):  # among equals, the older one
            known = shares.get(request.request_id, 0)
            more = self._rows_within(max(0.0, left_s), request, min(_missing(request) - known, max(0, left_rows)))
            if more:
                shares[request.request_id] = known + more
                left_s -= more * self.row_cost.at(request.num_computed_tokens)
                left_rows -= more
        return shares

    def _next_in_line(self) -> list[Request]:
        """Waiting requests that may run now. Calls with many samples leave half of the seats to others, and the first
        sample of a call goes ahead: then its prompt is cached for the rest, and it is known what sampling takes."""
        num_seats = self.config.max_num_seqs - len(self.running)
        if num_seats <= 0 or not self.waiting:
            return []
        seats = Counter(request.call_id for request in self.running if request.call_id)
        begun = {request.call_id for request in self.running if request.num_output_tokens}
        calls = {request.call_id for request in (*self.running, *self.waiting)}
        most_extra = self.config.max_num_seqs // 2 - 1 if len(calls) > 1 else self.config.max_num_seqs
        num_extra = sum(seats.values()) - len(seats)  # samples beside the first of their call
        chosen: list[Request] = []
        for request in self.waiting:
            if len(chosen) == num_seats:
                break
            call = request.call_id
            if seats[call] and call:
                if num_extra >= most_extra or (request.sampling_params.n > 1 and call not in begun):
                    continue
                num_extra += 1
            seats[call] += 1
            chosen.append(request)
        return chosen

    def _share(self, request: Request) -> int:
        """How many committed tokens of a request this pass may take."""
        if self._shares is None or _missing(request) <= 1:
            return self.config.max_num_batched_tokens
        return self._shares.get(request.request_id, 0)

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
        num_tokens = len(request.token_ids)
        request.num_computed_tokens = min(num_computed, num_tokens)  # it may have ended inside the path
        request.draft = EMPTY_TREE
        self.kv.register_prefix(request)
        self.kv.trim(request, num_tokens + self.num_lookahead_tokens)

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            if self._share(request) == 0 or request.request_id in self._waiting_samples or request.has_all_tokens:
                index += 1
                continue
            owed = len(self.running) - index - 1  # one row for each request behind this one, before any draft
            entry = self._entry(request, budget, owed)
            while not self._reserve(entry):
                victim = self.running[-1]
                self._preempt(victim, output)
                if victim is request:
                    return budget
            output.scheduled.append(entry)
            budget -= entry.num_rows
            index += 1
        return budget

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        for request in list(self.waiting):
            if self._share(request) == 0:
                continue
            if budget <= 0 or len(self.running) >= self.config.max_num_seqs:
                return
            request.num_computed_tokens = self.kv.reuse_prefix(request)
            entry = self._entry(request, budget, owed=0)
            if not self._reserve(entry):
                self.kv.release(request)
                request.num_computed_tokens = 0
                return
            self.waiting.remove(request)
            if request.num_preemptions == 0:
                request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            output.scheduled.append(entry)
            budget -= entry.num_rows

    def _entry(self, request: Request, budget: int, owed: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        num_committed = min(_missing(request), budget, self._share(request))
        entry = ScheduledRequest(request, start, num_committed)
        if entry.reaches_end and request.draft:
            room = max(0, budget - owed - num_committed)
            if self.config.max_token_delay_s is not None and self._num_decoding > 1:
                limit_s = self.config.max_token_delay_s / request.sampling_params.n  # its call's, for all samples
                room = self._rows_within(limit_s, request, room)
            entry.draft = request.draft.cut(room, request.max_draft_depth)
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
        self.kv.keep_released()
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
