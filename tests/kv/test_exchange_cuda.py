"""KV blocks between two engines on a GPU, on captured passes of the fused kernels: the same tokens as computed here."""

from pathlib import Path

import pytest
import torch

from paceline.engine.core import EngineCore
from paceline.kv.offload import OffloadOption
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from paceline.models.padded_decoder import PaddedDecoder
from paceline.models.static_inputs import PassRoom
from tests.kv.test_exchange import PROMPT, received, sent
from tests.models.small_models import hf_config_dict, random_weights
from tests.toy import EOS, VOCAB, run_all, toy_core, toy_request

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("method", [None, {"method": "eagle3", "model": "untrained", "draft_min_prob": 0.0}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_after_an_import_and_from_a_folder_are_those_computed_here(
    dtype: torch.dtype, method: dict[str, object] | None, tmp_path: Path
) -> None:
    from paceline.models.captured_passes import CapturedPasses
    from paceline.models.fused_decoder import FusedDecoder

    config = config_from_dict(hf_config_dict("qwen3", vocab_size=VOCAB, eos_token_id=EOS))
    fused = FusedDecoder(Decoder(config, random_weights(config), dtype=dtype, device="cuda"))

    def capture(room: PassRoom) -> PaddedDecoder:
        return PaddedDecoder(fused, CapturedPasses(fused), room, sizes=(1, 2, 4, 8, 16, 48))

    def make() -> EngineCore:
        return toy_core(method, decoder=fused, capture=capture, num_blocks=40)

    def answer(core: EngineCore) -> list[int]:
        request = toy_request("r", PROMPT, max_tokens=12, seed=5, temperature=1.0, ignore_eos=True)
        return run_all(core, [request])[0]

    source = make()
    source.keep_blocks(OffloadOption(1 << 24, tmp_path))
    expected = answer(source)
    keys, data = sent(source)
    core = make()
    assert received(core, keys, data) == 7 and answer(core) == expected
    source.kv.pool.forget_all()
    assert answer(source) == expected
    assert source.offload is not None and source.offload.num_brought_back >= 7
