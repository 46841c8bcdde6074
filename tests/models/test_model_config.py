"""config.json in all its spellings, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.model_config import ModelConfig, RopeScaling
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.config import config_from_dict, model_config
from paceline.models.rope import local_rope_tables, rope_frequencies, rope_tables
from tests.models.small_models import LLAMA3, SMALL, VARIANTS, YARN, hf_config_dict


def config(**changes: Any) -> ModelConfig:
    return config_from_dict(SMALL | {"architectures": ["LlamaForCausalLM"]} | changes)


def test_plain_llama() -> None:
    found = config(rope_theta=5e5)
    assert (found.family, found.num_heads, found.num_kv_heads, found.head_dim) == ("llama", 6, 2, 16)
    assert (found.q_size, found.kv_size, found.rope_theta) == (96, 32, 5e5)
    assert found.rope_scaling == RopeScaling()
    assert found.eos_token_ids == (2,) and found.bos_token_id == 1


def test_head_dim_and_kv_heads_may_be_left_out() -> None:
    found = config(head_dim=None, num_key_value_heads=None)
    assert (found.head_dim, found.num_kv_heads) == (8, 6)


@pytest.mark.parametrize("parameters", [YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}])
def test_old_and_new_spelling_of_rope_agree(parameters: dict[str, Any]) -> None:
    old = {name: value for name, value in parameters.items() if name not in ("rope_theta", "rope_type")}
    old["type"] = parameters["rope_type"]
    found = config(rope_scaling=old, rope_theta=parameters["rope_theta"])
    assert found == config(rope_parameters=parameters)
    assert found.rope_scaling.kind == parameters["rope_type"]


def test_original_context_may_stand_outside_the_rope_settings() -> None:
    found = config(rope_scaling={"type": "yarn"}, original_max_position_embeddings=64)
    assert found.rope_scaling.original_max_position == 64
    assert found.rope_scaling.factor == 256 / 64  # implied by max_position_embeddings


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith("gemma3")])
def test_rope_tables_are_transformers_own(variant: str) -> None:
    import transformers

    given = hf_config_dict(variant)
    model_class = getattr(transformers, given["architectures"][0])
    hf_config = model_class.config_class(**given)
    module = __import__(model_class.__module__, fromlist=["x"])
    rotary = getattr(module, model_class.__name__.replace("ForCausalLM", "RotaryEmbedding"))(hf_config)
    ours = config_from_dict(given)
    count = min(200, ours.max_position)  # longrope: we stay within the original context
    expected_cos, expected_sin = rotary(torch.zeros(1), torch.arange(count)[None])
    cos, sin = rope_tables(ours, count)
    half = cos.shape[1]
    torch.testing.assert_close(cos, expected_cos[0, :, :half], atol=2e-5, rtol=0)
    torch.testing.assert_close(sin, expected_sin[0, :, :half], atol=2e-5, rtol=0)


@pytest.mark.parametrize("variant", ["gemma3", "gemma3-scaled"])
def test_both_rope_tables_of_gemma_are_transformers_own(variant: str) -> None:
    from transformers.models.gemma3 import modeling_gemma3

    given = hf_config_dict(variant)
    rotary = modeling_gemma3.Gemma3RotaryEmbedding(modeling_gemma3.Gemma3TextConfig(**given))
    ours = config_from_dict(given)
    for kind, tables in (("full_attention", rope_tables), ("sliding_attention", local_rope_tables)):
        expected = rotary(torch.zeros(1), torch.arange(200)[None], kind)
        for found, wanted in zip(tables(ours, 200), expected, strict=True):
            torch.testing.assert_close(found, wanted[0, :, : found.shape[1]], atol=2e-5, rtol=0)


def test_scaling_really_changes_the_frequencies() -> None:
    plain = rope_frequencies(config())[0]
    for parameters in (YARN, LLAMA3 | {"rope_theta": 1e4}):
        scaled = rope_frequencies(config(rope_parameters=parameters))[0]
        assert scaled[0] == plain[0] and scaled[-1] < plain[-1]


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, [None, None, None]),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, [None, None, 8]),
        ({"use_sliding_window": True, "sliding_window": 8}, [None, None, None]),  # begins at layer 28
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [8, None, 8],
        ),
    ],
)
def test_qwen_windows(changes: dict[str, Any], windows: list[int | None]) -> None:
    found = config(architectures=["Qwen2ForCausalLM"], **changes)
    assert [found.window(layer) for layer in range(3)] == windows


def test_mistral_has_its_window_everywhere_and_llama_nowhere() -> None:
    mistral = config(architectures=["MistralForCausalLM"], sliding_window=8)
    assert [mistral.window(layer) for layer in range(3)] == [8, 8, 8]
    assert config(sliding_window=8).window(0) is None


def test_biases_and_norms_by_family() -> None:
    qwen2, qwen3 = config(architectures=["Qwen2ForCausalLM"]), config(architectures=["Qwen3ForCausalLM"])
    assert qwen2.qkv_bias and not qwen2.o_bias and not qwen2.qk_norm
    assert qwen3.qk_norm and not qwen3.qkv_bias
    llama = config(attention_bias=True, mlp_bias=True)
    assert llama.qkv_bias and llama.o_bias and llama.mlp_bias


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_end_tokens_of_generation_config_win(tmp_path: Path) -> None:
    write(tmp_path, "config.json", SMALL | {"architectures": ["LlamaForCausalLM"]})
    assert model_config(tmp_path).eos_token_ids == (2,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [7, 8]})
    assert model_config(tmp_path).eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*Known: LlamaForCausalLM, Mistral.*Qwen3"),
        ({"architectures": None, "model_type": "bert"}, "bert"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "'dynamic'.*Known: default, linear, llama3, yarn, longrope",
        ),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per kind of layer"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes.*Known: awq, gptq.*GGUF"),
    ],
)
def test_what_we_cannot_run_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "`hidden_size` must be a positive whole number, but is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "'many'"),
        ({"num_key_value_heads": 4}, "6 query heads cannot share 4"),
        ({"head_dim": 15}, "even"),
        ({"rope_scaling": {"type": "linear"}}, "without a `factor`"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "without a list `short_factor`"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 1]}, "speaks of 2 layers.*has 3"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4, "layer_types": []}, "names 0 layers.*has 3"),
    ],
)
def test_a_malformed_value_is_refused_and_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        config(**changes)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_missing_or_broken_file_is_named(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        write(tmp_path, "config.json", content)
    with pytest.raises(ModelLoadError, match=r"config\.json.*[Ff]etch the model again"):
        model_config(tmp_path)
