"""The torch decoder against transformers, and against itself in every way a pass can be cut."""

import pytest
import torch
from forward_batches import Pool, Rows
from small_models import VARIANTS, hf_model, run, small_decoder, tokens

from paceline.core.tree import DraftTree

TREE = DraftTree([3, 4, 5, 6, 7, 8, 9], [-1, 0, 0, -1, 3, 2, 4])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logits_match_transformers(variant: str, batch_invariant: bool) -> None:
    hf = hf_model(variant)
    decoder = small_decoder(hf, batch_invariant=batch_invariant)
    prompt = tokens(decoder.config, 75)
    pool = Pool(1, 80)
    with torch.no_grad():
        expected = hf(torch.tensor([prompt])).logits[0]
    found = run(decoder, pool.batch(Rows(0, 0, prompt)), pool.num_slots)
    worst = (found - expected).abs().max().item()
    print(f"{variant}: worst logit difference {worst:.2e} of {expected.abs().max():.1f}")
    assert worst < 1e-4
