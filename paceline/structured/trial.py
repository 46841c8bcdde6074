"""Every new grammar is first written and compiled in another process, which is ended where it takes too long.

A compiler of regular expressions and grammars can be made to run for hours by a few lines of text (an intersection of
thirty patterns is enough), or out of memory or stack. In a thread nothing could stop it. The process is started once
and kept. It also looks through schemas: in a thread of ours that would keep the interpreter from the engine.
"""

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from selectors import EVENT_READ, DefaultSelector

from paceline.core.structured import StructuredOutputsParams
from paceline.errors import InvalidRequestError
from paceline.structured.grammar_text import grammar_text, refusal
from paceline.structured.limits import GrammarLimits
from paceline.structured.trial_process import READY, Answer

logger = logging.getLogger("paceline")

START_S = 60.0  # a machine with twenty others at work was seen to take 7 s to start an interpreter
# Without an answer or an end for so long: something is wrong with the process. Its limit of processor time ends it long
# before, even where it gets a fiftieth of a processor.
MAX_WAIT_S = 60.0
TOO_LARGE = "its compiler ran out of memory or stack. Use fewer or simpler patterns"


class Trial:
    def __init__(self, limits: GrammarLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._is_possible = True
        self._lock = threading.Lock()

    def grammar_text(self, wanted: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
        """What llguidance is to compile, and can. Raises InvalidRequestError, with the reason."""
        tokens = dict(special_tokens) if wanted.kind == "structural_tag" else {}
        with self._lock:
            process = self._running()
            if process is None:
                return grammar_text(wanted, self._limits, tokens)
            assert process.stdin is not None
            try:
                process.stdin.write(pickle.dumps((wanted, tokens)))
                process.stdin.flush()
                answer = _answer(process, MAX_WAIT_S)
                waited_in_vain = False
            except OSError as error:
                answer, waited_in_vain = None, isinstance(error, TimeoutError)
            if answer is None:
                self._end()
        if answer is None:
            too_slow = waited_in_vain or process.returncode == -signal.SIGPROF  # by the kernel, at the limit
            raise InvalidRequestError(refusal(wanted, self._too_slow() if too_slow else TOO_LARGE))
        good, text = answer
        if not good:
            raise InvalidRequestError(text)
        return text

    def start(self) -> None:
        with self._lock:
            self._running()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _too_slow(self) -> str:
        return f"compiling it took more than {self._limits.max_compile_s:g} s. Use fewer or simpler patterns"

    def _running(self) -> "subprocess.Popen[bytes] | None":
        """The process; None where none can be started here: then a grammar is compiled without trial."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        if self._is_possible:
            try:
                self._process = _started(self._limits)
                self._is_possible = _answer(self._process, START_S) == READY
            except OSError:
                self._is_possible = False
        if not self._is_possible:
            logger.warning("grammars are compiled without a limit of time: no process can be started for it here")
            self._end()
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def __del__(self) -> None:
        self._end()


def _started(limits: GrammarLimits) -> "subprocess.Popen[bytes]":
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # what can be imported here can be there
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "paceline.structured.trial_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(limits))
    process.stdin.flush()
    return process


def _answer(process: "subprocess.Popen[bytes]", max_s: float) -> Answer | None:
    """What the process says next; None where it is no more. Raises TimeoutError where nothing comes in time."""
    assert process.stdout is not None
    with DefaultSelector() as selector:
        selector.register(process.stdout, EVENT_READ)
        if not selector.select(max_s):
            raise TimeoutError
    try:
        answer: Answer = pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError):
        return None
    return answer
