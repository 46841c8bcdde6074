"""Outputs that follow one another, as one: adding one costs what is new in it, in time and in memory."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from paceline.core.tokenizer import Tokenizer


@dataclass(slots=True)
class _Sample:
    index: int
    offset: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_sources: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    tokenizer: Tokenizer | None = None

    def add(self, new: CompletionOutput) -> None:
        if new.text:
            self.texts.append(new.text)
        self.token_ids += new.token_ids
        self.token_sources += new.token_sources
        if new.token_logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += new.token_logprobs
            self.cumulative_logprob, self.tokenizer = new.cumulative_logprob, new.tokenizer
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason

    def output(self) -> CompletionOutput:
        """A copy: what comes later does not change it."""
        self.texts = ["".join(self.texts)]
        return CompletionOutput(
            index=self.index,
            text=self.texts[0],
            token_ids=list(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            token_logprobs=None if self.logprobs is None else list(self.logprobs),
            token_sources=list(self.token_sources),
            cumulative_logprob=self.cumulative_logprob,
            offset=self.offset,
            tokenizer=self.tokenizer,
        )


class OutputMerger:
    def __init__(self) -> None:
        self._last: RequestOutput | None = None
        self._is_only = False  # `_last` is all there is, and not in `_samples`
        self._samples: dict[int, _Sample] = {}

    def add(self, output: RequestOutput) -> None:
        if self._last is None:
            self._is_only = True
        else:
            if self._is_only:
                self._take_in(self._last.outputs)
                self._is_only = False
            self._take_in(output.outputs)
        self._last = output

    def output(self) -> RequestOutput:
        """Everything that was added."""
        last = self._last
        assert last is not None
        if self._is_only:
            return last
        return RequestOutput(
            request_id=last.request_id,
            prompt=last.prompt,
            prompt_token_ids=last.prompt_token_ids,
            outputs=[self._samples[index].output() for index in sorted(self._samples)],
            finished=last.finished,
            metrics=last.metrics,
            prompt_token_logprobs=last.prompt_token_logprobs,
            error=last.error,
            num_cached_tokens=last.num_cached_tokens,
            tokenizer=last.tokenizer,
        )

    def _take_in(self, outputs: Iterable[CompletionOutput]) -> None:
        for output in outputs:
            sample = self._samples.get(output.index)
            if sample is None:
                sample = self._samples[output.index] = _Sample(output.index, output.offset)
            sample.add(output)
