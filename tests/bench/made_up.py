"""A recording made by hand: a target whose next token is one of two, the first with a known chance."""

import random

from paceline.bench.replay.recording import Recorded

VOCAB_SIZE = 24


def fork(token: int) -> list[int]:
    """The two likeliest successors of a token."""
    return [(token + 1) % VOCAB_SIZE, (token + 7) % VOCAB_SIZE]


def recording(first: float, num_requests: int = 4, num_tokens: int = 160) -> list[Recorded]:
    return [_one(i, first, num_tokens) for i in range(num_requests)]


def _one(i: int, first: float, num_tokens: int) -> Recorded:
    rng = random.Random(i)
    prompt = [i]
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(fork(tokens[-1])[rng.random() >= first])
    top = [fork(token) for token in tokens[:-1]]
    # after each wrong guess, too, the target's opinion is known: a fork like any other
    rejected = [(position, [token], fork(token)) for position, pair in enumerate(top) for token in pair]
    return Recorded(f"made-up-{i}", "toy", prompt, tokens[1:], top, 0.0, VOCAB_SIZE, rejected=rejected)
