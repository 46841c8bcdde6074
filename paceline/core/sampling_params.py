"""How one request is sampled: vLLM's and OpenAI's options under vLLM's names.

An option is honoured on every node of every draft tree or refused; none is ever ignored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.errors import InvalidOptionError

# Gets the tokens before the node (prompt, output and draft ancestors) and its logits [vocab]; returns new logits.
LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]

MAX_LOGPROBS = 100


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 16  # None: up to the context length
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # that many top tokens beside the chosen one, for each output token
    prompt_logprobs: int | None = None
    speculative: Mapping[str, Any] | None = None  # this request's own choice: {"off": True}, {"method": ...}, ...

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        for name, low, high, meaning in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # NaN fails every comparison
                raise InvalidOptionError(f"{name} must be {meaning}, got {value!r}")
        for name in ("top_k", "n", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise InvalidOptionError(f"{name} must be a whole number, got {value!r}")
        if any(not isinstance(s, str) or not s for s in stop):
            raise InvalidOptionError(f"stop strings must be non-empty text, got {self.stop!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidOptionError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidOptionError("allowed_token_ids is empty: nothing could be sampled; leave it out to allow all")
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise InvalidOptionError(f"logit_bias must be within -100..100, got {bias!r} for token {token}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)


_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("temperature", 0.0, 100.0, "between 0 (greedy) and 100"),
    ("top_k", -1, 2**31 - 1, "-1 or 0 (all tokens), or the number of tokens to keep"),
    ("top_p", 1e-9, 1.0, "above 0 and at most 1"),
    ("min_p", 0.0, 1.0, "between 0 and 1"),
    ("repetition_penalty", 1e-3, 1e3, "positive (1 does nothing), from 0.001 to 1000"),
    ("presence_penalty", -2.0, 2.0, "between -2 and 2"),
    ("frequency_penalty", -2.0, 2.0, "between -2 and 2"),
    ("seed", -(2**63), 2**64 - 1, "a 64-bit whole number"),
    ("n", 1, 128, "between 1 and 128"),
    ("max_tokens", 1, 2**31 - 1, "at least 1, or None for up to the context length"),
    ("min_tokens", 0, 2**31 - 1, "0 or more"),
    ("logprobs", 0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}, or None"),
    ("prompt_logprobs", 0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}, or None"),
)
