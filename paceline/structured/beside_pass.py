"""The masks of a step, computed in a thread of their own while the target runs.

    masks.begin(work)      before the pass is launched
    masks.collect()        after it, before anything is verified

llguidance computes without holding the interpreter, and so do the native kernels and CUDA: the two run side by side. A
thread that has not come to its turn until the pass is over is not waited for: the masks of a step take some tenths of a
millisecond, so the engine then makes them itself.

Where the native kernels have all processors, a mask beside the pass makes the pass longer by as much. So a request
whose token can be chosen first and shown to its grammar afterwards (`ops/sampling.py`) has none prepared: it needs one
only where the grammar refuses that token.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.errors import GrammarLimitError

Work = tuple[Request, DraftTree]


@dataclass(slots=True)
class LateMasks:
    """Masks that were not prepared when they were needed: the engine made them itself."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


class MaskMaker:
    def __init__(self, max_mask_s: float, late: LateMasks | None = None) -> None:
        self._max_mask_s = max_mask_s
        self._late = late or LateMasks()
        self._thread: ThreadPoolExecutor | None = None
        self._begun: tuple[_Batch, Future[None]] | None = None
        self._computing_s = 0.0  # wherever it was done
        self._waiting_s = 0.0  # of the engine: what was not hidden behind the pass
        self._num_steps = 0

    def begin(self, work: Sequence[Work]) -> None:
        """For each constrained request that will be verified, the tree that it is verified with."""
        if not work:
            return
        begin_s = time.perf_counter()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-masks")
        batch = _Batch(work)
        self._begun = batch, self._thread.submit(batch.run)
        self._num_steps += 1
        self._waiting_s += time.perf_counter() - begin_s

    def collect(self) -> None:
        if self._begun is None:
            return
        begin_s = time.perf_counter()
        (batch, running), self._begun = self._begun, None
        if running.cancel():
            batch.run()
        else:
            try:
                running.result(self._max_mask_s)
            except TimeoutError:
                self._give_up(batch)
        self._computing_s += batch.took_s
        self._waiting_s += time.perf_counter() - begin_s

    def _give_up(self, batch: "_Batch") -> None:
        """A grammar that takes this long would hold up everybody: its request ends, its thread is left behind."""
        waiting = batch.take_back()
        constraint = waiting[0][0].constraint
        assert constraint is not None and self._thread is not None
        constraint.fail(
            GrammarLimitError(
                f"to say what may come next took more than {self._max_mask_s:g} s. Use fewer or simpler patterns"
            )
        )
        self._thread.shutdown(wait=False)
        self._thread = None
        _Batch(waiting[1:]).run()

    def figures(self) -> dict[str, float]:
        """For `LLM.stats()`."""
        return {
            "num_masked_steps": self._num_steps,
            "num_late_masks": self._late.count,
            "mask_s": self._computing_s + self._late.seconds,
            "mask_wait_s": self._waiting_s + self._late.seconds,
        }


class _Batch:
    """The masks of one step, made one request after the other."""

    def __init__(self, work: Sequence[Work]) -> None:
        self._waiting = list(reversed(work))  # the one in progress is the last
        self.took_s = 0.0

    def run(self) -> None:
        begin_s = time.perf_counter()
        while self._waiting:
            request, tree = self._waiting[-1]
            if request.constraint is not None:
                request.constraint.prepare(tree)
            if self._waiting:
                self._waiting.pop()
        self.took_s = time.perf_counter() - begin_s

    def take_back(self) -> list[Work]:
        """What is not done, the one in progress first; a thread that comes to its end after all finds nothing left."""
        waiting, self._waiting = self._waiting, []
        return waiting[::-1]
