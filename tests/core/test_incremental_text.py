"""Text piece by piece is the text of the whole, and no token costs more than the one before it."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.incremental_text import MAX_PENDING, IncrementalText

SPECIAL = 256


class ByteDecoder:
    """Bytes are tokens, one token is special; like some tokenizers it drops a text's leading space."""

    def __init__(self) -> None:
        self.most_decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.most_decoded = max(self.most_decoded, len(token_ids))
        return bytes(token for token in token_ids if token != SPECIAL).decode(errors="replace").removeprefix(" ")


class UnboundedTwin:
    """The same without a limit to what may be pending."""

    def __init__(self, decoder: ByteDecoder, context: Sequence[int]) -> None:
        self.text, self._decoder, self._token_ids = "", decoder, list(context)
        self._prefix, self._read = 0, len(self._token_ids)

    def append(self, token: int) -> None:
        self._token_ids.append(token)
        before, after = self._decode(self._read), self._decode(len(self._token_ids))
        if len(after) > len(before) and not after.endswith("\N{REPLACEMENT CHARACTER}"):
            self.text += after[len(before) :]
            self._prefix, self._read = self._read, len(self._token_ids)

    def finish(self) -> None:
        self.text += self._decode(len(self._token_ids))[len(self._decode(self._read)) :]

    def _decode(self, end: int) -> str:
        return self._decoder.decode(self._token_ids[self._prefix : end])


def whole_text(token_ids: Sequence[int], context: Sequence[int] = b"x") -> tuple[str, int]:
    """The pieces together, and the most tokens that were decoded at once."""
    decoder = ByteDecoder()
    text = IncrementalText(decoder, list(context))
    pieces = [text.append(token) for token in token_ids]
    return "".join(pieces) + text.finish(), decoder.most_decoded


TEXTS = st.text(st.sampled_from("a é€😀"), max_size=30).map(lambda text: list(text.encode()))
BROKEN = st.lists(st.sampled_from([0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF]), max_size=60)
# After a whole character: half of one before a long run of special tokens is settled as it stands.
SILENT = st.integers(0, 60).map(lambda count: [ord("a"), *[SPECIAL] * count])


@settings(max_examples=500, deadline=None)
@given(st.lists(TEXTS | BROKEN | SILENT, max_size=6))
def test_pieces_add_up_to_what_the_unbounded_twin_releases(parts: list[list[int]]) -> None:
    token_ids = [token for part in parts for token in part]
    twin = UnboundedTwin(ByteDecoder(), b"x")
    for token in token_ids:
        twin.append(token)
    twin.finish()
    text, most_decoded = whole_text(token_ids)
    assert text == twin.text
    assert most_decoded <= 2 * MAX_PENDING + 8


def test_a_run_of_tokens_without_text_costs_no_more_than_its_beginning() -> None:
    word = list(b" word")
    for token, text in ((0xFF, "\N{REPLACEMENT CHARACTER}" * 2_000), (SPECIAL, "")):
        found, most_decoded = whole_text([token] * 2_000 + word)
        assert found == text + " word"
        assert most_decoded <= 2 * MAX_PENDING + 8
