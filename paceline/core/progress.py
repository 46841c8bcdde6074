"""A progress bar for calls that take long: tqdm's where it is installed, else one line of our own.

A bar is shown where a person looks, on a terminal; `paceline`'s own verbs show their progress themselves.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

EVERY_S = 0.1  # tqdm's own pace: more often, and drawing would be felt; more seldom, and it would stutter
WIDTH = 30
_are_shown = True


class Bar(Protocol):
    def update(self, n: int = 1) -> Any: ...

    def close(self) -> Any: ...


class PlainBar:
    """What tqdm would draw, less its colours."""

    def __init__(self, total: int, desc: str) -> None:
        self._total, self._desc, self._done = total, desc, 0
        self._begin_s = self._drawn_s = time.monotonic()

    def update(self, n: int = 1) -> None:
        self._done += n
        if time.monotonic() - self._drawn_s > EVERY_S or self._done == self._total:
            self._draw()

    def close(self) -> None:
        print(file=sys.stderr)

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        filled = WIDTH * self._done // max(1, self._total)
        passed_s = self._drawn_s - self._begin_s
        line = f"{self._desc}: |{'#' * filled}{' ' * (WIDTH - filled)}| {self._done}/{self._total} [{passed_s:.1f}s]"
        print("\r" + line, end="", file=sys.stderr, flush=True)


def show_bars(shown: bool) -> None:
    """For a program that draws its own."""
    global _are_shown
    _are_shown = shown


@contextmanager
def progress(total: int, wanted: bool | Callable[..., Any]) -> Iterator[Callable[[int], None] | None]:
    """A function that is told how many are done; None where no bar is drawn.

    `wanted`: yes, no, or a class like tqdm."""
    bar = _bar(total, wanted)
    if bar is None:
        yield None
        return
    told = 0

    def tell(done: int) -> None:
        nonlocal told
        if done > told:
            bar.update(done - told)
            told = done

    try:
        yield tell
    finally:
        bar.close()


def _bar(total: int, wanted: bool | Callable[..., Any]) -> Bar | None:
    desc = "Processed prompts"
    if not isinstance(wanted, bool):
        return wanted(total=total, desc=desc)  # type: ignore[no-any-return]
    if not wanted or not _are_shown or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return PlainBar(total, desc)
    return tqdm(total=total, desc=desc, dynamic_ncols=True)  # type: ignore[no-any-return]
