"""`LLMEngine`: vLLM's engine for callers that add requests and step it themselves."""

from collections.abc import Iterable
from typing import Any

from paceline.core.foreign_options import CALL, take_foreign
from paceline.core.outputs import RequestOutput, RequestOutputKind
from paceline.core.sampling_params import SamplingParams
from paceline.engine.arg_utils import EngineArgs
from paceline.engine.job import Job
from paceline.engine.processor import Prompt
from paceline.errors import InvalidRequestError
from paceline.llm.metrics import Metric
from paceline.llm.sync_llm import LLM
from paceline.models.tokenizer import Tokenizer


class LLMEngine:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._jobs: dict[str, tuple[Job, RequestOutputKind]] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLMEngine":
        return cls(LLM.from_engine_args(engine_args))

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams, **others: Any) -> None:
        take_foreign("add_request", CALL, others)
        if request_id in self._jobs:
            raise InvalidRequestError(f"request id {request_id!r} is in use")
        job = self._llm.engine.processor.job(request_id, prompt, params)
        job.start(self._llm.engine.core)
        self._jobs[request_id] = job, params.output_kind

    def step(self) -> list[RequestOutput]:
        """One pass for all requests; what it brought, each as its `output_kind` says."""
        changed = {id(state) for state in self._llm.engine.core.step()}
        outputs = []
        for job, kind in list(self._jobs.values()):
            if not job.finished and not any(id(state) in changed for state in job.states):
                continue
            if job.finished:  # in this step, or before any: it was resumed after its last token
                self._llm.note_end(job)
                del self._jobs[job.request_id]
            if kind is RequestOutputKind.DELTA:
                outputs.append(job.delta())
            elif kind is RequestOutputKind.CUMULATIVE or job.finished:
                outputs.append(job.output())
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if request_id in self._jobs:
                job, _ = self._jobs.pop(request_id)
                self._llm.cancel(job)

    def has_unfinished_requests(self) -> bool:
        return bool(self._jobs)

    def get_num_unfinished_requests(self) -> int:
        return len(self._jobs)

    def get_tokenizer(self) -> Tokenizer:
        return self._llm.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        return self._llm.get_metrics()

    def reset_prefix_cache(self, **others: Any) -> bool:
        return self._llm.reset_prefix_cache(**others)
