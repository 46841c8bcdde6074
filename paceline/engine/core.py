"""The engine: one loop in which prefill, decoding and verification are the same step.

    schedule -> execute -> verify -> commit -> propose

`EngineCore` is synchronous and single-threaded. `LLM` and `AsyncLLM` drive it.

What fails for one request ends that request (`request.error`) and no other; what fails in a drafter or an observer ends
no request. Only the target's pass, and memory that runs out, may end a step with an exception.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.faults import request_error
from paceline.core.forward import Decoder
from paceline.core.outputs import RequestMetrics, VerifyResult
from paceline.core.request import Request, RequestStatus
from paceline.core.stop_strings import StopStrings
from paceline.core.tokenizer import Tokenizer
from paceline.core.tree import DraftTree
from paceline.engine.detokenizer import Detokenizer
from paceline.engine.metrics import RequestTracker, StepClock
from paceline.engine.runner import ModelRunner, PassOutput
from paceline.engine.scheduler import ScheduledRequest, Scheduler, SchedulerConfig, SchedulerOutput
from paceline.engine.verify_apart import record_prompt_logprobs, verify_apart
from paceline.errors import InvalidRequestError
from paceline.kv.manager import KVCacheManager
from paceline.kv.storage import move_slots
from paceline.spec.proposer import Needs, RequestPass, StepContext
from paceline.spec.speculator import Speculator
from paceline.structured import Grammars, MaskMaker
from paceline.verifiers.sample_match import follow_tokens
from paceline.verifiers.verifier import Verifier

logger = logging.getLogger("paceline")


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
        text_decoder: Tokenizer,
        kv_cache: Tensor,  # [layers, 2, slots, kv heads, head dim]
        block_size: int,
        scheduler_config: SchedulerConfig,
        speculator: Speculator,
        verifier: Verifier,
        enable_prefix_caching: bool = True,
        grammars: Grammars | None = None,
    ) -> None:
        self.kv = KVCacheManager(kv_cache.shape[2] // block_size, block_size, enable_prefix_caching)
        self.scheduler = Scheduler(scheduler_config, self.kv)
        self.runner = ModelRunner(model, kv_cache, block_size)
        self.speculator = speculator
        self.verifier = verifier
        self.grammars = grammars or Grammars(text_decoder, model.config.vocab_size)
        self.masks = MaskMaker(self.grammars.limits.max_mask_s)
        self.clock = StepClock()
        self.observers: list[Callable[[StepContext], None]] = []  # told after every step, in the engine's thread
        self._text_decoder = text_decoder
        self._states: dict[str, RequestState] = {}
        self._gone: list[Request] = []  # finished, aborted or preempted since the proposers were last told

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    def add_request(self, request: Request) -> RequestState:
        if request.request_id in self._states:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use")
        self.grammars.constrain(request)  # where whoever made it has not done so
        params = request.sampling_params
        stop = StopStrings(params.stop_strings) if request.stop_strings is None else request.stop_strings
        detokenizer = Detokenizer(
            self._text_decoder,
            request.prompt_token_ids,
            stop,
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
        self.masks.begin([(entry.request, entry.draft) for entry in plan.scheduled if entry.reaches_end])
        with self.clock.phase("execute"):
            output = self.runner.execute(
                plan.scheduled,
                needs.hidden_layers,
                draws_tokens=self.verifier.takes_tokens,
                wants_logits=needs.logits or not self.verifier.takes_tokens,
            )
        with self.clock.phase("verify"):
            self.masks.collect()
            results = self._verify(plan.scheduled, output)
        self.scheduler.note_pass(plan.scheduled, self.clock.now() - begin_s)
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
        results: list[VerifyResult | None] = [None] * len(scheduled)
        ready: list[int] = []
        rows: list[range] = []
        for i, (entry, logits_rows) in enumerate(zip(scheduled, output.logits_rows, strict=True)):
            num_verified = 1 + len(entry.draft) if entry.reaches_end else 0
            if len(logits_rows) > num_verified:
                prompt_logits = output.logits[logits_rows.start : logits_rows.stop]
                results[i] = record_prompt_logprobs(entry, prompt_logits)
            if entry.reaches_end and results[i] is None:
                entry.request.sampling_s = 0.0
                drawn = output.drawn[i]
                if drawn is not None:
                    results[i] = follow_tokens(entry.draft, drawn)
                    continue
                ready.append(i)
                rows.append(range(logits_rows.stop - num_verified, logits_rows.stop))
        if not ready:
            return results
        if sum(len(r) for r in rows) == output.logits.shape[0]:
            logits = output.logits
        else:
            logits = torch.cat([output.logits[r.start : r.stop] for r in rows])
        verified = verify_apart(self.verifier, [scheduled[i] for i in ready], logits)
        for i, result in zip(ready, verified, strict=True):
            results[i] = result
        return results

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
                num_tokens, is_verified = request.num_tokens, entry.reaches_end
                self._take_in(state, result, entry.draft)
                if request.error is None:
                    num_accepted = len(result.accepted)
                    moves += self.kv.moves(request, num_tokens, result.accepted)
                    rows.accepted, rows.new_token_ids = result.accepted, request.token_ids[num_tokens:]
                if is_verified:
                    rows.logits_row = output.logits_rows[i].stop - 1 - len(entry.draft)
                    rows.draft = entry.draft
                    rows.counts.count(entry.draft, rows.accepted, len(rows.new_token_ids))
                    if request.error is None:
                        state.tracker.record(rows.counts)
            if request.error is None:  # what a failed request computed is not for others to reuse
                self.scheduler.update(entry, num_accepted)
            if request.finish_reason is not None:
                self._finish(self._states[request.request_id])
        move_slots(self.runner.kv_cache, moves)
        return passes, updated

    def _take_in(self, state: RequestState, result: VerifyResult, draft: DraftTree) -> None:
        """Add the new tokens to their request; one that fails at it ends with what it had before the step."""
        request = state.request
        num_tokens, error = request.num_tokens, result.error
        if error is None:
            try:
                num_added = self._append(state, result)
                sources = draft.sources(result.accepted)[:num_added]
                request.token_sources.extend(sources)
                if request.logprobs is not None and result.logprobs is not None:
                    request.logprobs.extend(result.logprobs[:num_added])
            except BaseException as raised:
                error = request_error("turning its tokens into text", raised)
        if error is not None:
            del request.token_ids[num_tokens:]
            request.finish_reason, request.stop_reason, request.error = "error", None, error

    def _append(self, state: RequestState, result: VerifyResult) -> int:
        """Add the new tokens one by one until something ends the request; return how many were added."""
        request = state.request
        params, stop_token_ids = request.sampling_params, request.stop_token_ids
        added = 0
        for token in result.token_ids:
            request.token_ids.append(token)
            added += 1
            # A grammar that has come to its end lets an end token through before min_tokens.
            may_stop = request.num_output_tokens > params.min_tokens or request.constraint is not None
            is_stop_token = may_stop and token in stop_token_ids
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
        return added

    def _propose(self, passes: Sequence[RequestPass], output: PassOutput, needs: Needs) -> None:
        ready = [p.request for p in passes if p.logits_row >= 0 and p.request.status is RequestStatus.RUNNING]
        logits = output.logits if needs.logits else None
        uses = self.kv.pool.num_uses
        step = StepContext(ready, passes, self._gone, logits, output.hidden, output.hidden_layers, uses)
        self._gone = []
        self.speculator.observe(step)
        for observer in list(self.observers):
            self._tell(observer, step)
        for request, draft in zip(ready, self.speculator.propose(step), strict=True):
            request.draft = draft if request.constraint is None else request.constraint.prune(draft)

    def _tell(self, observer: Callable[[StepContext], None], step: StepContext) -> None:
        try:
            observer(step)
        except Exception:
            self.observers.remove(observer)
            logger.exception("observer %r raised: it is told of no more steps", observer)

    def _finish(self, state: RequestState) -> None:
        request = state.request
        self.scheduler.finish(request)
        if request.constraint is not None:
            request.constraint.close()
        try:
            state.detokenizer.finish()
        except BaseException as raised:
            error = request_error("turning its last tokens into text", raised)
            if request.finish_reason != "abort" and request.error is None:
                request.finish_reason, request.stop_reason, request.error = "error", None, error
        state.metrics = state.tracker.metrics(request, lossy=not self.verifier.lossless)
        del self._states[request.request_id]
        self._gone.append(request)
