"""An EAGLE-3 drafter of ours as a folder that other engines load.

    speculators   config with `speculators_config`, tensors under `layers.0.`; layers by their inputs
    eagle3        SafeAILab's layout, tensors under `midlayer.`; no layer ids: readers take 2, N/2, N-3

`d2t` becomes offsets, `t2d` a mask over the target's vocabulary, and everything is widened to bfloat16.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.errors import InvalidOptionError, UnsupportedModelError
from paceline.models.drafters.eagle3 import Eagle3

FORMATS = ("speculators", "eagle3")


def export_eagle3(
    network: Eagle3, target: ModelConfig, target_name: str, folder: Path, layout: str, num_tokens: int = 4
) -> None:
    if layout not in FORMATS:
        raise InvalidOptionError(f"format must be one of {', '.join(FORMATS)}, got {layout!r}")
    n = target.num_layers
    if layout == "eagle3" and network.config.hidden_layers != (2, n // 2, n - 3):
        raise UnsupportedModelError(
            f"the layout 'eagle3' fixes the target's layers to {(2, n // 2, n - 3)}, but this drafter reads "
            f"{network.config.hidden_layers}: export it as 'speculators'"
        )
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "layers.0." if layout == "speculators" else "midlayer."
    tensors = {
        name.replace("midlayer.", prefix).replace("fc_norm.", "input_norm."): value.to(torch.bfloat16)
        for name, value in network.state_dict().items()
    }
    tensors |= vocabulary_maps(network.d2t, target.vocab_size)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)  # the library makes it private; it is made to be carried elsewhere
    layer = _layer(network, target)
    config = (
        _speculators(network, layer, target_name, num_tokens) if layout == "speculators" else _plain(network, layer)
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def vocabulary_maps(d2t: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Target ids [draft vocab] as published: offsets, and which of the target's tokens have a draft id."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[d2t] = True
    return {"d2t": d2t - torch.arange(len(d2t)), "t2d": t2d}


def _layer(network: Eagle3, target: ModelConfig) -> dict[str, Any]:
    layer = network.config.layer
    if layer.rope_scaling.kind != "default":
        raise UnsupportedModelError(
            f"a drafter with {layer.rope_scaling.kind!r} rotary scaling is not exported: only plain rotary embedding is"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "max_position_embeddings": layer.max_position,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": layer.rope_theta,
        "hidden_act": "silu",
        "attention_bias": layer.qkv_bias,
        "mlp_bias": layer.mlp_bias,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _plain(network: Eagle3, layer: dict[str, Any]) -> dict[str, Any]:
    return layer | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": network.config.draft_vocab_size,
        "target_hidden_size": network.config.target_hidden_size,
        "norm_before_residual": network.config.norm_before_residual,
        "norm_before_fc": network.config.norm_before_fc,
    }


def _speculators(network: Eagle3, layer: dict[str, Any], target_name: str, num_tokens: int) -> dict[str, Any]:
    config = network.config
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "eagle_aux_hidden_state_layer_ids": list(config.hidden_layers),
        "transformer_layer_config": layer,
        "torch_dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "verifier": {"name_or_path": target_name, "architectures": ["LlamaForCausalLM"]},
        },
    }
