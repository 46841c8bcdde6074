"""Families with parts beyond Llama's: from a folder as transformers writes it to logits and answers."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers

from paceline.core.model_config import ModelConfig
from paceline.core.sampling_params import SamplingParams
from paceline.core.weights import QuantizedTensor
from paceline.errors import InvalidOptionError, ModelLoadError, UnsupportedModelError
from paceline.llm import LLM
from paceline.models.config import config_from_dict
from paceline.models.dequantize import dequantize
from paceline.models.family_weights import family_weights
from paceline.models.loader import load_model
from paceline.models.loading import load_weights
from paceline.models.native import NativeDecoder
from paceline.ops import native
from tests.forward_batches import Pool, Rows
from tests.models.small_gguf import trained
from tests.models.small_models import hf_config_dict, hf_model, random_weights, run, tokens

NEW_FAMILIES = ["gemma3", "phi3", "smollm3"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% generation %}[{{ m.role }}] {{ m.content }}{% endgeneration %}{% endfor %}"
)


def write_folder(folder: Path, variant: str, **changes: Any) -> Any:
    """A folder as transformers saves it: weights under the family's own names, a tokenizer, a chat template."""
    import transformers

    hf = hf_model(variant, vocab_size=700, **changes)
    hf.save_pretrained(folder)
    backend = trained(pre_tokenizers.Split(" ", "merged_with_next"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return hf


@pytest.mark.parametrize("variant", NEW_FAMILIES)
def test_a_folder_computes_what_transformers_does(variant: str, tmp_path: Path) -> None:
    hf = write_folder(tmp_path, variant)
    model = load_model(str(tmp_path), dtype="float32", device="cpu", quiet=True)
    prompt = model.tokenizer.chat_token_ids([{"role": "user", "content": "the cat sat on 12 mats"}])
    assert model.tokenizer.decode(prompt, skip_special_tokens=False).startswith("<|begin|>[user] the cat")
    pool = Pool(1, len(prompt))
    with torch.no_grad():
        expected = hf(torch.tensor([prompt])).logits[0]
    found = run(model.decoder, pool.batch(Rows(0, 0, prompt)), pool.num_slots)  # type: ignore[arg-type]
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("variant", NEW_FAMILIES)
def test_speculation_changes_no_token(variant: str, tmp_path: Path) -> None:
    write_folder(tmp_path, variant)
    prompts = ["the cat sat on the mat the cat sat on", "x  y   z x  y"]
    answers = []
    for speculative in (None, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}):
        llm = LLM(str(tmp_path), speculative, device="cpu", batch_invariant=True if variant == "gemma3" else None)
        params = [SamplingParams(max_tokens=12, temperature=t, seed=3) for t in (0.0, 0.8)]
        answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert answers[0] == answers[1] and all(answers[0])


@pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))
def test_what_the_native_kernels_lack_runs_on_pytorch_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_folder(tmp_path, "gemma3")
    with caplog.at_level(logging.WARNING):
        model = load_model(str(tmp_path), device="cpu", quiet=True)
    assert "native kernels lack what this gemma3 model has: GeGLU" in caplog.text
    assert model.execution.startswith("PyTorch on cpu")
    with pytest.raises(InvalidOptionError, match=r"native kernels lack.*two rotary bases"):
        load_model(str(tmp_path), device="cpu", kernels="native", quiet=True)
    config = config_from_dict(hf_config_dict("gemma3"))
    with pytest.raises(UnsupportedModelError, match="lack what this gemma3 model has"):
        NativeDecoder(config, random_weights(config))


@pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))
@pytest.mark.parametrize("variant", ["phi3", "smollm3"])
def test_phi3_and_smollm3_run_on_the_native_kernels(variant: str, tmp_path: Path) -> None:
    write_folder(tmp_path, variant)
    assert isinstance(load_model(str(tmp_path), device="cpu", quiet=True).decoder, NativeDecoder)


def test_drafters_are_not_trained_for_parts_that_training_does_not_know() -> None:
    from paceline.models.decoder import Decoder
    from paceline.train.target import DenseTarget

    config = config_from_dict(hf_config_dict("smollm3"))
    with pytest.raises(InvalidOptionError, match="layers without rotary embedding is not supported"):
        DenseTarget(Decoder(config, random_weights(config)))


def test_a_model_without_special_parts_has_none() -> None:
    assert config_from_dict(hf_config_dict("qwen3")).special_parts == frozenset()
    assert config_from_dict(hf_config_dict("phi3")).special_parts == frozenset()


def phi3_config() -> ModelConfig:
    return config_from_dict(hf_config_dict("phi3"))


def test_fused_matrices_of_the_wrong_size_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_folder(tmp_path, "phi3")
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    save_file(weights | {name: weights[name][:-2].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"lacks model\.layers\.0\.self_attn"):
        load_model(str(tmp_path), quiet=True)


def test_fused_blocks_are_cut_by_rows() -> None:
    import gguf

    config = phi3_config()
    rows = config.q_size + 2 * config.kv_size
    blocks = gguf.quants.quantize(torch.randn(rows, 96).numpy(), gguf.GGMLQuantizationType.Q8_0)
    stored = QuantizedTensor(torch.from_numpy(blocks), "Q8_0", (rows, 96))
    prefix = "model.layers.0.self_attn."
    cut = family_weights({prefix + "qkv_proj.weight": stored}, config, is_gguf=True)
    parts = [cut[f"{prefix}{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(torch.cat([dequantize(part) for part in parts]), dequantize(stored))  # type: ignore[arg-type]


def test_longrope_limits_the_context_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert config_from_dict(hf_config_dict("phi3-longrope")).max_position == 128
    assert "limited to 128 tokens" in caplog.text


def test_gemma_norms_are_stored_less_one(tmp_path: Path) -> None:
    hf = write_folder(tmp_path, "gemma3")
    found = load_weights(tmp_path, load_model(str(tmp_path), quiet=True).config)["model.norm.weight"]
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, hf.model.norm.weight.detach() + 1.0)


def test_defaults_left_out_of_a_config_are_the_familys() -> None:
    import transformers

    given = hf_config_dict("gemma3")
    for key in ("sliding_window", "layer_types", "query_pre_attn_scalar", "tie_word_embeddings", "rope_parameters"):
        given.pop(key)
    given |= {"num_hidden_layers": 7}
    given.pop("sliding_window_pattern")
    theirs = transformers.Gemma3TextConfig(**given).to_dict()
    assert config_from_dict(given) == config_from_dict(theirs | {"architectures": given["architectures"]})
    assert config_from_dict(given).window(5) is None and config_from_dict(given).window(4) == 4096
    assert len(tokens(config_from_dict(given), 3)) == 3
