"""Profiles of products and passes: times that can be, for every instruction set."""

import pytest
import torch

from paceline.cli import doctor_profile
from paceline.cli.doctor import chain_pass
from paceline.errors import InvalidOptionError
from paceline.ops import native
from paceline.ops.native.profile import STAGES, STEPS, product_stages, profiled_steps
from tests.cli.test_doctor_verb import CONFIG, toy

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))


@pytest.mark.parametrize("kind", doctor_profile.KINDS)
def test_no_product_is_faster_than_its_dot_products_alone(kind: str, instruction_set: str) -> None:
    found = product_stages(kind, 32, inputs=96, limit_s=0.02)
    # Least times of many short runs; a tenth for the clock. A peak that is not one shows shares far above 1.
    assert 0.0 < found.dots_alone_s < 1.1 * found.block_s
    assert found.stages_s is not None and set(found.stages_s) == set(STAGES)
    assert max(found.stages_s, key=lambda name: found.stages_s[name]) == "dots"  # type: ignore[index]


def test_a_few_rows_are_not_taken_apart() -> None:
    assert product_stages("Q4_1", 1, inputs=64, limit_s=0.001).stages_s is None


def test_a_product_without_inputs_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="0 inputs"):
        product_stages("Q4_1", 1, inputs=0)


def test_steps_are_timed_only_while_asked_for() -> None:
    decoder = toy().decoder
    cache = torch.zeros(CONFIG.num_layers, 2, 64, CONFIG.num_kv_heads, CONFIG.head_dim)
    batch = chain_pass(3, 20, 4, CONFIG.vocab_size)
    with profiled_steps(decoder.handle, decoder.num_threads) as seconds:  # type: ignore[attr-defined]
        decoder.forward(batch, cache)
        assert seconds.shape == (decoder.num_threads, len(STEPS), 2)  # type: ignore[attr-defined]
        assert (seconds[0, :, 0] > 0).all() and (seconds >= 0).all()
    before = seconds.copy()
    decoder.forward(batch, cache)
    assert (seconds == before).all()
