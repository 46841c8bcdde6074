"""Keys and values in bytes: what is stored, how near it is, and that bits depend on nothing else."""

import pytest
import torch
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.core.kv_tensor import allocate_kv
from paceline.core.model_config import ModelConfig
from paceline.core.tree import EMPTY_TREE
from paceline.errors import InvalidOptionError
from paceline.kv.storage import kv_bytes_per_token
from paceline.models.native import NativeDecoder
from paceline.ops import native
from paceline.ops.native.team import set_waiting
from paceline.spec.config.speculative_config import at_default_size
from tests.forward_batches import Pool, Rows
from tests.models.small_models import random_weights, tokens
from tests.models.test_native_decoder import TREE, small_config

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))

CONFIG = small_config("llama", max_position=2048)


def decoder_of(kv_dtype: torch.dtype, num_threads: int = 1) -> NativeDecoder:
    return NativeDecoder(CONFIG, random_weights(CONFIG), num_threads=num_threads, kv_dtype=kv_dtype)


def cache_of(decoder: NativeDecoder, pool: Pool) -> Tensor:
    return allocate_kv(CONFIG, pool.num_slots, decoder.dtype, decoder.device)


def widened(cache: Tensor) -> Tensor:
    """[layers, 2, slots, heads, head_dim] float32: a slot is the bytes of all heads, then their scales."""
    slots = cache.flatten(3)
    size = CONFIG.num_kv_heads * CONFIG.head_dim
    scales = slots[..., size:].contiguous().view(torch.float32)
    return slots[..., :size].unflatten(-1, (CONFIG.num_kv_heads, CONFIG.head_dim)).float() * scales[..., None]


def stored(config: ModelConfig, kv_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a pass over 40 tokens stores in float32 and in this type: its first layer, which does not depend on others,
    and all layers."""
    pool = Pool(1, 48)
    batch = pool.batch(Rows(0, 0, tokens(config, 40), EMPTY_TREE))
    caches = []
    for dtype in (torch.float32, kv_dtype):
        decoder = NativeDecoder(config, random_weights(config), num_threads=1, kv_dtype=dtype)
        caches.append(allocate_kv(config, pool.num_slots, decoder.dtype, decoder.device))
        decoder.forward(batch, caches[-1])
    return caches[0][0], caches[1]


def test_what_is_stored_is_within_half_a_step(instruction_set: str) -> None:
    exact, cache = stored(CONFIG, torch.int8)
    found = widened(cache)[0]
    step = exact.abs().amax(-1, keepdim=True) / 127
    assert ((exact - found).abs() <= 0.501 * step + 1e-9).all()
    assert ((found.abs().amax((-2, -1)) > 0).sum(-1) == 40).all()  # slots, of keys and of values


@pytest.mark.parametrize("context", [40, 700])  # the longer one is shared by threads over positions
def test_bits_do_not_depend_on_chunks_threads_or_trees(context: int, instruction_set: str) -> None:
    pool = Pool(2, context + 48)
    prompt = tokens(CONFIG, context)
    set_waiting("spin")
    try:
        expected: Tensor | None = None
        for num_threads, size in ((1, context), (2, context), (2, 64)):
            decoder = decoder_of(torch.int8, num_threads)
            cache = cache_of(decoder, pool)
            for begin in range(0, context - 1, size):
                part = prompt[begin : min(begin + size, context - 1)]
                decoder.forward(pool.batch(Rows(0, begin, part, EMPTY_TREE)), cache)
            beside = [Rows(1, 0, prompt[:5], EMPTY_TREE)] if size == 64 else []
            logits = decoder.forward(pool.batch(Rows(0, context - 1, prompt[-1:], TREE), *beside), cache).logits
            expected = logits[: 1 + len(TREE.token_ids)] if expected is None else expected
            assert torch.equal(logits[: len(expected)], expected), (num_threads, size)
    finally:
        set_waiting("auto")


def test_logits_are_near_those_of_floating_point(instruction_set: str) -> None:
    pool = Pool(1, 128)
    batch = pool.batch(Rows(0, 0, tokens(CONFIG, 120), EMPTY_TREE))
    exact, found = (
        decoder.forward(batch, cache_of(decoder, pool)).logits.log_softmax(-1)
        for decoder in (decoder_of(torch.float32), decoder_of(torch.int8))
    )
    assert 0 < float((exact.exp() * (exact - found)).sum(-1).max()) < 1e-3


def test_memory_is_little_more_than_half_of_float16() -> None:
    half, byte = (kv_bytes_per_token(CONFIG, dtype) for dtype in (torch.float16, torch.int8))
    assert byte == half / 2 * (1 + 4 / CONFIG.head_dim)
    assert cache_of(decoder_of(torch.int8), Pool(1, 16)).nbytes == 16 * byte


def test_a_speculative_answer_is_the_plain_one() -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = ["The tide comes in and", "One two three, one two three, one two"]
    answers = []
    for method in ("none", "eagle3"):
        config = at_default_size({"method": method})  # drafts are to be verified, pay or not
        llm = LLM("smollm2-135m", config, kv_cache_dtype="int8", num_kv_blocks=64, max_model_len=256)
        assert "int8 keys and values" in llm.engine.model.execution
        answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert answers[0] == answers[1]


def test_it_is_refused_where_the_native_kernels_do_not_run() -> None:
    with pytest.raises(InvalidOptionError, match="native CPU kernels"):
        LLM("smollm2-135m", {"method": "none"}, kv_cache_dtype="int8", kernels="torch")
    with pytest.raises(InvalidOptionError, match="one of auto, float16, int16, int8, fp8, fp8_e4m3"):
        LLM("smollm2-135m", {"method": "none"}, kv_cache_dtype="fp8_e5m2")
