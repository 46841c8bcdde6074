"""From what a request asks for to a compiled grammar, cached by its text.

Compiling is done by whoever asks: the caller's thread offline, the worker of `AsyncLLM`, never the engine's thread.
llguidance lets other threads run meanwhile.
"""

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from paceline.core.constraint import Allowed
from paceline.core.request import Request
from paceline.core.structured import StructuredOutputsParams
from paceline.core.tokenizer import Tokenizer
from paceline.errors import InvalidRequestError
from paceline.structured.grammar_text import grammar_text
from paceline.structured.limits import DEFAULT_LIMITS, GrammarLimits
from paceline.structured.matching import CompiledGrammar, OutputConstraint
from paceline.structured.trial import Trial

logger = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class TokenView:
    """The model's tokens as llguidance sees them."""

    tokenizer: LLTokenizer
    vocab_size: int
    eos_token_ids: frozenset[int]
    special_tokens: Mapping[str, int]
    only_eos: Allowed  # [vocab]


class Grammars:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, limits: GrammarLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._view: TokenView | None = None
        self._trial = Trial(limits.max_compile_s)
        self._lock = threading.Lock()  # callers may be in several threads
        self._compiled: OrderedDict[bytes, tuple[CompiledGrammar, int]] = OrderedDict()  # least recently used first

    def constrain(self, *requests: Request) -> None:
        """Give requests of one call their constraints, where their options ask for one and they have none yet."""
        wanted = requests[0].sampling_params.structured_outputs
        unbound = [request for request in requests if request.constraint is None]
        if wanted is None or not unbound:
            return
        compiled, view = self.compile(wanted), self.view()
        for request in unbound:
            request.constraint = OutputConstraint(compiled, view, request)

    def compile(self, wanted: StructuredOutputsParams) -> CompiledGrammar:
        """Raises InvalidRequestError, with the reason."""
        view = self.view()
        key = sha256(repr(wanted).encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            known = self._compiled.get(key)
            if known is not None:
                self._compiled.move_to_end(key)
                return known[0]
        text = grammar_text(wanted, self.limits, dict(view.special_tokens))
        refusal = self._trial.refusal(text)
        matcher = None if refusal else LLMatcher(view.tokenizer, text, log_level=0, limits=self._parser_limits())
        if matcher is not None and matcher.is_error():
            refusal = matcher.get_error()
        if matcher is None or refusal:
            raise InvalidRequestError(f"structured_outputs.{wanted.kind} cannot be used: {_first_lines(refusal)}")
        compiled = CompiledGrammar(matcher, wanted.kind in ("grammar", "structural_tag") and _names_tokens(text))
        self._keep(key, compiled, len(text))
        return compiled

    def view(self) -> TokenView:
        """Made on first use: it takes about half a second, in which no other thread runs."""
        if self._view is None:
            self._view = token_view(self._tokenizer, self._vocab_size)
        return self._view

    def prepare(self) -> None:
        """Make ready what the first request would wait for. A model that cannot have grammars serves other requests."""
        try:
            self.view()
        except InvalidRequestError as error:
            logger.warning("%s", error)
            return
        self._trial.start()

    def close(self) -> None:
        self._trial.close()

    def __len__(self) -> int:
        return len(self._compiled)

    def _keep(self, key: bytes, compiled: CompiledGrammar, num_chars: int) -> None:
        with self._lock:
            self._compiled[key] = (compiled, num_chars)
            total = sum(size for _, size in self._compiled.values())
            while len(self._compiled) > self.limits.max_cached or (
                total > self.limits.max_cached_chars and len(self._compiled) > 1
            ):
                _, (_, size) = self._compiled.popitem(last=False)
                total -= size

    def _parser_limits(self) -> LLParserLimits:
        return LLParserLimits(
            initial_lexer_fuel=self.limits.initial_lexer_fuel,
            step_lexer_fuel=self.limits.step_lexer_fuel,
            step_max_items=self.limits.step_max_items,
            max_lexer_states=self.limits.max_lexer_states,
            verbose_errors=False,
        )


def token_view(tokenizer: Tokenizer, vocab_size: int) -> TokenView:
    eos = frozenset(token for token in tokenizer.eos_token_ids if token < vocab_size)
    if not eos:
        raise InvalidRequestError("structured outputs need a model with an end token: without one no answer could end")
    try:
        # Tokens that the head has and the tokenizer does not are never allowed.
        found = LLTokenizer(tokenizer.definition(), n_vocab=vocab_size, eos_token=sorted(eos))
    except ValueError as error:
        raise InvalidRequestError(f"structured outputs do not work with this model's tokenizer: {error}") from error
    special = {name: token for name, token in tokenizer.vocabulary().items() if token < vocab_size}
    special = {name: token for name, token in special.items() if found.is_special_token(token)}
    only_eos = np.zeros(vocab_size, dtype=bool)
    only_eos[sorted(eos)] = True
    return TokenView(found, vocab_size, eos, special, only_eos)


def _names_tokens(grammar: str) -> bool:
    """Whether a Lark grammar may hold `<|control|>` or `<[id]>`; text that only looks like it costs some time."""
    return re.search(r"<[^<>\s]+>", grammar) is not None


def _first_lines(text: str, num_chars: int = 400) -> str:
    """llguidance quotes the grammar in its messages; a client knows its own grammar."""
    text = " ".join(text.split())
    return text if len(text) <= num_chars else text[:num_chars] + "..."
