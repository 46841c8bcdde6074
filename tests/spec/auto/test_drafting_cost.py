"""Host time of a step for the lookup methods: small, and hardly growing with the context.

CPU time of the thread, medians of many steps, and the fastest of a few runs, so that other work on the machine is not
measured."""

import random
import statistics
import time

import pytest

from paceline.spec.engine_parts import EngineParts
from paceline.spec.proposer import RequestPass, StepContext
from paceline.spec.speculator import Speculator
from tests.toy import toy_request

SERVICES = EngineParts(vocab_size=50_000, max_model_len=65_536)
LIMIT_MS = {2_000: 0.2, 32_000: 0.5}


def text(kind: str, length: int) -> list[int]:
    rng = random.Random(0)
    if kind == "random":
        return [rng.randrange(50_000) for _ in range(length)]
    if kind == "one token":
        return [7] * length
    if kind == "loop":
        return [i % 40 for i in range(length)]
    # natural: few words, often in the phrases that were used before
    tokens: list[int] = []
    while len(tokens) < length:
        if len(tokens) > 50 and rng.random() < 0.3:
            start = rng.randrange(len(tokens) - 20)
            tokens += tokens[start : start + rng.randrange(3, 20)]
        else:
            tokens.append(int(rng.paretovariate(0.5)) % 50_000)
    return tokens[:length]


def median_ms(method: str, kind: str, length: int, num_steps: int = 40) -> float:
    speculator = Speculator({"method": method}, SERVICES)
    tokens = text(kind, length + 8 * num_steps)
    past = toy_request("past", [1, 2, 3])
    past.token_ids += text(kind, 4_000)  # the cache of past outputs is in use as well
    past.status = type(past.status).FINISHED
    request = toy_request("a", tokens[:length], max_tokens=10**6)
    speculator.observe(StepContext([], gone=[past]))
    speculator.propose(StepContext([request]))  # takes in the prompt
    times = []
    for i in range(num_steps):
        new = tokens[length + 3 * i : length + 3 * i + 3]  # three tokens a step
        request.token_ids += new
        step = StepContext([request], [RequestPass(request, range(1), 0, 1, new_token_ids=new, logits_row=0)])
        begin_s = time.thread_time()
        speculator.observe(step)
        speculator.propose(step)
        times.append(time.thread_time() - begin_s)
    return statistics.median(times) * 1e3


CASES = [(method, kind) for method in ("ngram", "suffix") for kind in ("natural", "random", "one token", "loop")]


def least_ms(method: str, kind: str) -> tuple[float, float]:
    """At both lengths, in turns, so that other work on the machine slows both."""
    runs = [[median_ms(method, kind, length) for length in LIMIT_MS] for _ in range(5)]
    return min(short for short, _ in runs), min(long for _, long in runs)


@pytest.mark.parametrize(("method", "kind"), CASES)
def test_drafting_stays_within_its_order_of_magnitude(method: str, kind: str) -> None:
    short, long = least_ms(method, kind)
    assert short < 5 * LIMIT_MS[2_000]
    assert long < 5 * LIMIT_MS[32_000]


@pytest.mark.slow  # the limits themselves, and a ratio of two short times: they need an idle machine
@pytest.mark.parametrize(("method", "kind"), CASES)
def test_drafting_is_cheap_and_grows_at_most_with_the_logarithm(method: str, kind: str) -> None:
    short, long = least_ms(method, kind)
    assert short < LIMIT_MS[2_000]
    assert long < LIMIT_MS[32_000]
    # log(32,000) / log(2,000) is 1.4; the rest is for caches that no longer hold the whole index
    assert long < 2.0 * short + 0.02, f"{short:.3f} ms at 2,000 tokens, {long:.3f} ms at 32,000"
