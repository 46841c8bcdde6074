"""The engine's own account of a step becomes a `StepRecord`, for observers outside the engine."""

from paceline.core.request import Request
from paceline.core.step_record import PassRecord, StepObserver, StepRecord
from paceline.llm.sync_llm import LLM
from paceline.spec.proposer import RequestPass, StepContext


class StepWatch:
    """An observer of the engine core that tells another one."""

    def __init__(self, llm: LLM, observer: StepObserver) -> None:
        self._llm = llm
        self._observer = observer
        self._known_s = 0.0  # of the step clock, at the last record
        self._methods: dict[str, str] = {}  # request id -> its drafting method

    def __call__(self, step: StepContext) -> None:
        total_s = sum(self._llm.engine.core.clock.seconds.values())
        seconds, self._known_s = total_s - self._known_s, total_s
        self._observer(StepRecord([self._record(part) for part in step.passes], seconds))
        for request in step.gone:
            self._methods.pop(request.request_id, None)

    def _record(self, part: RequestPass) -> PassRecord:
        return PassRecord(
            request_id=part.request.request_id,
            method=self._method(part.request),
            num_rows=len(part.rows),
            num_prompt_rows=part.num_committed if part.num_committed > 1 else 0,
            draft=part.draft,
            accepted=part.accepted,
            new_token_ids=part.new_token_ids,
            cache_salt=part.request.cache_salt,
            counts=part.counts,
        )

    def _method(self, request: Request) -> str:
        method = self._methods.get(request.request_id)
        if method is None:
            method = self._methods[request.request_id] = self._llm.method_of(request.sampling_params)
        return method
