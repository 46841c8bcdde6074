"""From what a request asks for to a compiled grammar, cached by its text.

Compiling is done by whoever asks: the caller's thread offline, a thread of `AsyncLLM` for it, never the engine's.
llguidance lets other threads run meanwhile.
"""

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from paceline.core.constraint import Allowed
from paceline.core.processors import borrowed_processor
from paceline.core.request import Request
from paceline.core.structured import StructuredOutputsParams
from paceline.core.tokenizer import Tokenizer
from paceline.errors import InvalidRequestError
from paceline.structured.beside_pass import LateMasks
from paceline.structured.grammar_text import refusal
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
    late_masks: LateMasks = field(default_factory=LateMasks)


class Grammars:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, limits: GrammarLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self.late_masks = LateMasks()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._view: TokenView | None = None
        self._trial = Trial(limits)
        self._lock = threading.Lock()  # callers may be in several threads
        # With the length of its text, least recently used first.
        self._compiled: OrderedDict[StructuredOutputsParams, tuple[CompiledGrammar, int]] = OrderedDict()

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
        compiled = self.known(wanted)
        if compiled is not None:
            return compiled
        with borrowed_processor():
            text = self._trial.grammar_text(wanted, view.special_tokens)
            matcher = LLMatcher(view.tokenizer, text, log_level=0, limits=self._parser_limits())
        if matcher.is_error():
            raise InvalidRequestError(refusal(wanted, matcher.get_error()))
        compiled = CompiledGrammar(matcher, wanted.kind in ("grammar", "structural_tag") and _names_tokens(text))
        self._keep(wanted, compiled, len(text))
        return compiled

    def known(self, wanted: StructuredOutputsParams) -> CompiledGrammar | None:
        """What was compiled before; None where it has to be compiled."""
        with self._lock:
            known = self._compiled.get(wanted)
            if known is not None:
                self._compiled.move_to_end(wanted)
        return None if known is None else known[0]

    def view(self) -> TokenView:
        """Made on first use: it takes about half a second, in which no other thread runs."""
        if self._view is None:
            self._view = replace(token_view(self._tokenizer, self._vocab_size), late_masks=self.late_masks)
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

    def _keep(self, wanted: StructuredOutputsParams, compiled: CompiledGrammar, num_chars: int) -> None:
        with self._lock:
            self._compiled[wanted] = (compiled, num_chars)
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
