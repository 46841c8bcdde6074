"""Stop strings: the automaton finds what a search for every string finds, at a cost that their number does not set."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.stop_strings import StopStrings
from paceline.engine.detokenizer import Detokenizer


class PieceDecoder:
    """Token i is the i-th piece of text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: object, skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[token] for token in token_ids)  # type: ignore[attr-defined]


class PlainTwin:
    """Every stop string looked for by itself, in the text around the newest piece."""

    def __init__(self, stop: list[str], include_stop: bool, min_tokens: int) -> None:
        self.text = ""
        self.stop, self.include_stop, self.min_tokens = stop, include_stop, min_tokens
        self.num_tokens = 0

    def append(self, piece: str) -> str | None:
        self.num_tokens += 1
        released = len(self.text)
        self.text += piece
        if not piece or self.num_tokens <= self.min_tokens:
            return None
        found: tuple[int, str] | None = None
        for stop in self.stop:
            at = self.text.find(stop, max(0, released - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return None
        at, stop = found
        self.text = self.text[: at + len(stop) if self.include_stop else at]
        return stop

    def stable_length(self) -> int:
        hold = 0
        for stop in self.stop:
            for length in range(min(len(stop) - 1, len(self.text)), hold, -1):
                if self.text.endswith(stop[:length]):
                    hold = length
                    break
        return len(self.text) - hold


TEXT = st.text("abé", max_size=4)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text("abé", min_size=1, max_size=5), max_size=6),
    st.lists(TEXT, max_size=14),
    st.booleans(),
    st.integers(0, 6),
)
def test_stop_strings_are_found_as_by_the_plain_twin(
    stop: list[str], pieces: list[str], include_stop: bool, min_tokens: int
) -> None:
    twin = PlainTwin(stop, include_stop, min_tokens)
    detokenizer = Detokenizer(PieceDecoder(pieces), [], StopStrings(stop), include_stop, min_tokens=min_tokens)
    for token, piece in enumerate(pieces):
        found = detokenizer.append(token)
        assert found == twin.append(piece)
        assert detokenizer.text == twin.text
        if found is not None:
            return
        assert detokenizer.stable_length() == twin.stable_length()


def seconds_per_token(num_strings: int) -> float:
    stop = StopStrings([f"stop {i} here" for i in range(num_strings)])
    detokenizer = Detokenizer(PieceDecoder(["stop ", "12", "7 "] * 100), [], stop)
    begin = time.perf_counter()
    for token in range(300):
        assert detokenizer.append(token) is None
        detokenizer.stable_length()
    return (time.perf_counter() - begin) / 300


def test_a_token_does_not_cost_more_with_more_stop_strings() -> None:
    """A search for every string costs thousands of times more; the factor leaves room for a busy machine."""
    assert min(seconds_per_token(20_000) for _ in range(3)) < 20 * min(seconds_per_token(1) for _ in range(3))
