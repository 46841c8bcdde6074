"""Which passes of a padded decoder run from static buffers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.core.forward import TokenDraws
from paceline.models import padded_decoder
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from paceline.models.padded_decoder import PaddedDecoder
from paceline.models.plain_passes import DrawingDecoder, PlainPasses
from paceline.models.static_inputs import PassRoom
from tests.forward_batches import Pool, Rows
from tests.models.small_models import hf_config_dict, random_weights


def test_a_large_pass_is_padded_unless_its_logits_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the logits of a whole large pass would be too much; its tokens are the same either way."""
    monkeypatch.setattr(padded_decoder, "MAX_LOGITS_SIZE", 8)
    config = config_from_dict(hf_config_dict("llama", num_hidden_layers=1, vocab_size=40))
    drawing, pool = DrawingDecoder(Decoder(config, random_weights(config))), Pool(1, 40)
    kv = torch.zeros(1, 2, pool.num_slots, config.num_kv_heads, config.head_dim)
    room = PassRoom(kv, pool.block_size, max_blocks=10, max_num_seqs=2)
    decoder = PaddedDecoder(drawing, PlainPasses(drawing), room, sizes=(8, 16))
    tokens = []
    for count, wants_logits, is_eager in [(7, True, False), (12, True, True), (12, False, False), (17, False, True)]:
        draws = TokenDraws(np.zeros(1, np.float32), np.zeros(1, np.int64), np.full(1, count, np.int32))
        batch = pool.batch(Rows(0, 0, list(range(count))), all_logits=False)
        before = decoder.clock.num_eager
        output = decoder.forward(replace(batch, draws=draws, wants_logits=wants_logits), kv)
        assert decoder.clock.num_eager - before == is_eager
        assert len(output.logits) == wants_logits
        tokens.append(output.tokens)
    assert tokens[1] == tokens[2] is not None
