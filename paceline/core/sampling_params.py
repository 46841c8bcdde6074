"""How one request is sampled: vLLM's and OpenAI's options under vLLM's names.

An option is honoured on every node of every draft tree or refused; none is ever ignored. Everything is checked when
the object is made, and kept as plain values that cannot be changed afterwards. A number is never None, except where the
field says what None means; an empty list or dictionary may also be given as None.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.core.option_values import biases, callables, flag, real, shown, texts, token_ids, whole
from paceline.core.structured import StructuredOutputsParams
from paceline.errors import InvalidOptionError

# Gets the tokens before the node (prompt, output and draft ancestors) and its logits [vocab]; returns new logits.
LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]

MAX_LOGPROBS = 100
MAX_LOGIT_BIAS = 100.0
# vLLM's limit: a choice. Half or twice of it changes nothing that can be seen; below 1e-38 float32 cannot hold it.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float = 1.0  # 0, and anything below GREEDY_BELOW, is greedy
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
    structured_outputs: StructuredOutputsParams | None = None  # what the answer must look like

    def __post_init__(self) -> None:
        for name, low, high, meaning in _REALS:
            self._set(name, real(name, getattr(self, name), low, high, meaning))
        for name, least, most, meaning in _WHOLES:
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                self._set(name, whole(name, value, least, most, meaning))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            self._set(name, flag(name, getattr(self, name)))
        self._set("stop", texts("stop", self.stop))
        self._set("bad_words", texts("bad_words", self.bad_words))
        self._set("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", biases("logit_bias", self.logit_bias, MAX_LOGIT_BIAS))
        meaning = "(token_ids, logits) -> logits"
        self._set("logits_processors", callables("logits_processors", self.logits_processors, meaning))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidOptionError("allowed_token_ids is empty: nothing could be sampled; leave it out for all")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidOptionError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        self._check_speculative()
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidOptionError(
                "structured_outputs must be StructuredOutputsParams(json=..., ...), got "
                + shown(self.structured_outputs)
            )

    def _check_speculative(self) -> None:
        """Its shape only; the engine knows which keys and values it can honour."""
        if self.speculative is None:
            return
        if not isinstance(self.speculative, Mapping) or not all(isinstance(key, str) for key in self.speculative):
            raise InvalidOptionError(
                "SamplingParams.speculative must be a dictionary such as {'off': True}, got " + shown(self.speculative)
            )
        self._set("speculative", dict(self.speculative))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)


_REALS: tuple[tuple[str, float, float, str], ...] = (
    ("temperature", 0.0, 100.0, "between 0 (greedy) and 100"),
    ("top_p", 1e-9, 1.0, "above 0 and at most 1"),
    ("min_p", 0.0, 1.0, "between 0 and 1"),
    ("repetition_penalty", 1e-3, 1e3, "positive (1 does nothing), from 0.001 to 1000"),
    ("presence_penalty", -2.0, 2.0, "between -2 and 2"),
    ("frequency_penalty", -2.0, 2.0, "between -2 and 2"),
)
_WHOLES: tuple[tuple[str, int, int, str], ...] = (
    ("top_k", -1, 2**31 - 1, "-1 or 0 (all tokens), or the number of tokens to keep"),
    ("seed", -(2**63), 2**64 - 1, "a 64-bit whole number"),
    ("n", 1, 128, "between 1 and 128"),
    ("max_tokens", 1, 2**31 - 1, "at least 1, or None for up to the context length"),
    ("min_tokens", 0, 2**31 - 1, "0 or more"),
    ("logprobs", 0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}, or None"),
    ("prompt_logprobs", 0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}, or None"),
)
_MAY_BE_NONE = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
