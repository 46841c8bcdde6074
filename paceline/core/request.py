"""One sequence being generated: tokens so far, how many have KV, and the draft that hangs on the last one.

There is no prefill phase and no decode phase: `num_computed_tokens` catches up with `num_tokens_with_spec`.
"""

import enum
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.core.bad_words import NO_BAD_WORDS, BadWords
from paceline.core.constraint import Constraint
from paceline.core.outputs import TokenLogprobs
from paceline.core.sampling_params import SamplingParams
from paceline.core.stop_strings import StopStrings
from paceline.core.tree import EMPTY_TREE, DraftTree


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_NOT_GIVEN: frozenset[int] = frozenset({-1})


def ending_token_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Tokens that end the output."""
    return frozenset(() if params.ignore_eos else eos_token_ids) | frozenset(params.stop_token_ids)


@dataclass(slots=True, eq=False)
class Request:
    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int  # resolved: never None, never past the context
    seed: int  # resolved: every random draw is a function of (seed, position, purpose)
    eos_token_ids: tuple[int, ...] = ()
    bad_words: BadWords = NO_BAD_WORDS  # sampling_params.bad_words, tokenized
    stop_strings: StopStrings | None = None  # sampling_params.stop, prepared once for a call; None: not yet
    stop_token_ids: frozenset[int] = _NOT_GIVEN  # end the output, and min_tokens holds them back; by default derived
    call_id: str = ""  # of the call that it is a sample of; empty: of none
    resumed_token_ids: Sequence[int] = ()  # output that an earlier attempt delivered: it goes on after them
    cache_salt: str = ""  # only requests with the same salt share prefixes and past outputs
    arrival_s: float = field(default_factory=time.perf_counter)
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt, then output
    draft: DraftTree = EMPTY_TREE
    num_computed_tokens: int = 0  # tokens [0, num_computed_tokens) have their KV in place
    block_ids: list[int] = field(default_factory=list)  # KV blocks in sequence order, owned through kv/
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: str | int | None = None  # which stop string or token id
    error: Exception | None = None
    token_sources: list[str] = field(default_factory=list)  # one per new token, as in CompletionOutput
    draft_s: float = 0.0  # host time spent drafting for it
    sampling_s: float = 0.0  # host time that sampling took in its last pass
    num_passes_waited: int = 0  # since its last one, because its call has many samples (engine/many_samples.py)
    logprobs: list[TokenLogprobs] | None = None  # one per new token, where asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    constraint: Constraint | None = None  # sampling_params.structured_outputs, compiled

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        if self.stop_token_ids is _NOT_GIVEN:
            self.stop_token_ids = ending_token_ids(self.sampling_params, self.eos_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        return len(self.token_ids) + len(self.draft)

    @property
    def num_new_tokens(self) -> int:
        """Output tokens that were not delivered before it was resumed."""
        return self.num_output_tokens - len(self.resumed_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def has_all_tokens(self) -> bool:
        """Only while a pass is planned before the last one was collected: that one brings the last token."""
        return self.num_output_tokens >= self.max_tokens

    @property
    def max_draft_depth(self) -> int:
        """Deepest node worth drafting: accepting d nodes emits d + 1 tokens, and max_tokens is the limit."""
        return self.max_tokens - self.num_output_tokens - 1

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
