"""Noise made natively against ops/random.py, on every instruction set this machine has."""

import numpy as np
import pytest

from paceline.ops.native.noise import keyed_gumbel, noise_available
from paceline.ops.random import Purpose, gumbel, id_constants, keyed_uniform, noise_key

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
