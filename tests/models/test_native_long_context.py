"""Few rows over a long context, whose attention the threads share: the bits of whole tasks, which prompts run as."""

import pytest
import torch

from paceline.core.tree import DraftTree
from paceline.ops import native
from tests.forward_batches import Pool, Rows
from tests.models.small_models import tokens
from tests.models.test_native_decoder import bit_decoder, kv_cache

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))

LENGTH = 530  # of the context: above where threads begin to share it, and no multiple of anything


@pytest.mark.parametrize(
    "path", [("float32", None), ("bfloat16", None), ("float16", "gguf"), ("int16", "gguf")], ids=str
)
@pytest.mark.parametrize("variant", ["qwen3", "mistral-window"])
def test_few_rows_after_a_long_prompt_have_the_bits_of_the_prompt(
    path: tuple[str, str | None], variant: str, instruction_set: str
) -> None:
    decoder = bit_decoder(path, variant=variant)
    prompt = tokens(decoder.config, LENGTH + 4)
    pool = Pool(2, LENGTH + 20)
    cache = kv_cache(decoder, pool.num_slots)
    whole = decoder.forward(pool.batch(Rows(0, 0, prompt)), cache).logits
    short = decoder.forward(pool.batch(Rows(1, 0, prompt[:9])), cache).logits
    chain = DraftTree.chain(prompt[LENGTH + 1 :])
    for num_threads in (1, 2, 3, 7):
        decoder.set_num_threads(num_threads)
        for count in (1, 2, 4):
            rows = Rows(0, LENGTH, prompt[LENGTH : LENGTH + count])
            assert torch.equal(decoder.forward(pool.batch(rows), cache).logits, whole[LENGTH : LENGTH + count])
        nodes = Rows(0, LENGTH, prompt[LENGTH : LENGTH + 1], chain)
        beside = Rows(1, 8, prompt[8:9])  # a request of its own, with a short context
        together = decoder.forward(pool.batch(nodes, beside), cache).logits
        assert torch.equal(together, torch.cat([whole[LENGTH:], short[8:]])), num_threads
