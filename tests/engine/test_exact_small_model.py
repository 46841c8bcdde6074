"""A small real decoder in the engine: the same tokens alone and in a batch, with speculation on and off.

On every path that promises bits, with one thread and two, and with weights that lie elsewhere. Short, so that it can
run as another machine (tests/test_other_machines.py).
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.core.forward import Decoder as AnyDecoder
from paceline.core.request import Request
from paceline.engine.core import EngineCore
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from paceline.models.native import NativeDecoder
from paceline.ops import native
from tests.models.small_models import hf_config_dict, random_weights, tokens
from tests.placement import NUM_THREADS, weights_at_offset
from tests.toy import EOS, VOCAB, run_all, toy_core, toy_request

CONFIG = config_from_dict(
    hf_config_dict("qwen3", vocab_size=VOCAB, hidden_size=39, intermediate_size=53, head_dim=14, eos_token_id=EOS)
)
PATHS: dict[str, dict[str, Any]] = {
    "torch float32": {"dtype": torch.float32},
    "torch bfloat16": {"dtype": torch.bfloat16},
    "native float32": {"dtype": torch.float32},
    "native int8": {"dtype": torch.float16, "quantization": "int8"},
}


@pytest.fixture(params=NUM_THREADS, ids=lambda count: f"{count} threads")
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def small_decoder(path: str, num_threads: int, offset_bytes: int) -> AnyDecoder:
    weights = weights_at_offset(random_weights(CONFIG), offset_bytes)
    if path.startswith("torch"):
        return Decoder(CONFIG, weights, batch_invariant=True, **PATHS[path])
    if not native.available():
        pytest.skip(str(native.unavailable_reason()))
    return NativeDecoder(CONFIG, weights, num_threads=num_threads, **PATHS[path])


def requests() -> list[Request]:
    """Seven prompts of different lengths, every other one sampled; some sample from nearly level logits."""
    made = [
        toy_request(
            f"r{i}",
            tokens(CONFIG, 3 + 5 * i % 13, seed=i),
            max_tokens=6,
            seed=i,
            temperature=(0.0, 0.8, 0.0, 20.0)[i % 4],
            ignore_eos=True,
            logprobs=2,
        )
        for i in range(7)
    ]
    for request in made:
        request.logprobs = []
    return made


def answers(core: EngineCore, asked: list[Request]) -> list[tuple[Any, ...]]:
    """Tokens with their log-probabilities, in which a single bit of the logits shows."""
    run_all(core, asked)
    return [(request.output_token_ids, request.logprobs) for request in asked]


@pytest.mark.parametrize("path", PATHS)
def test_speculation_batches_and_addresses_change_nothing(path: str, num_threads: int) -> None:
    decoder = small_decoder(path, num_threads, 0)
    assert decoder.batch_invariant
    alone = [answers(toy_core(decoder=decoder, prefix_caching=False), [request])[0] for request in requests()]
    assert len({tuple(output) for output, _ in alone}) > 4, "the model was meant to say different things"
    sequences = [request.prompt_token_ids + output for request, (output, _) in zip(requests(), alone, strict=True)]
    oracle: dict[str, object] = {"method": "oracle", "sequences": sequences, "accuracy": 0.7, "shape": [3, 2, 1]}
    moved = small_decoder(path, num_threads, 4)
    for speculative in (None, oracle | {"num_speculative_tokens": 4, "node_budget": 9}):
        core = toy_core(speculative, decoder=moved, max_num_batched_tokens=24)
        assert answers(core, requests()) == alone
