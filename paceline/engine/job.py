"""From the engine core to callers: the states of one call's requests become its outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.draft_counts import DraftCounts
from paceline.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from paceline.core.request import Request
from paceline.core.tokenizer import Tokenizer
from paceline.engine.core import EngineCore
from paceline.engine.request_state import RequestState


@dataclass(slots=True)
class _Told:
    """How much of one sample is in the deltas so far."""

    num_tokens: int = 0  # those that a resumed request was given among them
    num_pieces: int = 0  # of the detokenizer's text
    end: bool = False
    cumulative_logprob: float = 0.0
    tokenizer: Tokenizer | None = None


@dataclass(slots=True)
class Job:
    """One call's worth of requests: `n` samples of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    requests: list[Request]
    states: list[RequestState] = field(default_factory=list)
    tokenizer: Tokenizer | None = None  # for log-probabilities that are read
    _told: list[_Told] = field(init=False)

    def __post_init__(self) -> None:
        self._told = [self._nothing_told(request) for request in self.requests]

    @property
    def finished(self) -> bool:
        return all(state.request.finished for state in self.states)

    @property
    def metrics(self) -> RequestMetrics | None:
        """Once all samples are finished."""
        metrics = [state.metrics for state in self.states if state.metrics is not None]
        return _combine(metrics) if len(metrics) == len(self.states) else None

    def start(self, core: EngineCore) -> None:
        for request in self.requests:
            self.states.append(core.add_request(request))

    def abort(self, core: EngineCore) -> None:
        for state in self.states:  # only what was added: an id that was refused belongs to another job
            if not state.request.finished:
                core.abort(state.request.request_id)

    def output(self) -> RequestOutput:
        """The whole state; of a resumed request, all that is new."""
        return self._around(
            [_completion(i, state, self._nothing_told(state.request)) for i, state in enumerate(self.states)]
        )

    def delta(self) -> RequestOutput:
        """What is new since the last delta."""
        outputs = []
        for i, (state, told) in enumerate(zip(self.states, self._told, strict=True)):
            if not told.end and (state.request.finished or state.request.num_output_tokens > told.num_tokens):
                outputs.append(_completion(i, state, told))
        return self._around(outputs)

    def nothing(self) -> RequestOutput:
        """The state before the first token."""
        outputs = [
            CompletionOutput(
                i,
                "",
                [],
                token_logprobs=None if request.logprobs is None else [],
                offset=len(request.resumed_token_ids),
            )
            for i, request in enumerate(self.requests)
        ]
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, outputs, finished=False)

    def _nothing_told(self, request: Request) -> _Told:
        return _Told(len(request.resumed_token_ids), tokenizer=self.tokenizer)

    def _around(self, outputs: list[CompletionOutput]) -> RequestOutput:
        errors = [state.request.error for state in self.states if state.request.error is not None]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            metrics=self.metrics,
            prompt_token_logprobs=self.states[0].request.prompt_logprobs,
            error=errors[0] if errors else None,
            num_cached_tokens=self.states[0].request.num_cached_tokens,
            tokenizer=self.tokenizer,
        )


def _completion(index: int, state: RequestState, told: _Told) -> CompletionOutput:
    """What a sample has beyond what was told, which is then all of it. Only what is new is copied."""
    request, pieces = state.request, state.detokenizer.pieces
    begin, end = told.num_tokens, request.num_output_tokens
    num_resumed = len(request.resumed_token_ids)
    new = slice(begin - num_resumed, end - num_resumed)
    first_piece = max(told.num_pieces, state.num_resumed_pieces)
    output = CompletionOutput(
        index=index,
        text="".join(pieces[first_piece:]) if request.sampling_params.detokenize else "",
        token_ids=request.token_ids[request.num_prompt_tokens + begin :],
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        token_sources=request.token_sources[new],
        offset=begin,
    )
    if request.logprobs is not None:
        output.token_logprobs = request.logprobs[new]
        for entry in output.token_logprobs:  # one by one: the same bits however deltas were cut
            told.cumulative_logprob += entry.logprob
        output.cumulative_logprob, output.tokenizer = told.cumulative_logprob, told.tokenizer
    told.num_tokens, told.num_pieces, told.end = end, len(pieces), request.finished
    return output


def _combine(metrics: Sequence[RequestMetrics]) -> RequestMetrics:
    """Of several samples: counts add up, the prompt counts once, the first token is the earliest one."""
    if len(metrics) == 1:
        return metrics[0]

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    return RequestMetrics(
        num_prompt_tokens=metrics[0].num_prompt_tokens,
        num_cached_tokens=metrics[0].num_cached_tokens,
        counts=DraftCounts.total(m.counts for m in metrics),
        queue_s=min((m.queue_s for m in metrics if m.queue_s is not None), default=None),
        ttft_s=min((m.ttft_s for m in metrics if m.ttft_s is not None), default=None),
        tpot_s=mean([m.tpot_s for m in metrics if m.tpot_s is not None]),
        e2e_s=max((m.e2e_s for m in metrics if m.e2e_s is not None), default=None),
        lossy=any(m.lossy for m in metrics),
        draft_s=sum(m.draft_s for m in metrics),
        arrival_s=metrics[0].arrival_s,
        num_preemptions=sum(m.num_preemptions for m in metrics),
    )
