"""What a model that thinks wrote between <think> and </think>, apart from its answer, as the text comes in.

Some templates open the block themselves, so that the text begins inside it. `deepseek_r1` takes every text to do so;
the other parsers look at the prompt's end. A tag may come in pieces: what could still become one waits.

>>> splitter = ReasoningSplitter(begins_inside=False)
>>> splitter.feed("<think>Hm", last=False), splitter.feed("m.</thi", last=False), splitter.feed("nk>Yes", last=True)
(('Hm', ''), ('m.', ''), ('', 'Yes'))
"""

from collections.abc import Sequence

from paceline.core.tokenizer import Tokenizer
from paceline.serve.generate.call import Call

OPEN, CLOSE = "<think>", "</think>"
PARSERS = {"deepseek_r1": True, "qwen3": False, "think": False}  # name -> every text begins inside the block
TAIL_TOKENS = 16  # of a prompt: enough for the tag, be it a token for each character, and the lines after it


class ReasoningSplitter:
    def __init__(self, begins_inside: bool) -> None:
        self._begins_inside = begins_inside
        self._held = ""  # text that may still become a tag
        self._state = "start"  # then "inside", then "after"

    def feed(self, text: str, last: bool) -> tuple[str, str]:
        """The new text's share of the thoughts, and of the answer."""
        self._held += text
        if self._state == "start" and not self._begin(last):
            return "", ""
        thoughts = self._take_thoughts(last) if self._state == "inside" else ""
        answer = ""
        if self._state == "after":
            answer, self._held = self._held, ""
        return thoughts, answer

    def _begin(self, last: bool) -> bool:
        """Whether it is known how the text begins."""
        begin = self._held.lstrip()
        if len(begin) < len(OPEN) and OPEN.startswith(begin) and not last:
            return False
        if begin.startswith(OPEN):
            self._held = begin.removeprefix(OPEN)
        self._state = "inside" if begin.startswith(OPEN) or self._begins_inside else "after"
        return True

    def _take_thoughts(self, last: bool) -> str:
        thoughts, found, rest = self._held.partition(CLOSE)
        if found:
            self._state, self._held = "after", rest
            return thoughts
        waiting = 0 if last else _num_waiting(self._held)
        cut = len(self._held) - waiting
        thoughts, self._held = self._held[:cut], self._held[cut:]
        return thoughts


def _num_waiting(text: str) -> int:
    """How many characters at the end of the text are the beginning of the closing tag."""
    return next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)


def has_thoughts(call: Call) -> bool:
    """Whether there may be some: an answer that is held to a format from its first token on has none, unless the format
    itself closes the block."""
    form = call.params.structured_outputs
    if form is None:
        return True
    if call.plan is not None:
        return not call.plan.required and not call.body.formats()
    return form.kind == "structural_tag" or CLOSE in (form.regex or form.grammar or "")


def splitter_for(call: Call, prompt: Sequence[int], tokenizer: Tokenizer) -> ReasoningSplitter:
    assert call.reasoning_parser is not None
    if not has_thoughts(call):
        return ReasoningSplitter(begins_inside=False)
    tail = tokenizer.decode(prompt[-TAIL_TOKENS:], False)
    return ReasoningSplitter(PARSERS[call.reasoning_parser] or tail.rstrip().endswith(OPEN))
