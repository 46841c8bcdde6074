"""The decoder on a GPU: the same logits as on the CPU, and, with the Triton kernels, the same bits in any batch."""

import pytest
import torch

from paceline.core.tree import DraftTree
from paceline.models.decoder import Decoder
from tests.forward_batches import Pool, Rows
from tests.models.small_models import hf_model, small_decoder, tokens

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TREE = DraftTree([3, 4, 5, 6, 7, 8, 9], [-1, 0, 0, -1, 3, 2, 4])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def cache(decoder: Decoder, num_slots: int) -> torch.Tensor:
    config = decoder.config
    shape = (config.num_layers, 2, num_slots, config.num_kv_heads, config.head_dim)
    return torch.zeros(shape, dtype=decoder.dtype, device="cuda")


def mixed_pass(pool: Pool, decoder: Decoder, device: str) -> torch.Tensor:
    """A prompt, then a pass with a prompt chunk and a tree beside each other."""
    prompt, other = tokens(decoder.config, 90, seed=3), tokens(decoder.config, 6, seed=4)
    kv = cache(decoder, pool.num_slots).to(device)
    decoder.forward(pool.batch(Rows(0, 0, prompt[:-1]), device=device), kv)
    parts = Rows(1, 0, other, DraftTree.chain([5, 6])), Rows(0, 89, prompt[-1:], TREE)
    return decoder.forward(pool.batch(*parts, device=device), kv).logits.cpu()


@pytest.mark.parametrize(
    "variant", ["llama", "llama-biases", "mistral-window", "qwen2-window", "qwen3", "gemma3", "phi3", "smollm3"]
)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gpu_computes_what_the_cpu_does(variant: str, batch_invariant: bool, dtype: torch.dtype) -> None:
    """Half precision may be off by a small multiple of what the same dtype is off by on the CPU."""
    hf = hf_model(variant)
    pool = Pool(2, 100)
    exact = mixed_pass(pool, small_decoder(hf), "cpu")
    found = mixed_pass(pool, small_decoder(hf, dtype=dtype, device="cuda", batch_invariant=batch_invariant), "cuda")
    worst = (found - exact).abs().max().item()
    rounding = (mixed_pass(pool, small_decoder(hf, dtype=dtype), "cpu") - exact).abs().max().item()
    print(f"{variant} {dtype} invariant={batch_invariant}: worst {worst:.2e}, on the CPU {rounding:.2e}")
    assert worst < (1e-4 if dtype == torch.float32 else 2.5 * rounding)


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen3", "gemma3", "smollm3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_batch_chunking_or_trees(variant: str, dtype: torch.dtype) -> None:
    decoder = small_decoder(hf_model(variant), dtype=dtype, device="cuda", batch_invariant=True)
    pool = Pool(9, 100)
    prompt = tokens(decoder.config, 90, seed=3)
    whole = decoder.forward(pool.batch(Rows(0, 0, prompt), device="cuda"), cache(decoder, pool.num_slots)).logits

    kv = cache(decoder, pool.num_slots)
    others = [Rows(r, 0, tokens(decoder.config, 7 * r, seed=r)) for r in range(1, 9)]
    first = decoder.forward(pool.batch(*others, Rows(0, 0, prompt[:50]), device="cuda"), kv).logits[-50:]
    rest = [decoder.forward(pool.batch(Rows(0, i, prompt[i : i + 1]), device="cuda"), kv).logits for i in range(50, 90)]
    assert torch.equal(torch.cat([first, *rest]), whole)

    tree = decoder.forward(pool.batch(Rows(0, 89, prompt[-1:], TREE), device="cuda"), kv).logits
    assert torch.equal(tree[0], whole[-1])
    for node in range(len(TREE)):
        path = [TREE.token_ids[i] for i in TREE.ancestors(node)]
        plain = pool.batch(Rows(1, 0, prompt + path), device="cuda")
        assert torch.equal(tree[1 + node], decoder.forward(plain, cache(decoder, pool.num_slots)).logits[-1])
