"""The engine on captured passes of the fused kernels, on a GPU: one answer, alone, in a batch, and with drafts."""

import pytest
import torch

from paceline.core.request import Request
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from paceline.models.padded_decoder import PaddedDecoder
from paceline.models.static_inputs import PassRoom
from tests.engine.test_padded_passes import METHODS, NEED_LOGITS, PLAIN, WARM, asked, clock_of
from tests.models.small_models import hf_config_dict, random_weights
from tests.toy import EOS, VOCAB, run_all, toy_core

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

OPTIONS = [PLAIN, WARM, {"temperature": 20.0}, *NEED_LOGITS]


def requests() -> list[Request]:
    return asked(OPTIONS, count=2 * len(OPTIONS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_answers_do_not_depend_on_company_drafts_chunks_or_graphs(dtype: torch.dtype) -> None:
    from paceline.models.captured_passes import CapturedPasses
    from paceline.models.fused_decoder import FusedDecoder

    config = config_from_dict(hf_config_dict("qwen3", vocab_size=VOCAB, eos_token_id=EOS))
    fused = FusedDecoder(Decoder(config, random_weights(config), dtype=dtype, device="cuda"))

    def capture(room: PassRoom) -> PaddedDecoder:
        return PaddedDecoder(fused, CapturedPasses(fused), room, sizes=(1, 2, 4, 8, 16, 48))

    def eager(room: PassRoom) -> PaddedDecoder:
        return PaddedDecoder(fused, CapturedPasses(fused), room, sizes=(0,))

    alone = [run_all(toy_core(None, decoder=fused, capture=eager), [request])[0] for request in requests()]
    assert len({tuple(answer) for answer in alone}) > 4, "the model was meant to say different things"
    for method in METHODS.values():
        core = toy_core(method, decoder=fused, capture=capture, num_blocks=40, max_num_batched_tokens=24)
        assert run_all(core, requests()) == alone
        assert clock_of(core).num_passes > 10 and clock_of(core).num_eager == 0
