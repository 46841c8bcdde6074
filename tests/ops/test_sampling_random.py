"""Keyed noise: a pure function, uniform, and independent across ids, positions, seeds and purposes.

Statistical tests use fixed seeds, so they pass or fail for good; the odds stated are those of a correct generator
failing once when the seeds are chosen.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.ops.random import (
    Purpose,
    gumbel,
    keyed_coin,
    keyed_uniform,
    keyed_uniform_rows,
    noise_key,
    pick,
    race,
)

VOCAB = 4096


def keys(count: int) -> list[int]:
    """Neighbouring seeds, positions, purposes and indices: what a weak hash would mix up."""
    names = itertools.product(range(4), range(count // 16 or 1), (Purpose.SAMPLE, Purpose.DRAFT), (0, 1))
    return [noise_key(*name) for name in names]


def test_a_draw_is_a_pure_function_of_its_name() -> None:
    key = noise_key(7, 120, Purpose.SAMPLE)
    assert np.array_equal(keyed_uniform(key, VOCAB), keyed_uniform(noise_key(7, 120, Purpose.SAMPLE), VOCAB))
    others = [noise_key(8, 120, 1), noise_key(7, 121, 1), noise_key(7, 120, 2), noise_key(7, 120, 1, 1)]
    assert len({key, *others}) == 5


def test_keys_do_not_collide() -> None:
    """200,000 of 2^64 names: a correct hash has a collision with odds of about 1e-9."""
    names = itertools.product((0, 1, 2**63, -1), range(2500), range(1, 6), range(4))
    found = [noise_key(*name) for name in names]
    assert len(set(found)) == len(found)


def test_some_ids_alone_get_the_noise_they_have_among_all() -> None:
    key = noise_key(1, 2, Purpose.SAMPLE)
    ids = np.array([0, 5, 17, VOCAB - 1])
    assert np.array_equal(keyed_uniform(key, VOCAB, ids), keyed_uniform(key, VOCAB)[ids])


def test_rows_on_a_device_are_the_same_bits() -> None:
    many = keys(16)
    rows = keyed_uniform_rows(many, VOCAB, "cpu")
    assert all(np.array_equal(row.numpy(), keyed_uniform(key, VOCAB)) for row, key in zip(rows, many, strict=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_rows_on_cuda_are_the_same_bits() -> None:
    assert torch.equal(keyed_uniform_rows(keys(16), VOCAB, "cuda").cpu(), keyed_uniform_rows(keys(16), VOCAB, "cpu"))


def test_uniforms_are_inside_and_uniform() -> None:
    """Chi-square over 256 cells of 1M numbers; fails by chance with odds of 1e-4."""
    numbers = np.concatenate([keyed_uniform(key, VOCAB) for key in keys(256)])
    assert numbers.min() > 0.0 and numbers.max() < 1.0
    counts = np.histogram(numbers, bins=256, range=(0.0, 1.0))[0]
    assert stats.chisquare(counts).pvalue > 1e-4


def test_the_small_end_is_uniform_too() -> None:
    """A race is decided near 0: scaled up by 2^12, the numbers below 2^-12 are uniform. Odds 1e-4."""
    numbers = np.concatenate([keyed_uniform(noise_key(s, 9, Purpose.SAMPLE), 49152) for s in range(200)])
    small = numbers[numbers < 2.0**-12].astype(np.float64) * 2.0**12
    expected = len(numbers) * 2.0**-12
    assert abs(len(small) - expected) < 4 * expected**0.5
    assert stats.kstest(small, "uniform").pvalue > 1e-4


def test_neighbouring_rows_and_ids_are_independent() -> None:
    """Pairs (row, next row) and (id, next id) fill a 16 x 16 grid evenly, and no two rows correlate. Odds 1e-3."""
    rows = np.stack([keyed_uniform(key, VOCAB) for key in keys(256)])
    for first, second in ((rows[:-1], rows[1:]), (rows[:, :-1], rows[:, 1:])):
        counts = np.histogram2d(first.ravel(), second.ravel(), bins=16, range=[(0, 1), (0, 1)])[0]
        assert stats.chisquare(counts.ravel()).pvalue > 2e-4
    correlation = np.corrcoef(rows)
    pairs = correlation[np.triu_indices(len(rows), 1)] * VOCAB**0.5
    assert np.abs(pairs).max() < 6.0  # 2e-9 each, 33k pairs


def test_every_bit_of_a_name_changes_the_whole_row() -> None:
    """One bit of seed, position or index leaves nothing of the row: within 6 standard errors, odds 1e-7."""
    row = keyed_uniform(noise_key(3, 4, Purpose.SAMPLE), VOCAB)
    for bit in range(64):
        names = [(3 ^ (1 << bit), 4, 1, 0), (3, 4 ^ (1 << bit % 32), 1, 0), (3, 4, 1, 1 << bit % 32)]
        for name in names:
            other = keyed_uniform(noise_key(*name), VOCAB)
            assert abs(np.corrcoef(row, other)[0, 1]) * VOCAB**0.5 < 6.0


def test_coins_are_uniform_and_never_0_or_1() -> None:
    """Kolmogorov-Smirnov on 20,000 coins, odds 1e-4."""
    coins = [keyed_coin(noise_key(s, 5, Purpose.ACCEPT, i)) for s in range(200) for i in range(100)]
    assert min(coins) > 0.0 and max(coins) < 1.0
    assert stats.kstest(coins, "uniform").pvalue > 1e-4


def test_gumbel_noise_has_its_distribution() -> None:
    """Kolmogorov-Smirnov on 100,000 numbers, odds 1e-4."""
    numbers = np.concatenate([gumbel(keyed_uniform(key, VOCAB)) for key in keys(32)])[:100_000]
    assert stats.kstest(numbers, "gumbel_r").pvalue > 1e-4


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 30.0])
def test_a_race_is_the_argmax_with_gumbel_noise(spread: float) -> None:
    generator = np.random.default_rng(0)
    for i in range(200):
        logits = generator.normal(0.0, spread, 1000).astype(np.float32)
        logits[generator.integers(1000, size=i)] = -np.inf
        scores = logits - logits.max()
        uniform = keyed_uniform(noise_key(i, 0, Purpose.SAMPLE), 1000)
        assert race(scores, uniform) == int((scores + gumbel(uniform)).argmax())


def test_pick_gives_every_token_its_share() -> None:
    probs = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [pick(u, probs) for u in (1e-17, 0.2499, 0.2501, 1.0 - 2.0**-53, 1.0)] == [1, 1, 3, 3, 3]
