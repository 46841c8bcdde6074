"""Answers that many may poll: each is rendered at most once in a while, however often it is asked for."""

import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Reader = TypeVar("Reader", bound=Hashable)

# A choice: at half of it a flood of polls costs twice the renderings, at twice of it figures may be twice as old. Below
# what the page and Prometheus notice, which ask once a second and less.
RENDER_EVERY_S = 0.1


class Polled(Generic[Reader]):
    """`render` says what a reader may see; readers never get what was rendered for another one."""

    def __init__(self, render: Callable[[Reader], bytes]) -> None:
        self._render = render
        self._bodies: dict[Reader, tuple[float, bytes]] = {}  # readers are few: one for each API key

    def body(self, reader: Reader) -> bytes:
        now_s = time.monotonic()
        rendered_s, body = self._bodies.get(reader, (-RENDER_EVERY_S, b""))
        if now_s - rendered_s >= RENDER_EVERY_S:
            body = self._render(reader)
            self._bodies[reader] = now_s, body
        return body
