"""Our own prompts, one file per category, each a few templates and the words that fill them.

A template's fillings are all combinations of its words, so a category holds enough distinct prompts for a batch of
dozens without one answer being a copy of another.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Template:
    text: str  # with {name} for each entry of `words`
    words: Mapping[str, Sequence[str]]

    def fill(self) -> list[str]:
        names = list(self.words)
        return [
            self.text.format(**dict(zip(names, chosen, strict=True)))
            for chosen in itertools.product(*self.words.values())
        ]


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts whose answers are held to a schema."""

    template: Template
    schema: str  # JSON


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an agent's loop."""

    history: tuple[tuple[str, str], ...]  # (role, text) of what was said before
    text: str
    schema: str  # JSON, of the answer
