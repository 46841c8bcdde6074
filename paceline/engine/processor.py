"""From callers to the engine core: prompts become requests.

Everything that can be wrong with a prompt or its options is found here, before the engine has seen the request. What
takes long to prepare (tokenizing, stop strings, bad words) is prepared here too, in the caller's thread and once for
all samples of a call.
"""

import itertools
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from paceline.core.bad_words import BadWords
from paceline.core.option_values import shown
from paceline.core.request import Request, ending_token_ids
from paceline.core.sampling_params import SamplingParams
from paceline.core.stop_strings import StopStrings
from paceline.core.tokenizer import Tokenizer
from paceline.engine.job import Job
from paceline.errors import InvalidOptionError, InvalidRequestError
from paceline.ops.sampling import check_sampling
from paceline.structured.compiler import Grammars

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is made of a call's options, for all its samples."""

    params: SamplingParams
    bad_words: BadWords
    stop_strings: StopStrings
    stop_token_ids: frozenset[int]


class Processor:
    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        check_speculative: Callable[[SamplingParams], None],
        seed: int | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_model_len = max_model_len
        self._check_speculative = check_speculative
        self._seed = seed
        self._grammars = Grammars(tokenizer, vocab_size) if grammars is None else grammars
        self._last: _Prepared | None = None
        self._unseeded = itertools.count(1)  # callers may be in several threads

    def job(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Job:
        params = params.submitted()
        prompt, cache_salt = _take_salt(prompt)
        prompt, resumed = self._take_resumed(prompt, params.n)
        text, token_ids = self._tokenize(prompt)
        self._check_length(token_ids)
        prepared = self._prepare(params)
        self._check_speculative(params)
        seed = params.seed if params.seed is not None else self._next_seed()
        requests = [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}-{i}",
                call_id=request_id,
                prompt_token_ids=token_ids,
                sampling_params=params,
                max_tokens=min(params.max_tokens or self.max_model_len, self.max_model_len - len(token_ids)),
                seed=(seed + i * _SAMPLE_STRIDE) % 2**64,
                eos_token_ids=self.eos_token_ids,
                bad_words=prepared.bad_words,
                stop_strings=prepared.stop_strings,
                stop_token_ids=prepared.stop_token_ids,
                logprobs=None if params.logprobs is None else [],
                prompt_logprobs=None if params.prompt_logprobs is None else [None],
                cache_salt=cache_salt,
                resumed_token_ids=resumed[i],
            )
            for i in range(params.n)
        ]
        self._grammars.constrain(*requests)
        return Job(request_id, text, token_ids, requests, tokenizer=self.tokenizer)

    def _take_resumed(self, prompt: Prompt, n: int) -> tuple[Prompt, list[list[int]]]:
        """The prompt without its "output_token_ids", and these for each of the n samples."""
        if not isinstance(prompt, Mapping) or prompt.get("output_token_ids") is None:
            return prompt, [[]] * n
        given, rest = prompt["output_token_ids"], {k: v for k, v in prompt.items() if k != "output_token_ids"}
        samples = [given] if n == 1 else given
        if not _is_list(samples) or len(samples) != n or not all(map(_is_list, samples)):
            wanted = "a list of token ids" if n == 1 else f"a list of {n} lists of token ids, one for each sample"
            raise InvalidRequestError(f"output_token_ids must be {wanted}, got {shown(given)}")
        return rest, [self._checked_ids(sample, "output_token_ids") for sample in samples]

    def _checked_ids(self, token_ids: Collection[int], what: str) -> list[int]:
        for token in token_ids:
            if not (type(token) is int or isinstance(token, Integral)) or not 0 <= token < self.vocab_size:
                raise InvalidRequestError(
                    f"{what} must be whole numbers from 0 to {self.vocab_size - 1}, got {shown(token)}"
                )
        return [int(token) for token in token_ids]

    def _prepare(self, params: SamplingParams) -> _Prepared:
        """The options checked and put together; the last are kept, because many prompts come with the same ones."""
        last = self._last
        if last is not None and last.params is params:
            return last
        bad_words = BadWords(self._bad_words(params.bad_words))
        check_sampling(params, self.vocab_size, self.eos_token_ids, bad_words.always_banned)
        stop_token_ids = ending_token_ids(params, self.eos_token_ids)
        prepared = _Prepared(params, bad_words, StopStrings(params.stop_strings), stop_token_ids)
        self._last = prepared  # another thread may put its own there at any time
        return prepared

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._encode_prompt(prompt)
        if isinstance(prompt, Mapping):
            return self._tokenize_mapping({key: value for key, value in prompt.items() if value is not None})
        if not isinstance(prompt, Collection) or isinstance(prompt, bytes | bytearray):
            raise InvalidRequestError(f"a prompt is text, or a list of token ids, got {shown(prompt)}")
        token_ids = list(prompt)
        self._check_length(token_ids)  # first: a list that is too long need not be looked through
        return None, self._checked_ids(token_ids, "prompt token ids")

    def _tokenize_mapping(self, prompt: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        """vLLM's `TextPrompt` and `TokensPrompt`; beside ids there may be the text that they were made of."""
        if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}, {"prompt", "prompt_token_ids"}):
            raise InvalidRequestError(
                'a prompt mapping has one key, "prompt" or "prompt_token_ids", and perhaps "cache_salt" and '
                f'"output_token_ids"; got {sorted(map(str, prompt))}'
            )
        if "prompt_token_ids" not in prompt:
            return self._tokenize(prompt["prompt"])
        text, (_, token_ids) = prompt.get("prompt"), self._tokenize(prompt["prompt_token_ids"])
        return text if isinstance(text, str) else None, token_ids

    def _encode_prompt(self, text: str) -> list[int]:
        try:
            token_ids = self.tokenizer.encode(text)
        except Exception as error:  # such as half a surrogate pair, which is no text
            raise InvalidRequestError(f"the prompt cannot be tokenized: {error!r}") from error
        if not self._are_known(token_ids):
            raise InvalidRequestError(
                f"the tokenizer makes tokens of this prompt that the model, with {self.vocab_size}, does not have"
            )
        return token_ids

    def _are_known(self, token_ids: Sequence[int]) -> bool:
        return not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.vocab_size)

    def _check_length(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InvalidRequestError("the prompt is empty: give at least one token")
        if len(token_ids) >= self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens and leaves no room to answer: the context is "
                f"{self.max_model_len} tokens; shorten the prompt or raise max_model_len"
            )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it stands at the start of a text and after a space: the two ways it can be tokenized."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip(" ")
            for spelling in (bare, " " + bare):
                try:
                    token_ids = tuple(self.tokenizer.encode(spelling, add_special_tokens=False))
                except Exception as error:
                    raise InvalidOptionError(f"bad_words {shown(word)} cannot be tokenized: {error!r}") from error
                if token_ids and self._are_known(token_ids):  # a token that the model does not have is never sampled
                    found[token_ids] = None
        return tuple(found)

    def _next_seed(self) -> int:
        if self._seed is None:
            return secrets.randbits(64)
        return (self._seed + next(self._unseeded) * _REQUEST_STRIDE) % 2**64


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _take_salt(prompt: Prompt) -> tuple[Prompt, str]:
    """The prompt without its "cache_salt", as vLLM names it, and that salt."""
    if not isinstance(prompt, Mapping) or "cache_salt" not in prompt:
        return prompt, ""
    salt = prompt["cache_salt"]
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidRequestError(f"cache_salt must be non-empty text, or None; got {salt!r}")
    return {key: value for key, value in prompt.items() if key != "cache_salt"}, salt or ""


# Odd constants, so that seeds of different samples and requests do not coincide in practice.
_SAMPLE_STRIDE = 0x9E3779B97F4A7C15
_REQUEST_STRIDE = 0xC2B2AE3D27D4EB4F
