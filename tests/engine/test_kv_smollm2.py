"""On the default model: computed here, imported, resumed and brought back from a folder, tokens and log-probabilities
are the same bits, and `eagle3` drafts as well as where the prompt was read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.core.outputs import RequestOutput
from paceline.models.loader import LoadedModel
from paceline.spec.config.speculative_config import at_default_size
from tests.kv.test_exchange import received, sent

TEXT = (
    "Paged memory keeps the keys and values of a prompt in blocks of one size. A block that is full can be found by a "
    "hash of its tokens and of all that came before, so a second prompt that begins alike need not compute it again. "
    "List three reasons why this matters for a server, and explain each of them in one sentence:\n1."
)
NUM_TOKENS = 12
KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "seed": 11}}


def params(kind: str) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, **KINDS[kind])


@pytest.fixture(scope="module")
def make(smollm2_float32: LoadedModel) -> Callable[..., LLM]:
    def build(method: str, **options: Any) -> LLM:
        defaults: dict[str, Any] = {"kv_cache_memory_bytes": 200 << 20, "max_model_len": 512}
        return LLM(smollm2_float32, at_default_size({"method": method}), **(defaults | options))

    return build


def bits(output: RequestOutput) -> tuple[Any, ...]:
    [sample] = output.outputs
    return sample.token_ids, sample.token_logprobs


def passes(output: RequestOutput) -> tuple[int, list[int]]:
    assert output.metrics is not None
    return output.metrics.num_steps, output.metrics.accepted_per_position


def computed_here(llm: LLM, kind: str, prompt: Any = TEXT) -> RequestOutput:
    llm.reset_prefix_cache()
    [output] = llm.generate(prompt, params(kind))
    assert output.num_cached_tokens == 0
    return output


@pytest.mark.parametrize("method", [pytest.param("none", marks=pytest.mark.slow), "eagle3"])
def test_imported_resumed_and_kept_are_computed_here_to_the_bit(
    make: Callable[..., LLM], method: str, tmp_path: Path
) -> None:
    source, kept = (make(method, kv_offload=f"{tmp_path}:200MB") for _ in range(2))
    prompt = source.get_tokenizer().encode(TEXT)
    source.generate(TEXT, SamplingParams(temperature=0.0, max_tokens=1))
    keys, data = sent(source.engine.core, prompt)
    assert source.engine.core.offload is not None
    source.engine.core.offload.flush()
    source.engine.core.kv.kept = None  # what it computes from now on is nobody else's
    imported = make(method)
    assert imported.engine.core.exchange.fingerprint == kept.engine.core.exchange.fingerprint
    assert received(imported.engine.core, keys, data) == len(keys) == (len(prompt) - 1) // 16 > 3
    for kind in KINDS:
        expected = computed_here(source, kind)
        for llm in (imported, kept):
            [output] = llm.generate(TEXT, params(kind))
            assert output.num_cached_tokens == 16 * len(keys)
            assert bits(output) == bits(expected)
            assert passes(output) == passes(expected), "tokens per pass"
        tokens, logprobs = bits(expected)
        for cut in (1, NUM_TOKENS // 2):
            rest = computed_here(source, kind, {"prompt": TEXT, "output_token_ids": tokens[:cut]})
            assert bits(rest) == (tokens[cut:], logprobs[cut:])
    assert kept.engine.core.offload is not None and kept.engine.core.offload.num_brought_back == len(keys)
