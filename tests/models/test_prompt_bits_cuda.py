"""Prompts on a GPU: however a prompt is cut into passes, and whatever shares them, its rows have the same bits."""

import pytest
import torch

from paceline.core.tree import DraftTree
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from tests.forward_batches import Pool, Rows
from tests.models.small_models import hf_config_dict, random_weights

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("variant", ["llama", "qwen2-window"])
def test_logits_of_a_prompt_are_the_same_whole_in_captured_chunks_row_by_row_and_as_drafts(variant: str) -> None:
    from paceline.models.captured_passes import CapturedPasses
    from paceline.models.fused_decoder import FusedDecoder
    from paceline.models.padded_decoder import PaddedDecoder
    from paceline.models.static_inputs import PassRoom

    size = {"num_hidden_layers": 2, "vocab_size": 96, "head_dim": 64, "max_position_embeddings": 512}
    config = config_from_dict(hf_config_dict(variant, **size))
    fused = FusedDecoder(Decoder(config, random_weights(config), dtype=torch.bfloat16, device="cuda"))
    pool = Pool(3, 320, block_size=16)
    shape = (config.num_layers, 2, pool.num_slots, config.num_kv_heads, config.head_dim)
    text = [(7 * i + i * i // 5) % config.vocab_size for i in range(300)]
    empty = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    whole = fused.forward(pool.batch(Rows(0, 0, text)), empty.clone()).logits

    kv = empty.clone()
    room = PassRoom(kv, pool.block_size, max_blocks=20, max_num_seqs=4)
    captured = PaddedDecoder(fused, CapturedPasses(fused), room, sizes=(1, 16, 48, 128, 256))
    found = []
    for begin, end in [(0, 5), (5, 45), (45, 142), (142, 240)]:
        before = Rows(1, begin, [text[i] for i in range(begin, begin + end % 23)])  # shifts the rows that follow
        batch = pool.batch(before, Rows(0, begin, text[begin:end]), Rows(2, 0, text[:9], DraftTree.chain([1, 2])))
        logits = captured.forward(batch, kv).logits
        found.append(logits[len(before.new) : len(before.new) + end - begin].clone())
    for at in range(240, 260):
        found.append(captured.forward(pool.batch(Rows(0, at, text[at : at + 1])), kv).logits.clone())
    drafted = Rows(0, 260, text[260:261], DraftTree.chain(text[261:300]))
    found.append(captured.forward(pool.batch(drafted), kv).logits.clone())
    assert captured.clock.num_eager == 0
    assert torch.equal(torch.cat(found), whole)
