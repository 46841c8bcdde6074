"""Small random models of every family, as transformers makes them, and our decoder over the same weights."""

from typing import Any

import torch

from paceline.core.forward import ForwardBatch
from paceline.core.kv_tensor import allocate_kv
from paceline.core.model_config import ModelConfig
from paceline.core.weights import Weights
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from paceline.models.family_weights import family_weights
from paceline.models.layout import expected_shapes

SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}

GEMMA3 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 20,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
PHI3 = {"hidden_size": 96, "pad_token_id": 0}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # name -> (architecture, what differs from SMALL)
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-no-gqa": ("LlamaForCausalLM", {"num_key_value_heads": 6}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
    ),
    "llama-llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("LlamaForCausalLM", {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "LlamaForCausalLM",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 7}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("Qwen2ForCausalLM", {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3ForCausalLM", {"attention_bias": True}),
    "gemma3": ("Gemma3ForCausalLM", GEMMA3),
    "gemma3-scaled": (
        "Gemma3ForCausalLM",
        GEMMA3
        | {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
    ),
    "phi3": ("Phi3ForCausalLM", PHI3),
    "phi3-window": ("Phi3ForCausalLM", PHI3 | {"sliding_window": 6}),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        PHI3
        | {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.02, 1.1, 1.2, 1.3, 1.5, 1.9, 2.0],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True, "pad_token_id": 0},
    ),
    "smollm3-window": (
        "SmolLM3ForCausalLM",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
            "pad_token_id": 0,
        },
    ),
}


def hf_config_dict(variant: str, **overrides: Any) -> dict[str, Any]:
    architecture, changes = VARIANTS[variant]
    config = SMALL | {"architectures": [architecture]} | changes
    if architecture in ("Qwen2ForCausalLM", "Phi3ForCausalLM"):
        config.pop("head_dim")  # they have no such key
        config |= {"hidden_size": 96}
    return config | overrides


def hf_model(variant: str, **overrides: Any) -> Any:
    """The variant in transformers, with every weight random (norms and biases too)."""
    import transformers

    config = hf_config_dict(variant, **overrides)
    architecture = config["architectures"][0]
    model_class = getattr(transformers, architecture)
    hf = model_class(model_class.config_class(**config)).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return hf


def random_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Weights for a config without transformers."""
    generator = torch.Generator().manual_seed(7)
    noise = {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(config).items()}
    return {name: 1.0 + 0.2 * x if "norm" in name else 0.15 * x for name, x in noise.items()}


def stored_weights(hf: Any, config: ModelConfig) -> Weights:
    """What a folder of this model holds, under our names."""
    return family_weights({name: tensor.detach() for name, tensor in hf.state_dict().items()}, config, is_gguf=False)


def small_decoder(
    hf: Any, *, batch_invariant: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Decoder:
    config = config_from_dict(hf.config.to_dict() | {"architectures": [type(hf).__name__]})
    return Decoder(config, stored_weights(hf, config), dtype=dtype, device=device, batch_invariant=batch_invariant)


def kv_cache(decoder: Decoder, num_slots: int) -> torch.Tensor:
    return allocate_kv(decoder.config, num_slots, decoder.dtype, decoder.device)


def run(decoder: Decoder, batch: ForwardBatch, num_slots: int) -> torch.Tensor:
    """Logits of a single pass over an empty cache."""
    return decoder.forward(batch, kv_cache(decoder, num_slots)).logits


def tokens(config: ModelConfig, count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (count,), generator=generator).tolist()
