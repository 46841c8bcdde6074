"""Every new grammar is first compiled in another process, which is ended where it takes too long.

A compiler of regular expressions and grammars can be made to run for hours by a few lines of text (an intersection of
thirty patterns is enough), or out of memory or stack. In a thread nothing could stop it. The process is started once
and kept; it is asked line by line.
"""

import base64
import logging
import subprocess
import sys
import threading
import time
from selectors import EVENT_READ, DefaultSelector

logger = logging.getLogger("paceline")

MAX_MEMORY_BYTES = 4 << 30  # address space of the process: a choice, far above what allowed texts take
START_S = 20.0  # a busy machine may take seconds to start an interpreter


class Trial:
    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_possible = True
        self._lock = threading.Lock()

    def refusal(self, grammar: str) -> str:
        """Why the grammar cannot be used; empty where nothing speaks against it."""
        with self._lock:
            process = self._running()
            if process is None:
                return ""
            assert process.stdin is not None and process.stdout is not None
            begin_s = time.perf_counter()
            try:
                process.stdin.write(base64.b64encode(grammar.encode("utf-8", "surrogatepass")) + b"\n")
                process.stdin.flush()
                answer = _line(process, self._max_s)
            except OSError:
                answer = None
            if answer is not None:
                return base64.b64decode(answer).decode()
            took_s = time.perf_counter() - begin_s
            self._end()
        if took_s < self._max_s:
            return "its compiler ran out of memory or stack. Use fewer or simpler patterns"
        return f"compiling it took more than {self._max_s:g} s. Use fewer or simpler patterns"

    def start(self) -> None:
        with self._lock:
            self._running()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _running(self) -> "subprocess.Popen[bytes] | None":
        """The process; None where none can be started here: then a grammar is compiled without trial."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        if self._is_possible:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _CHILD, str(MAX_MEMORY_BYTES)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                self._is_possible = _line(self._process, START_S) == b"ready\n"
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


def _line(process: "subprocess.Popen[bytes]", max_s: float) -> bytes | None:
    """What the process answers within the time; None where it does not, or is no more."""
    assert process.stdout is not None
    with DefaultSelector() as selector:
        selector.register(process.stdout, EVENT_READ)
        if not selector.select(max_s):
            return None
    line = process.stdout.readline()
    return line if line.endswith(b"\n") else None


# The whole program of the process. It imports nothing of ours: it is to be there quickly.
_CHILD = """
import base64, os, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, ValueError, OSError):
    pass
from llguidance import LLMatcher
out = sys.stdout.buffer
out.write(b"ready\\n"); out.flush()
for line in sys.stdin.buffer:
    grammar = base64.b64decode(line).decode("utf-8", "surrogatepass")
    failed, said = LLMatcher.validate_grammar_with_warnings(grammar)
    text = "; ".join(said) if failed else ""
    out.write(base64.b64encode(text.encode("utf-8", "replace")) + b"\\n"); out.flush()
"""
