"""The engine with keys and values in FP8, on the plain twins of the fused kernels: one answer, whatever drafts, chunks,
prefix hits, preemptions and rounds there are. Every row reads what is stored, its own keys and values included."""

from typing import Any

import pytest
import torch

from paceline.core.kv_tensor import FLOAT8, raw
from paceline.engine.core import EngineCore
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from tests.engine.test_padded_passes import METHODS, NEED_LOGITS, PLAIN, SIZES, WARM, asked, clock_of
from tests.engine.test_rounds import FIRST_LAYERS, HOT, LAYERS, NGRAM_TREE, TREE, on_device, with_rounds
from tests.models.small_models import hf_config_dict, random_weights
from tests.toy import EOS, VOCAB, run_all, toy_core

__all__ = ["on_device"]  # a fixture
OPTIONS = [PLAIN, WARM, NEED_LOGITS[0]]
SOME: dict[str, int] = {"count": 10, "max_tokens": 20}


def float8_decoder(kv_dtype: torch.dtype = FLOAT8) -> Decoder:
    config = config_from_dict(hf_config_dict("llama", vocab_size=VOCAB, eos_token_id=EOS))
    return Decoder(config, random_weights(config), batch_invariant=True, kv_dtype=kv_dtype)


def plain_answers(options: list[dict[str, Any]], **how: Any) -> list[list[int]]:
    """Each request in an engine of its own."""
    decoder = float8_decoder()
    return [run_all(toy_core(None, decoder=decoder), [request])[0] for request in asked(options, **how)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return plain_answers(OPTIONS, **SOME)


def check_is_float8(core: EngineCore) -> None:
    cache = core.runner.kv_cache
    assert cache.dtype == FLOAT8
    assert len(raw(cache).unique()) > 100, "keys and values of many sizes were stored"


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_plain_decoding_alone(method: str, expected: list[list[int]]) -> None:
    core = toy_core(METHODS[method], decoder=float8_decoder(), sizes=SIZES, max_num_batched_tokens=24)
    assert run_all(core, asked(OPTIONS, **SOME)) == expected
    assert clock_of(core).num_passes >= 6 and clock_of(core).num_eager == 0, "meant to run padded"
    check_is_float8(core)


def test_answers_are_the_same_under_preemption_chunks_and_prefix_hits(expected: list[list[int]]) -> None:
    core = toy_core(
        METHODS["recycling"], decoder=float8_decoder(), sizes=SIZES, num_blocks=18, max_num_batched_tokens=9
    )
    requests = asked(OPTIONS, **SOME)
    assert run_all(core, requests) == expected
    assert sum(request.num_preemptions for request in requests) > 0, "meant to run out of blocks"
    assert sum(request.num_cached_tokens for request in requests) > 0, "meant to share prefixes"
    check_is_float8(core)


@pytest.mark.parametrize("config", [NGRAM_TREE, TREE, LAYERS, FIRST_LAYERS], ids=lambda c: c["method"])
def test_answers_of_rounds_are_those_of_plain_decoding(config: dict[str, object], on_device: None) -> None:
    """Their walk moves accepted keys and values as bytes."""
    options: list[dict[str, Any]] = [PLAIN] if config is NGRAM_TREE else [HOT, PLAIN]
    decoder = float8_decoder()
    expected = run_all(toy_core(None, decoder=decoder), asked(options, 3, max_tokens=16))
    core = with_rounds(config, decoder)
    accepted = 0

    def count(step: Any) -> None:
        nonlocal accepted
        accepted += sum(len(one.accepted) for one in step.passes)

    core.observers.append(count)
    assert run_all(core, asked(options, 3, max_tokens=16)) == expected
    assert core.clock.num_ahead > 5 and accepted > 0, "meant to run in rounds, with accepted drafts"
    check_is_float8(core)


def test_answers_are_not_those_of_full_precision(expected: list[list[int]]) -> None:
    """Else this file would test nothing: a model of random weights notices FP8 soon."""
    full = toy_core(None, decoder=float8_decoder(torch.float32))
    assert run_all(full, asked(OPTIONS, **SOME)) != expected
