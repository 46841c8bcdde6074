"""Bad words found from the end of the output are those that a look at every word finds."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.bad_words import BadWords

TOKENS = st.integers(0, 3)


def plain_twin(words: Sequence[Sequence[int]], output_ids: Sequence[int]) -> set[int]:
    """The last token of every word whose other tokens are what the output ends with, one word after the other."""
    banned = set()
    for *start, last in words:
        if len(start) <= len(output_ids) and list(output_ids[len(output_ids) - len(start) :]) == start:
            banned.add(last)
    return banned


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(TOKENS, min_size=1, max_size=5).map(tuple), max_size=12),
    st.lists(TOKENS, max_size=8),
)
def test_the_same_tokens_are_banned_as_by_the_plain_twin(words: list[tuple[int, ...]], output: list[int]) -> None:
    bad_words = BadWords(words)
    assert {int(token) for ids in bad_words.endings(output) for token in ids} == plain_twin(words, output)
    assert bool(bad_words) == bool(words)
    assert bad_words.always_banned == {word[0] for word in words if len(word) == 1}


class CountedOutput(list[int]):
    """An output that counts how often it is looked at."""

    num_looks = 0

    def __getitem__(self, index: object) -> object:  # type: ignore[override]
        self.num_looks += 1
        return super().__getitem__(index)  # type: ignore[call-overload]


def test_a_row_costs_the_longest_word_begun_and_not_the_number_of_words() -> None:
    output = CountedOutput([7] * 100)
    words = [(i, j, 1) for i in range(100, 200) for j in range(100)] + [(7, 7, 5)]
    assert [ids.tolist() for ids in BadWords(words).endings(output)] == [[5]]
    assert output.num_looks <= 3
