"""The process in which a new grammar is tried: `trial.py` has the other side.

It is sent the limits, says that it is ready, and then answers one wish after the other: (True, the grammar's text) or
(False, why it cannot be used). Where a wish takes more processor time than the limit, the kernel ends the process.
"""

import pickle
import signal
import sys
from typing import BinaryIO, Final

from llguidance import LLMatcher

from paceline.core.niceness import go_behind_others
from paceline.core.structured import StructuredOutputsParams
from paceline.errors import InvalidRequestError
from paceline.structured.grammar_text import grammar_text, refusal
from paceline.structured.limits import GrammarLimits

Wish = tuple[StructuredOutputsParams, dict[str, int]]  # and the model's control tokens, where they matter
Answer = tuple[bool, str]
READY: Final = (True, "ready")

MAX_MEMORY_BYTES: Final = 4 << 30  # address space of the process: a choice, far above what allowed texts take


def answer(wish: Wish, limits: GrammarLimits) -> Answer:
    wanted, special_tokens = wish
    try:
        text = grammar_text(wanted, limits, special_tokens)
    except InvalidRequestError as error:
        return False, str(error)
    failed, said = LLMatcher.validate_grammar_with_warnings(text)
    return (False, refusal(wanted, "; ".join(said))) if failed else (True, text)


def main() -> None:
    _limit_memory()
    given, out = sys.stdin.buffer, sys.stdout.buffer
    limits: GrammarLimits = pickle.load(given)
    _send(READY, out)
    while True:
        try:
            wish: Wish = pickle.load(given)
        except EOFError:
            return
        _limit_time(limits.max_compile_s)
        found = answer(wish, limits)
        _limit_time(0.0)  # none
        _send(found, out)


def _send(found: Answer, out: BinaryIO) -> None:
    pickle.dump(found, out)
    out.flush()


def _limit_time(seconds: float) -> None:
    """Processor time: on a machine with much else to do nothing is refused that would not be refused elsewhere."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass


if __name__ == "__main__":
    go_behind_others()
    main()
