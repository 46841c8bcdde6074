"""How one request is sampled: vLLM's and OpenAI's options under vLLM's names.

An option is honoured on every node of every draft tree or refused; none is ever ignored. A value is checked when it is
assigned, and kept as a plain one. A number is never None, except where the field says what None means; an empty list or
dictionary may also be given as None.

Options may be assigned until, and after, they are submitted: the engine works with a copy that cannot be changed.

>>> params = SamplingParams(max_tokens=8)
>>> params.temperature = 0
>>> params.submitted().temperature
0.0
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from torch import Tensor

from paceline.core.foreign_options import SAMPLING, check_foreign
from paceline.core.option_values import biases, callables, flag, real, shown, texts, token_ids, whole
from paceline.core.outputs import RequestOutputKind
from paceline.core.structured import StructuredOutputsParams
from paceline.errors import InvalidOptionError

# Gets the tokens before the node (prompt, output and draft ancestors) and its logits [vocab]; returns new logits.
LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]

MAX_LOGPROBS = 100
ALL_LOGPROBS = -1  # of the whole vocabulary
MAX_LOGIT_BIAS = 100.0
# vLLM's limit: a choice. Half or twice of it changes nothing that can be seen; below 1e-38 float32 cannot hold it.
GREEDY_BELOW = 1e-5


@dataclass(slots=True)
class SamplingParams:
    """`| Any`: other collections, and None for an empty one, may be given; what is kept is of the type before it."""

    _frozen: bool = field(default=False, init=False, repr=False, compare=False)
    _submitted: "SamplingParams | None" = field(default=None, init=False, repr=False, compare=False)
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0  # 0, and anything below GREEDY_BELOW, is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] | Any = None
    stop_token_ids: Sequence[int] | Any = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the context length
    min_tokens: int = 0
    logprobs: int | None = None  # that many top tokens beside the chosen one, for each output token; -1: all
    prompt_logprobs: int | None = None
    detokenize: bool = True  # False: outputs have token ids and no text
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of streams
    logit_bias: Mapping[int, float] | Any = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | Any = None
    logits_processors: Sequence[LogitsProcessor] | Any = None
    speculative: Mapping[str, Any] | None = None  # this request's own choice: {"off": True}, {"method": ...}, ...
    structured_outputs: StructuredOutputsParams | None = None  # what the answer must look like
    # vLLM's, and without effect (core/foreign_options.py)
    spaces_between_special_tokens: bool = True
    flat_logprobs: bool = False
    logprob_token_ids: Sequence[int] | None = None
    extra_args: Mapping[str, Any] | None = None
    skip_clone: bool = False
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None

    def __post_init__(self) -> None:
        self._check_together()

    def __setattr__(self, name: str, value: object) -> None:
        check = _CHECKS.get(name)
        if check is not None:
            if self._frozen:
                raise InvalidOptionError(f"{name}: a request was made of these options: change a clone() of them")
            value = check(name, value)
            if self._submitted is not None:
                object.__setattr__(self, "_submitted", None)
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidOptionError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise InvalidOptionError("stop strings are found in text: leave them out, or leave detokenize on")

    def submitted(self) -> "SamplingParams":
        """What a request keeps: a copy that cannot be changed, the same one until an option is assigned."""
        if self._frozen:
            return self
        if self._submitted is None:
            self._check_together()
            copy = self.clone()
            object.__setattr__(copy, "_frozen", True)
            object.__setattr__(self, "_submitted", copy)
            return copy
        return self._submitted

    def clone(self) -> "SamplingParams":
        return _made_of({name: getattr(self, name) for name in _NAMES})

    def __reduce__(self) -> Any:
        """A copy, or what comes out of a pickle, may be changed."""
        return _made_of, ({name: getattr(self, name) for name in _NAMES},)

    @staticmethod
    def from_optional(**given: Any) -> "SamplingParams":
        """As vLLM's server makes them: None means the default, and the keys of logit_bias may be text."""
        options = {name: value for name, value in given.items() if value is not None}
        if "max_tokens" in given:
            options["max_tokens"] = given["max_tokens"]  # None: up to the context length
        if isinstance(bias := options.get("logit_bias"), Mapping):
            options["logit_bias"] = {int(token): min(100.0, max(-100.0, value)) for token, value in bias.items()}
        return SamplingParams(**options)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)


def _made_of(values: Mapping[str, Any]) -> SamplingParams:
    """Of values that were checked before."""
    params = object.__new__(SamplingParams)
    for name, value in (("_frozen", False), ("_submitted", None), *values.items()):
        object.__setattr__(params, name, value)
    return params


