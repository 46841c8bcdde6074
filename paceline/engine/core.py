"""The engine: one loop in which prefill, decoding and verification are the same step.

    schedule -> launch -> collect -> verify -> commit -> propose

`EngineCore` is synchronous and single-threaded. `LLM` and `AsyncLLM` drive it. On a GPU the next pass is launched
before the last one is collected, where nothing that it brings can change the plan (engine/flight.py): the host then
works while the GPU does. Elsewhere the two follow each other at once.

What fails for one request ends that request (`request.error`) and no other; what fails in a drafter or an observer ends
no request. Only the target's pass, and memory that runs out, may end a step with an exception.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from paceline.core.draft_counts import NO_PASS, DraftCounts
from paceline.core.faults import request_error
from paceline.core.forward import Target
from paceline.core.outputs import VerifyResult
from paceline.core.processors import with_one_torch_thread
from paceline.core.request import Request, RequestStatus
from paceline.core.stop_strings import StopStrings
from paceline.core.tokenizer import Tokenizer
from paceline.engine.detokenizer import Detokenizer
from paceline.engine.flight import Flight
from paceline.engine.launcher import Launcher
from paceline.engine.metrics import RequestTracker, StepClock
from paceline.engine.request_state import RequestState
from paceline.engine.rounds import RoundRows
from paceline.engine.runner import ModelRunner, PassOutput
from paceline.engine.scheduler import ScheduledRequest, Scheduler, SchedulerConfig, SchedulerOutput
from paceline.engine.verify_apart import record_prompt_logprobs, verify_apart
from paceline.errors import InvalidOptionError, InvalidRequestError
from paceline.kv.block_bytes import BlockBytes
from paceline.kv.exchange import KVExchange
from paceline.kv.fingerprint import Fingerprint, make_fingerprint
from paceline.kv.manager import KVCacheManager
from paceline.kv.offload import Offload, OffloadOption
from paceline.kv.storage import move_slots
from paceline.spec.proposer import Needs, RequestPass, StepContext
from paceline.spec.speculator import Speculator
from paceline.structured.beside_pass import MaskMaker
from paceline.structured.compiler import Grammars
from paceline.verifiers.sample_match import follow_tokens
from paceline.verifiers.verifier import Verifier

logger = logging.getLogger("paceline")


class EngineCore:
    def __init__(
        self,
        model: Target,
        text_decoder: Tokenizer,
        kv_cache: Tensor,  # [layers, 2, slots, kv heads, head dim]
        block_size: int,
        scheduler_config: SchedulerConfig,
        speculator: Speculator,
        verifier: Verifier,
        enable_prefix_caching: bool = True,
        grammars: Grammars | None = None,
        fingerprint: Callable[[], Fingerprint] | None = None,  # where the weights have a name beside their bits
    ) -> None:
        self.kv = KVCacheManager(kv_cache.shape[2] // block_size, block_size, enable_prefix_caching)
        self.scheduler = Scheduler(scheduler_config, self.kv)
        self.runner = ModelRunner(model, kv_cache, block_size)
        self.speculator = speculator
        self.verifier = verifier
        self.grammars = Grammars(text_decoder, model.config.vocab_size) if grammars is None else grammars
        self.masks = MaskMaker(self.grammars.limits.max_mask_s, self.grammars.late_masks)
        self.clock = StepClock()
        self.blocks = BlockBytes(kv_cache, self.kv.pool, block_size, self.speculator.block_rows)
        self._fingerprint = fingerprint or (lambda: make_fingerprint(model, "", block_size))
        self.offload: Offload | None = None
        self.observers: list[Callable[[StepContext], None]] = []  # told after every step, in the engine's thread
        self._text_decoder = text_decoder
        self._states: dict[str, RequestState] = {}
        self._gone: list[Request] = []  # finished, aborted or preempted since the proposers were last told
        self.launcher = Launcher(
            self.runner, self.scheduler, speculator, verifier, self.masks, self.clock, self._note_scheduled
        )
        self._flight: Flight | None = None  # launched in the last step, before its own pass was collected
        self._collected_s = 0.0  # when the last pass was
        # The target's kernels have, and PyTorch's would keep them waiting.
        self._has_own_threads = model.num_threads is not None

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    @cached_property
    def exchange(self) -> KVExchange:
        """KV blocks out and in. Made on first use, which takes a pass: from then on every block hash begins with the
        engine's fingerprint, and what was cached before is forgotten."""
        if not self.kv.enable_prefix_caching:
            raise InvalidOptionError("KV blocks are found by the prefix cache: it must not be switched off")
        return KVExchange(self.kv, self.blocks, self._fingerprint())

    def keep_blocks(self, option: OffloadOption) -> None:
        """Keep the KV of requests that end in host memory or in a folder, from where it is brought back."""
        # Only what outlives the process needs to say which engine it is of.
        digest = b"" if option.folder is None else self.exchange.fingerprint.digest
        self.kv.kept = self.offload = Offload(option.open(), self.blocks, self.kv.pool, digest)

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
        if request.resumed_token_ids:
            state.resume()
        self._states[request.request_id] = state
        if request.finish_reason is None:
            self.scheduler.add(request)
        else:
            self._finish(state)  # its last token had been delivered
        state.num_resumed_pieces = len(state.detokenizer.pieces)
        return state

    def abort(self, request_id: str) -> RequestState | None:
        """End a request now; its blocks are free when this returns."""
        state = self._states.get(request_id)
        if state is not None:
            state.request.finish_reason = "abort"
            self._finish(state)
            self.kv.keep_released()
        return state

    def step(self) -> list[RequestState]:
        """One target pass. Returns the requests that got tokens or ended."""
        return with_one_torch_thread(self._step) if self._has_own_threads else self._step()

    def _step(self) -> list[RequestState]:
        flight = self._flight
        if flight is not None and not flight.is_awaited:  # all its requests have ended or been aborted since
            flight.rows.collect()
            self._flight = flight = None
        if flight is None:
            flight = self.launcher.launch()
        if flight is None:
            self.kv.keep_released()  # of a request that found too few blocks
            return []
        self._flight = self.launcher.launch_ahead(flight)
        return self._collect(flight)

    def _collect(self, flight: Flight) -> list[RequestState]:
        with self.clock.phase("execute"):
            output = flight.rows.collect()
            if isinstance(flight.rows, RoundRows) and self._drafted_ahead is None:
                output.keep_hidden()  # a proposer may want them after the next launch
        with self.clock.phase("verify"):
            self.masks.collect()
            results = self._verify(flight.scheduled, output)
        now = self.clock.now()
        self.scheduler.note_pass(flight.scheduled, now - max(flight.begin_s, self._collected_s))
        self._collected_s = now
        with self.clock.phase("commit"):
            passes, updated = self._commit(flight.scheduled, output, results)
        with self.clock.phase("propose"):
            self._propose(passes, output, flight.needs)
        self.kv.keep_released()
        self.clock.num_steps += 1
        return updated

    @property
    def _drafted_ahead(self) -> frozenset[str] | None:
        """Whom the device drafts for in the pass that is on its way; None: for nobody."""
        return None if self._flight is None else self._flight.drafted

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
            if entry.request.finished:
                continue  # after the launch: its row is surplus
            reaches_end = entry.reaches_end
            num_verified = 1 + len(entry.draft.token_ids) if reaches_end else 0
            if len(logits_rows) > num_verified:
                prompt_logits = output.logits[logits_rows.start : logits_rows.stop]
                results[i] = record_prompt_logprobs(entry, prompt_logits)
            if reaches_end and results[i] is None:
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
        walked = self._drafted_ahead or ()  # the device has moved their rows
        for i, (entry, result) in enumerate(zip(scheduled, results, strict=True)):
            request = entry.request
            if request.finished:
                continue
            first_row = output.first_rows[i]
            pass_rows = range(first_row, first_row + entry.num_rows)
            rows = RequestPass(request, pass_rows, entry.start, entry.num_committed, counts=NO_PASS)
            if output.hidden is not None:
                rows.block_ids = tuple(request.block_ids)  # now: a request that ends here gives its blocks back
            passes.append(rows)
            num_accepted = 0
            if result is not None:
                state = self._states[request.request_id]
                updated.append(state)
                num_tokens, is_verified = len(request.token_ids), entry.reaches_end
                state.take_in(result, entry.draft)
                if request.error is None:
                    num_accepted = len(result.accepted)
                    if num_accepted and request.request_id not in walked:
                        moves += self.kv.moves(request, num_tokens, result.accepted)
                    rows.accepted, rows.new_token_ids = result.accepted, request.token_ids[num_tokens:]
                if is_verified:
                    rows.logits_row = output.logits_rows[i].stop - 1 - len(entry.draft.token_ids)
                    rows.draft = entry.draft
                    rows.counts = DraftCounts.of_pass(entry.draft, rows.accepted, len(rows.new_token_ids))
                    if request.error is None:
                        state.tracker.record(rows.counts)
            if request.error is None:  # what a failed request computed is not for others to reuse
                self.scheduler.update(entry, num_accepted)
            if request.finish_reason is not None:
                self._finish(self._states[request.request_id])
        move_slots(self.runner.kv_cache, moves)
        return passes, updated

    def _propose(self, passes: Sequence[RequestPass], output: PassOutput, needs: Needs) -> None:
        ready = [p.request for p in passes if p.logits_row >= 0 and p.request.status is RequestStatus.RUNNING]
        logits = output.logits if needs.logits else None
        uses, drafted, load = self.kv.pool.num_uses, self._drafted_ahead, len(self._states)
        step = StepContext(ready, passes, self._gone, logits, output.hidden, output.hidden_layers, uses, load, drafted)
        self._gone = []
        self.speculator.observe(step)
        for observer in list(self.observers):
            self._tell(observer, step)
        if drafted is not None:
            self.speculator.note_round(len(drafted))  # the next pass is on its way, with drafts of the device
            return
        if self._flight is not None:
            self.speculator.skip()  # the next pass is on its way, without drafts
            return
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
