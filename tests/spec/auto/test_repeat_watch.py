"""A text that begins to repeat itself is detected, however many tokens come at a time; other text is not."""

import random

from paceline.spec.auto.repeat_watch import RepeatWatch


def test_a_loop_is_detected_when_it_repeats() -> None:
    watch, text = RepeatWatch(), [1, 2, 3, 4, 5]
    assert not watch.repeats(text)
    for count, token in enumerate([1, 2, 3, 4, 5], 1):
        text.append(token)
        assert watch.repeats(text) == (count >= 4)  # 1 2 3 and 2 3 4 occurred before
    text.append(9)
    assert not watch.repeats(text)


def test_noise_is_not_detected_and_the_number_of_tokens_at_a_time_does_not_matter() -> None:
    rng = random.Random(0)
    text = [rng.randrange(1000) for _ in range(3000)]
    watch = RepeatWatch()
    assert not any(watch.repeats(text[:end]) for end in range(len(text)))
    slow, fast = RepeatWatch(), RepeatWatch()
    text += text[40:60]
    assert slow.repeats(text) and [fast.repeats(text[:end]) for end in range(0, len(text) + 1, 5)][-1]
    assert not RepeatWatch().repeats([1, 2])
