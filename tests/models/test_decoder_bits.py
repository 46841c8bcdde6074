"""The torch decoder's promise about bits, on weights made here: wherever its tensors lie, in any batch.

Needs no other library, so that it can run as another machine (tests/test_other_machines.py).
"""

import pytest
import torch

from paceline.core.tree import DraftTree
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from tests.forward_batches import Pool, Rows
from tests.models.small_models import hf_config_dict, kv_cache, random_weights, run, tokens
from tests.placement import NUM_THREADS, OFFSETS, at_offset, weights_at_offset

TREE = DraftTree([3, 4, 5, 6, 7, 8, 9], [-1, 0, 0, -1, 3, 2, 4])
# Rows of 39 numbers, and keys of 56 bytes: whatever stands behind another is misaligned.
CONFIG = config_from_dict(hf_config_dict("llama", hidden_size=39, intermediate_size=53, head_dim=14))
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=NUM_THREADS, ids=lambda count: f"{count} threads", autouse=True)
def num_threads(request: pytest.FixtureRequest, one_thread: None) -> int:
    torch.set_num_threads(request.param)  # `one_thread` sets it back
    return int(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_bits_do_not_depend_on_where_weights_and_cache_lie(batch_invariant: bool, dtype: torch.dtype) -> None:
    """A file's weights lie where its header ends, and a cache where it was allocated: elsewhere in the next process."""
    weights = {name: weight.to(dtype) for name, weight in random_weights(CONFIG).items()}
    pool = Pool(1, 24)
    prompt = tokens(CONFIG, 11)
    batches = [pool.batch(Rows(0, 0, prompt[:-1])), pool.batch(Rows(0, 10, prompt[-1:], TREE))]
    batches.append(pool.batch(Rows(0, 10, prompt[-1:])))  # one row: another kernel of the BLAS
    expected = None
    for offset in OFFSETS:
        moved = weights_at_offset(weights, offset)
        decoder = Decoder(CONFIG, moved, dtype=dtype, batch_invariant=batch_invariant)
        for cache_offset in (0, offset):
            cache = at_offset(kv_cache(decoder, pool.num_slots), cache_offset)
            logits = torch.cat([decoder.forward(batch, cache).logits for batch in batches])
            expected = logits if expected is None else expected
            assert torch.equal(logits, expected), (offset, cache_offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiled", [True, False], ids=["tiled", "row by row"])
def test_a_row_has_the_same_bits_alone_in_a_batch_in_a_chunk_and_in_a_tree(
    tiled: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tiled:
        monkeypatch.setattr("paceline.ops.linear.place_in_tile_is_free", lambda *shape: False)
    decoder = Decoder(CONFIG, random_weights(CONFIG), dtype=dtype, batch_invariant=True)
    prompt, other = tokens(CONFIG, 21, seed=1), tokens(CONFIG, 13, seed=2)
    pool = Pool(2, 32)
    whole = run(decoder, pool.batch(Rows(0, 0, prompt)), pool.num_slots)
    cache = kv_cache(decoder, pool.num_slots)
    single = [decoder.forward(pool.batch(Rows(0, i, [token])), cache).logits for i, token in enumerate(prompt)]
    assert torch.equal(torch.cat(single), whole)
    together = run(decoder, pool.batch(Rows(1, 0, other), Rows(0, 0, prompt)), pool.num_slots)
    assert torch.equal(together[13:], whole)
    tree = run(decoder, pool.batch(Rows(1, 0, other), Rows(0, 0, prompt, TREE)), pool.num_slots)[-len(TREE) :]
    for node in range(len(TREE)):
        path = [TREE.token_ids[i] for i in TREE.ancestors(node)]
        assert torch.equal(tree[node], run(decoder, pool.batch(Rows(0, 0, prompt + path)), pool.num_slots)[-1]), node
