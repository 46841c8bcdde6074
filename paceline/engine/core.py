"""The engine: one loop in which prefill, decoding and verification are the same step.

    schedule -> execute -> verify -> commit -> propose

`EngineCore` is synchronous and single-threaded. `LLM` and `AsyncLLM` drive it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.forward import Decoder
from paceline.core.outputs import RequestMetrics, VerifyResult
from paceline.core.request import Request, RequestStatus
from paceline.core.tree import DraftTree
from paceline.engine.detokenizer import Detokenizer, TextDecoder
from paceline.engine.metrics import RequestTracker, StepClock
from paceline.engine.runner import ModelRunner, PassOutput
from paceline.engine.scheduler import ScheduledRequest, Scheduler, SchedulerConfig, SchedulerOutput
from paceline.kv.manager import KVCacheManager
from paceline.kv.storage import move_slots
from paceline.ops.sampling import token_logprobs
from paceline.spec.proposer import Needs, RequestPass, StepContext
from paceline.spec.speculator import Speculator
from paceline.verify.verifier import Verifier


@dataclass(slots=True)
class RequestState:
    """A request and what the engine keeps beside it until its last output is read."""

    request: Request
    detokenizer: Detokenizer
    tracker: RequestTracker
    metrics: RequestMetrics | None = None  # set when the request is finished


class EngineCore:
    def __init__(
        self,
        model: Decoder,
        text_decoder: TextDecoder,
        kv_cache: Tensor,  # [layers, 2, slots, kv heads, head dim]
        block_size: int,
        scheduler_config: SchedulerConfig,
        speculator: Speculator,
        verifier: Verifier,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.kv = KVCacheManager(kv_cache.shape[2] // block_size, block_size, enable_prefix_caching)
        self.scheduler = Scheduler(scheduler_config, self.kv)
        self.runner = ModelRunner(model, kv_cache, block_size)
        self.speculator = speculator
        self.verifier = verifier
        self.clock = StepClock()
        self.observers: list[Callable[[StepContext], None]] = []  # told after every step, in the engine's thread
        self._text_decoder = text_decoder
        self._states: dict[str, RequestState] = {}
        self._gone: list[Request] = []  # finished, aborted or preempted since the proposers were last told

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    def add_request(self, request: Request) -> RequestState:
        params = request.sampling_params
        detokenizer = Detokenizer(
            self._text_decoder,
            request.prompt_token_ids,
            params.stop_strings,
            params.include_stop_str_in_output,
            params.skip_special_tokens,
            params.min_tokens,
        )
        state = RequestState(request, detokenizer, RequestTracker())
        self._states[request.request_id] = state
        self.scheduler.add(request)
        return state

    def abort(self, request_id: str) -> RequestState | None:
        """End a request now; its blocks are free when this returns."""
        state = self._states.get(request_id)
        if state is not None:
            state.request.finish_reason = "abort"
            self._finish(state)
        return state

    def step(self) -> list[RequestState]:
        """One target pass. Returns the requests that got tokens or ended."""
        with self.clock.phase("schedule"):
            needs = self.speculator.needs
            plan = self.scheduler.schedule(needs.lookahead_slots)
            self._note_scheduled(plan)
        if not plan.scheduled:
            return []
        begin_s = self.clock.now()
        with self.clock.phase("execute"):
            output = self.runner.execute(plan.scheduled, needs.hidden_layers)
        with self.clock.phase("verify"):
            results = self._verify(plan.scheduled, output)
        self.scheduler.note_pass(plan.num_rows, self.clock.now() - begin_s)
        with self.clock.phase("commit"):
            passes, updated = self._commit(plan.scheduled, output, results)
        with self.clock.phase("propose"):
            self._propose(passes, output, needs)
        self.clock.num_steps += 1
        return updated

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        assert len(self._states) == len(self.scheduler.running) + len(self.scheduler.waiting)

    def _note_scheduled(self, plan: SchedulerOutput) -> None:
        self._gone.extend(plan.preempted)
        for entry in plan.scheduled:
            tracker = self._states[entry.request.request_id].tracker
            if tracker.first_scheduled_s is None:
                tracker.first_scheduled_s = self.clock.now()

    def _verify(self, scheduled: Sequence[ScheduledRequest], output: PassOutput) -> list[VerifyResult | None]:
        """One result per scheduled request; None where its last token was not in the pass yet."""
        ready: list[ScheduledRequest] = []
        rows: list[range] = []
        for entry, logits_rows in zip(scheduled, output.logits_rows, strict=True):
            num_verified = 1 + len(entry.draft) if entry.reaches_end else 0
            if len(logits_rows) > num_verified:
                self._record_prompt_logprobs(entry, output.logits[logits_rows.start : logits_rows.stop])
            if entry.reaches_end:
                ready.append(entry)
                rows.append(range(logits_rows.stop - num_verified, logits_rows.stop))
        if not ready:
            return [None] * len(scheduled)
        if sum(len(r) for r in rows) == output.logits.shape[0]:
            logits = output.logits
        else:
            logits = torch.cat([output.logits[r.start : r.stop] for r in rows])
        results = iter(self.verifier.verify([e.request for e in ready], [e.draft for e in ready], logits))
        return [next(results) if entry.reaches_end else None for entry in scheduled]

    def _commit(
        self, scheduled: Sequence[ScheduledRequest], output: PassOutput, results: Sequence[VerifyResult | None]
    ) -> tuple[list[RequestPass], list[RequestState]]:
        """Accepted rows become contiguous KV, new tokens join their requests, the rest is given back."""
        passes: list[RequestPass] = []
        updated: list[RequestState] = []
        moves: list[tuple[int, int]] = []
        for i, (entry, result) in enumerate(zip(scheduled, results, strict=True)):
            request = entry.request
            first_row = output.first_rows[i]
            rows = RequestPass(request, range(first_row, first_row + entry.num_rows), entry.start, entry.num_committed)
            if output.hidden is not None:
                rows.block_ids = tuple(request.block_ids)  # now: a request that ends here gives its blocks back
            passes.append(rows)
            num_accepted = 0
            if result is not None:
                state = self._states[request.request_id]
                updated.append(state)
                num_accepted = len(result.accepted)
                moves += self.kv.moves(request, request.num_tokens, result.accepted)
                rows.draft, rows.accepted = entry.draft, result.accepted
                rows.logits_row = output.logits_rows[i].stop - 1 - len(entry.draft)
                rows.new_token_ids = self._append(state, result, entry.draft)
                state.tracker.record_step(entry.draft, result.accepted[: len(rows.new_token_ids)])
            if request.error is None:  # what a failed request computed is not for others to reuse
                self.scheduler.update(entry, num_accepted)
            if request.finish_reason is not None:
                self._finish(self._states[request.request_id])
        move_slots(self.runner.kv_cache, moves)
        return passes, updated

    def _append(self, state: RequestState, result: VerifyResult, draft: DraftTree) -> list[int]:
        """Add the new tokens one by one until something ends the request; return those that were added."""
        request = state.request
        if result.error is not None:
            request.finish_reason, request.error = "error", result.error
            return []
        params, stop_token_ids = request.sampling_params, request.stop_token_ids
        added = 0
        for token in result.token_ids:
            request.token_ids.append(token)
            added += 1
            is_stop_token = request.num_output_tokens > params.min_tokens and token in stop_token_ids
            hidden = is_stop_token and not params.include_stop_str_in_output
            stop_string = None if hidden else state.detokenizer.append(token)
            if is_stop_token:
                request.finish_reason = "stop"
                request.stop_reason = None if token in request.eos_token_ids else token
            elif stop_string is not None:
                request.finish_reason, request.stop_reason = "stop", stop_string
            elif request.num_output_tokens >= request.max_tokens:
                request.finish_reason = "length"
            if request.finish_reason is not None:
                break
        request.token_sources.extend(draft.sources(result.accepted)[:added])
        if request.logprobs is not None and result.logprobs is not None:
            request.logprobs.extend(result.logprobs[:added])
        return result.token_ids[:added]

    def _propose(self, passes: Sequence[RequestPass], output: PassOutput, needs: Needs) -> None:
        ready = [p.request for p in passes if p.logits_row >= 0 and p.request.status is RequestStatus.RUNNING]
        logits = output.logits if needs.logits else None
        uses = self.kv.pool.num_uses
        step = StepContext(ready, passes, self._gone, logits, output.hidden, output.hidden_layers, uses)
        self._gone = []
        self.speculator.observe(step)
        for observer in self.observers:
            observer(step)
        for request, draft in zip(ready, self.speculator.propose(step), strict=True):
            request.draft = draft

    def _finish(self, state: RequestState) -> None:
        request = state.request
        self.scheduler.finish(request)
        state.detokenizer.finish()
        state.metrics = state.tracker.metrics(request, lossy=not self.verifier.lossless)
        del self._states[request.request_id]
        self._gone.append(request)

    @staticmethod
    def _record_prompt_logprobs(entry: ScheduledRequest, logits: Tensor) -> None:
        """Row at position p says how likely prompt token p + 1 was; the first token has no row before it."""
        request = entry.request
        top = request.sampling_params.prompt_logprobs
        assert request.prompt_logprobs is not None and top is not None
        begin = entry.start + 1
        targets = request.prompt_token_ids[begin : begin + logits.shape[0]]
        known = len(request.prompt_logprobs)  # rows computed again after a preemption say nothing new
        new = token_logprobs(logits[: len(targets)], targets, top)
        request.prompt_logprobs.extend(new[known - begin :])