Check = Callable[[str, Any], Any]  # (option name, what was given) -> what is kept; raises InvalidOptionError


# A server makes these for every request: what is right already is looked at once and kept.
def _real(low: float, high: float, meaning: str) -> Check:
    def check(name: str, value: Any) -> float:
        is_right = type(value) is float and low <= value <= high
        return value if is_right else real(name, value, low, high, meaning)

    return check


def _whole(low: int, high: int, meaning: str, none: bool = False) -> Check:
    def check(name: str, value: Any) -> int | None:
        is_right = (value is None and none) or (type(value) is int and low <= value <= high)
        return value if is_right else whole(name, value, low, high, meaning)

    return check


def _allowed(name: str, value: Any) -> tuple[int, ...] | None:
    allowed = None if value is None else token_ids(name, value)
    if allowed is not None and not allowed:
        raise InvalidOptionError(f"{name} is empty: nothing could be sampled; leave it out for all")
    return allowed


def _speculative(name: str, value: Any) -> dict[str, Any] | None:
    """Its shape only; the engine knows which keys and values it can honour."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidOptionError(
            f"SamplingParams.{name} must be a dictionary such as {{'off': True}}, got {shown(value)}"
        )
    return dict(value)


def _structured_outputs(name: str, value: Any) -> StructuredOutputsParams | None:
    if not isinstance(value, StructuredOutputsParams | None):
        raise InvalidOptionError(f"{name} must be StructuredOutputsParams(json=..., ...), got {shown(value)}")
    return value


def _output_kind(name: str, value: Any) -> RequestOutputKind:
    if not isinstance(value, RequestOutputKind):
        raise InvalidOptionError(
            f"{name} must be a RequestOutputKind, such as RequestOutputKind.DELTA, got {shown(value)}"
        )
    return value


def _foreign(name: str, value: Any) -> Any:
    if value is _DEFAULTS[name]:
        return value
    try:
        check_foreign("SamplingParams", SAMPLING, name, value)
    except Exception as error:  # a value of the caller's own may fail to compare
        if isinstance(error, InvalidOptionError):
            raise
        raise InvalidOptionError(f"SamplingParams: {name}={shown(value)} is not supported") from error
    return _DEFAULTS[name] if value is None or SAMPLING[name].values is None else value


_TOP = f"between 0 and {MAX_LOGPROBS}, -1 for all tokens, or None"
_CHECKS: dict[str, Check] = {
    "temperature": _real(0.0, 100.0, "between 0 (greedy) and 100"),
    "top_p": _real(1e-9, 1.0, "above 0 and at most 1"),
    "min_p": _real(0.0, 1.0, "between 0 and 1"),
    "repetition_penalty": _real(1e-3, 1e3, "positive (1 does nothing), from 0.001 to 1000"),
    "presence_penalty": _real(-2.0, 2.0, "between -2 and 2"),
    "frequency_penalty": _real(-2.0, 2.0, "between -2 and 2"),
    "top_k": _whole(-1, 2**31 - 1, "-1 or 0 (all tokens), or the number of tokens to keep"),
    "seed": _whole(-(2**63), 2**64 - 1, "a 64-bit whole number", none=True),
    "n": _whole(1, 128, "between 1 and 128"),
    "max_tokens": _whole(1, 2**31 - 1, "at least 1, or None for up to the context length", none=True),
    "min_tokens": _whole(0, 2**31 - 1, "0 or more"),
    "logprobs": _whole(ALL_LOGPROBS, MAX_LOGPROBS, _TOP, none=True),
    "prompt_logprobs": _whole(ALL_LOGPROBS, MAX_LOGPROBS, _TOP, none=True),
    "include_stop_str_in_output": flag,
    "ignore_eos": flag,
    "skip_special_tokens": flag,
    "detokenize": flag,
    "stop": texts,
    "bad_words": texts,
    "stop_token_ids": token_ids,
    "allowed_token_ids": _allowed,
    "logit_bias": partial(biases, limit=MAX_LOGIT_BIAS),
    "logits_processors": partial(callables, meaning="(token_ids, logits) -> logits"),
    "output_kind": _output_kind,
    "speculative": _speculative,
    "structured_outputs": _structured_outputs,
    **dict.fromkeys(SAMPLING, _foreign),
}
_NAMES = tuple(one.name for one in fields(SamplingParams) if one.init)
_DEFAULTS = {one.name: one.default for one in fields(SamplingParams)}
