"""The torch decoder against transformers, and against itself in every way a pass can be cut."""

from pathlib import Path

import pytest
import torch

from paceline.core.tree import DraftTree
from paceline.errors import InvalidOptionError
from paceline.models.loader import load_model
from tests.forward_batches import Pool, Rows
from tests.models.small_models import VARIANTS, hf_model, kv_cache, run, small_decoder, tokens

TREE = DraftTree([3, 4, 5, 6, 7, 8, 9], [-1, 0, 0, -1, 3, 2, 4])
CUTTABLE = ["llama", "mistral-window", "qwen2-window", "qwen3", "gemma3", "smollm3"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logits_match_transformers(variant: str, batch_invariant: bool) -> None:
    hf = hf_model(variant)
    decoder = small_decoder(hf, batch_invariant=batch_invariant)
    prompt = tokens(decoder.config, 75)
    pool = Pool(1, 80)
    with torch.no_grad():
        expected = hf(torch.tensor([prompt])).logits[0]
    found = run(decoder, pool.batch(Rows(0, 0, prompt)), pool.num_slots)
    worst = (found - expected).abs().max().item()
    print(f"{variant}: worst logit difference {worst:.2e} of {expected.abs().max():.1f}")
    assert worst < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float32(dtype: torch.dtype) -> None:
    hf = hf_model("qwen3")
    exact, half = small_decoder(hf), small_decoder(hf, dtype=dtype)
    prompt = tokens(exact.config, 20)
    pool = Pool(1, 20)
    batch = pool.batch(Rows(0, 0, prompt))
    expected, found = run(exact, batch, pool.num_slots), run(half, batch, pool.num_slots)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_smollm2_matches_transformers(smollm2: Path) -> None:
    import transformers

    hf = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    model = load_model(str(smollm2), dtype="float32", device="cpu", kernels="torch", quiet=True)
    prompt = model.tokenizer.chat_token_ids([{"role": "user", "content": "Name the capital of France."}])
    pool = Pool(1, len(prompt), block_size=16)
    with torch.no_grad():
        expected = hf(torch.tensor([prompt])).logits[0]
    found = run(model.decoder, pool.batch(Rows(0, 0, prompt)), pool.num_slots)
    worst = (found - expected).abs().max().item()
    print(f"smollm2: worst logit difference {worst:.2e} of {expected.abs().max():.1f}")
    assert worst < 1e-3


@pytest.mark.parametrize("variant", CUTTABLE)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_prompt_may_be_cut_anywhere_and_share_its_pass(variant: str, batch_invariant: bool) -> None:
    """Two requests, chunked differently and packed together, give what each gives alone in one pass."""
    decoder = small_decoder(hf_model(variant), batch_invariant=batch_invariant)
    prompts = [tokens(decoder.config, 21, seed=1), tokens(decoder.config, 13, seed=2)]
    pool = Pool(2, 24)
    whole = [run(decoder, pool.batch(Rows(r, 0, prompts[r])), pool.num_slots) for r in (0, 1)]
    cache = kv_cache(decoder, pool.num_slots)
    first = decoder.forward(pool.batch(Rows(0, 0, prompts[0][:9]), Rows(1, 0, prompts[1][:1])), cache).logits
    second = decoder.forward(pool.batch(Rows(1, 1, prompts[1][1:]), Rows(0, 9, prompts[0][9:])), cache).logits
    found = [torch.cat([first[:9], second[12:]]), torch.cat([first[9:], second[:12]])]
    for request in (0, 1):
        if batch_invariant:
            assert torch.equal(found[request], whole[request])
        else:
            torch.testing.assert_close(found[request], whole[request], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", CUTTABLE)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_tree_node_is_its_path_as_plain_text(variant: str, batch_invariant: bool) -> None:
    """Also beside another request with its own tree, and right after a prompt chunk in the same pass."""
    decoder = small_decoder(hf_model(variant), batch_invariant=batch_invariant)
    prompt, other = tokens(decoder.config, 11, seed=3), tokens(decoder.config, 6, seed=4)
    pool = Pool(2, 24)
    cache = kv_cache(decoder, pool.num_slots)
    decoder.forward(pool.batch(Rows(0, 0, prompt[:-1])), cache)
    batch = pool.batch(Rows(1, 0, other, DraftTree.chain([5, 6])), Rows(0, len(prompt) - 1, prompt[-1:], TREE))
    logits = decoder.forward(batch, cache).logits[-len(TREE) :]
    for node in range(len(TREE)):
        path = [TREE.token_ids[i] for i in TREE.ancestors(node)]
        alone = run(decoder, pool.batch(Rows(0, 0, prompt + path)), pool.num_slots)[-1]
        if batch_invariant:
            assert torch.equal(logits[node], alone), f"node {node}"
        else:
            torch.testing.assert_close(logits[node], alone, atol=2e-5, rtol=1e-5)


def test_a_masked_slot_may_hold_anything() -> None:
    """Rows must not read slots past their context or siblings' slots: poison them and nothing changes."""
    decoder = small_decoder(hf_model("llama"))
    prompt = tokens(decoder.config, 6)
    pool = Pool(1, 16)
    batch = pool.batch(Rows(0, 0, prompt))
    cache = kv_cache(decoder, pool.num_slots)
    clean = decoder.forward(batch, cache).logits
    cache.fill_(1e4)
    assert torch.equal(decoder.forward(batch, cache).logits, clean)


def test_logits_only_for_the_rows_asked_for() -> None:
    decoder = small_decoder(hf_model("llama"))
    pool = Pool(2, 8)
    parts = [Rows(0, 0, [1, 2, 3]), Rows(1, 0, [4, 5])]
    every = run(decoder, pool.batch(*parts), pool.num_slots)
    last = run(decoder, pool.batch(*parts, all_logits=False), pool.num_slots)
    torch.testing.assert_close(last, every[[2, 4]], atol=1e-5, rtol=1e-5)


def test_hidden_states_are_the_residual_stream() -> None:
    hf = hf_model("llama")
    decoder = small_decoder(hf)
    prompt = tokens(decoder.config, 9)
    pool = Pool(1, 12)
    with torch.no_grad():
        expected = hf(torch.tensor([prompt]), output_hidden_states=True).hidden_states  # last one: after the norm
    batch = pool.batch(Rows(0, 0, prompt))
    output = decoder.forward(batch, kv_cache(decoder, pool.num_slots), hidden_layers=(2, 0, 3, 4))
    assert output.hidden is not None and output.hidden.shape == (9, 4, decoder.config.hidden_size)
    torch.testing.assert_close(output.hidden[:, 0], expected[2][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(output.hidden[:, 1], expected[0][0])
    torch.testing.assert_close(output.hidden[:, 3], expected[3][0], atol=1e-4, rtol=1e-4)
    normed = torch.nn.functional.rms_norm(output.hidden[:, 2], (48,), decoder.final_norm, 1e-5)
    torch.testing.assert_close(normed, expected[3][0], atol=1e-4, rtol=1e-4)


def test_skipped_layers_pass_the_stream_on() -> None:
    """Layers {0, 2} of three act as a two-layer model, and leave the KV of layer 1 alone."""
    hf = hf_model("llama")
    decoder = small_decoder(hf)
    prompt = tokens(decoder.config, 9)
    pool = Pool(1, 12)
    cache = kv_cache(decoder, pool.num_slots)
    found = decoder.forward(pool.batch(Rows(0, 0, prompt)), cache, layers=(0, 2)).logits
    del hf.model.layers[1]
    with torch.no_grad():
        expected = hf(torch.tensor([prompt]), use_cache=False).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not cache[1].any() and cache[0].any() and cache[2].any()


def test_layers_that_do_not_exist_are_refused() -> None:
    decoder = small_decoder(hf_model("llama"))
    pool = Pool(1, 4)
    batch, cache = pool.batch(Rows(0, 0, [1])), kv_cache(decoder, pool.num_slots)
    with pytest.raises(InvalidOptionError, match="layers 0 to 2"):
        decoder.forward(batch, cache, layers=(3,))
    with pytest.raises(InvalidOptionError, match="4 is after the final norm"):
        decoder.forward(batch, cache, hidden_layers=(5,))
