"""Predicted outputs: the draft follows the client's text and realigns with it after every edit."""

import random
from typing import Any

import pytest

from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidOptionError, InvalidRequestError
from paceline.spec.lookup.followed_text import Alignment
from tests.spec.replaying import SERVICES, replay, speculator, tokens_per_step

RNG = random.Random(0)
TEXT = [RNG.randrange(1000, 9000) for _ in range(256)]
NAME, RENAMED = 7, [8, 9]
# an identifier that comes up all over the text
CODE = [NAME if i % 23 == 11 else token for i, token in enumerate(TEXT)]


def steps_of(prediction: list[int], output: list[int]) -> list[int]:
    return replay(speculator({"method": "prediction"}), [1, 2, 3], output, speculative={"prediction": prediction})


def test_a_right_prediction_is_followed_to_its_end() -> None:
    emitted = steps_of(TEXT, TEXT)
    assert tokens_per_step(emitted) > 12.0
    assert max(emitted) == 25  # a whole draft and the bonus token


def renamed(tokens: list[int]) -> list[int]:
    return [new for token in tokens for new in (RENAMED if token == NAME else [token])]


EDITS = {
    "renamed": renamed(CODE),
    "deleted line": CODE[:120] + CODE[132:],
    "inserted line": CODE[:140] + [RNG.randrange(10_000, 20_000) for _ in range(12)] + CODE[140:],
    "all three": renamed(CODE[:60] + CODE[72:140] + [RNG.randrange(10_000, 20_000) for _ in range(12)] + CODE[140:]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_cost_a_few_steps(edit: str) -> None:
    assert tokens_per_step(steps_of(EDITS[edit], CODE)) > 6.0


@pytest.mark.parametrize("edit", ["deleted line", "inserted line"])
def test_realigned_within_three_steps(edit: str) -> None:
    """After the step that met the edit, a draft of real length is accepted by the third step at the latest."""
    emitted = steps_of(EDITS[edit], CODE)
    ends = [sum(emitted[: i + 1]) for i in range(len(emitted))]
    at = 120 if edit == "deleted line" else 140
    met = next(i for i, end in enumerate(ends) if end > at)
    missing = 12 if edit == "deleted line" else 0  # tokens that the prediction does not have at all
    behind = next(i for i, end in enumerate(ends) if end > at + missing)
    assert max(emitted[met + 1 : behind + 4]) >= 5, emitted


def test_a_replacement_is_made_again_wherever_it_comes_up() -> None:
    alignment = Alignment([5, NAME, 6, 11, 12, NAME, 13])
    for token in [5, *RENAMED, 6, 11, 12]:
        alignment.read(token)
    assert list(alignment.expected(alignment.places[0])) == [*RENAMED, 13]


def test_a_replacement_that_was_wrong_is_not_made_again() -> None:
    alignment = Alignment([5, NAME, 6, 11, 12, NAME, 13, 14, NAME, 15])
    for token in [5, *RENAMED, 6, 11, 12, NAME, 13, 14]:  # the second time the name stays
        alignment.read(token)
    assert list(alignment.expected(alignment.places[0])) == [NAME, 15]


def test_unrelated_text_drafts_little_and_never_fails() -> None:
    noise = [RNG.randrange(20_000, 50_000) for _ in range(200)]
    assert tokens_per_step(steps_of(noise, TEXT)) < 1.05


def test_text_is_tokenized() -> None:
    output = SERVICES.tokenizer.encode("def area(w, h):\n    return w * h\n") if SERVICES.tokenizer else []
    emitted = replay(
        speculator({"method": "none"}), [1], output, speculative={"prediction": "def area(w, h):\n    return w + h\n"}
    )
    assert tokens_per_step(emitted) > 4.0


def test_a_request_without_a_prediction_is_decoded_plainly() -> None:
    assert set(replay(speculator({"method": "prediction"}), [1, 2], TEXT[:20])) == {1}


@pytest.mark.parametrize(
    ("prediction", "error", "says"),
    [
        ("", InvalidOptionError, "empty"),
        ([], InvalidOptionError, "empty"),
        (7, InvalidOptionError, "text or a list"),
        (["a"], InvalidOptionError, "text or a list"),
        ([1, 50_000], InvalidOptionError, "outside the vocabulary"),
        ([1] * 8193, InvalidRequestError, "more than the context of 8192"),
    ],
    ids=["empty text", "no tokens", "number", "words", "unknown token", "too long"],
)
def test_a_bad_prediction_is_refused_on_arrival(prediction: Any, error: type[Exception], says: str) -> None:
    spec = speculator({"method": "ngram"})
    with pytest.raises(error, match=says):
        spec.check_request(SamplingParams(speculative={"prediction": prediction}))
