"""Noise made natively against ops/random.py, on every instruction set this machine has."""

from typing import Any

import numpy as np
import pytest
import torch

from paceline.ops import sampling
from paceline.ops.native.noise import keyed_gumbel, noise_available, race_winner
from paceline.ops.random import Purpose, gumbel, id_constants, keyed_uniform, noise_key, race
from paceline.ops.sampling import NodeRow, choose_tokens
from paceline.ops.sampling_types import FloatRow
from tests.toy import toy_request

pytestmark = [
    pytest.mark.skipif(not noise_available(), reason="the native kernels are not built"),
    pytest.mark.usefixtures("instruction_set"),
]

SIZES = (1, 15, 16, 17, 1000, 49152)


def key_of(seed: int) -> int:
    return noise_key(seed, 5 * seed, Purpose.SAMPLE)


@pytest.mark.parametrize("size", SIZES)
def test_gumbel_noise_is_that_of_numpy(size: int) -> None:
    for seed in range(20):
        expected = gumbel(keyed_uniform(key_of(seed), size))
        np.testing.assert_allclose(keyed_gumbel(key_of(seed), id_constants(size)), expected, rtol=0, atol=1e-6)


def test_some_ids_alone_get_the_noise_they_have_among_all() -> None:
    ids = np.array([3, 4, 17, 40, 999])
    alone = keyed_gumbel(key_of(1), id_constants(1000, ids))
    assert np.array_equal(alone, keyed_gumbel(key_of(1), id_constants(1000))[ids])


def test_a_draft_is_the_token_that_numpy_would_choose() -> None:
    """Only the first two of a row that are within 2e-6 may change places: odds of 1e-3 that any row has such."""
    generator = np.random.default_rng(0)
    for seed in range(500):
        scores = generator.normal(0.0, 3.0, 4096).astype(np.float32)
        drafted = (scores + keyed_gumbel(key_of(seed), id_constants(4096))).argmax()
        assert drafted == (scores + gumbel(keyed_uniform(key_of(seed), 4096))).argmax()


def race_by_numpy(logits: FloatRow, temperature: float, key: int) -> int:
    with np.errstate(over="ignore"):
        scores = (logits - logits.max()) / np.float32(temperature)
    return race(scores, keyed_uniform(key, len(logits)))


@pytest.mark.parametrize("temperature", [1e-20, 1e-3, 0.3, 0.7, 1.0, 1.7, 100.0])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 5.0, 30.0, 1e4, 1e37])
def test_a_race_has_the_winner_of_numpy(temperature: float, spread: float) -> None:
    generator = np.random.default_rng(0)
    sizes = [1, 2, 15, 16, 17, 63, 64, 65, 100, *range(900, 1000)]
    decided = 0
    for seed, size in enumerate(sizes):
        logits = generator.normal(0.0, spread, size).astype(np.float32)
        logits[1:][generator.random(size - 1) < seed / 200] = -np.inf
        logits[0] += generator.choice([0.0, 8.0])  # sometimes one token is far ahead
        winner = race_winner(logits, temperature, key_of(seed))
        assert winner is None or winner == race_by_numpy(logits, temperature, key_of(seed))
        decided += winner is not None
    assert decided == len(sizes)  # too close to call: odds of 1e-7


def test_a_race_over_a_real_vocabulary_has_the_winner_of_numpy() -> None:
    generator = np.random.default_rng(1)
    for seed in range(300):
        logits = generator.gumbel(0.0, generator.choice([0.5, 1.5, 3.0]), 49152).astype(np.float32)
        assert race_winner(logits, 1.0, key_of(seed)) == race_by_numpy(logits, 1.0, key_of(seed))


def test_a_race_with_few_bits_of_logits_has_the_winner_of_numpy() -> None:
    """Many tokens tie before the noise comes."""
    generator = np.random.default_rng(2)
    for seed in range(300):
        logits = generator.integers(-6, 3, 3000).astype(np.float32)
        assert race_winner(logits, 0.9, key_of(seed)) == race_by_numpy(logits, 0.9, key_of(seed))


def test_the_winner_does_not_depend_on_where_tokens_lie() -> None:
    """Each token in turn is the one that wins, from the first lane to the last, past whole blocks too."""
    for size in (70, 128):
        for token in range(size):
            logits = np.full(size, -40.0, dtype=np.float32)
            logits[token] = 0.0
            assert race_winner(logits, 1.0, key_of(token)) == token


def test_a_tie_is_left_to_numpy() -> None:
    """Near 1 two of many ids have the same number."""
    for seed in range(5):
        uniform = keyed_uniform(key_of(seed), 49152)
        order = uniform.argsort(kind="stable")
        at = int(np.flatnonzero(np.diff(uniform[order]) == 0)[seed])
        tied = order[at : at + 2]
        logits = np.full(49152, -np.inf, dtype=np.float32)
        logits[tied] = 3.0
        assert race_winner(logits, 0.7, key_of(seed)) is None
        row = NodeRow(toy_request("0", [1] * (5 * seed), seed=seed, temperature=0.7), (), 0)
        assert choose_tokens([row], torch.from_numpy(logits)[None]) == [tied.min()]


@pytest.mark.parametrize(
    "options", [{}, {"logit_bias": {3: 2.5}}, {"presence_penalty": 0.5}, {"top_k": 20}, {"min_p": 0.1}], ids=str
)
def test_rows_get_the_same_tokens_with_and_without_the_kernels(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    logits = 3.0 * torch.randn(60, 500, generator=torch.Generator().manual_seed(0))
    logits[7, 11] = torch.nan
    logits[8, 12] = torch.inf
    logits[9] = -torch.inf
    requests = [toy_request(str(i), [1, 2, 3], seed=i, temperature=0.5 + i / 60, **options) for i in range(60)]
    rows = [NodeRow(request, (5, 6)[: i % 3], i) for i, request in enumerate(requests)]
    natively = choose_tokens(rows, logits)
    monkeypatch.setattr(sampling, "race_winner", lambda *_: None)
    by_numpy = choose_tokens(rows, logits)
    assert list(map(str, natively)) == list(map(str, by_numpy))
    assert [i for i, token in enumerate(natively) if not isinstance(token, int)] == [7, 8, 9]


def test_a_row_that_cannot_be_sampled_is_left_to_numpy() -> None:
    row = np.zeros(100, dtype=np.float32)
    for place in (0, 15, 16, 50, 99):
        for value in (np.nan, np.inf):
            unusable = row.copy()
            unusable[place] = value
            assert race_winner(unusable, 1.0, key_of(0)) is None
            unusable[: place + 1] = value
            assert race_winner(unusable, 1.0, key_of(0)) is None
    assert race_winner(np.full(100, -np.inf, dtype=np.float32), 1.0, key_of(0)) is None
    assert race_winner(row.astype(np.float64), 1.0, key_of(0)) is None
    assert race_winner(np.zeros(200, dtype=np.float32)[::2], 1.0, key_of(0)) is None
    assert race_winner(row, 1e-40, key_of(0)) is None
