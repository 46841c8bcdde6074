"""What readers of published drafters share: geometry, draft ids, and the checks that a checkpoint fits its target.

Whatever does not fit is refused with the reason: the tensor and both shapes, or the number in config.json that differs.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.forward import Target
from paceline.core.model_config import ModelConfig
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.config import config_from_dict


def layer_geometry(content: Mapping[str, Any], num_layers: int, target: ModelConfig, folder: Path) -> ModelConfig:
    """The geometry of a drafter's layers; the architecture's own name does not matter."""
    family = "Qwen3ForCausalLM" if content.get("model_type") == "qwen3" else "LlamaForCausalLM"
    known = {"max_position_embeddings": target.max_position} | dict(content)
    return config_from_dict(
        known | {"architectures": [family], "num_hidden_layers": num_layers}, source=str(folder / "config.json")
    )


def with_biases(layer: ModelConfig, tensors: Mapping[str, Tensor], prefix: str) -> ModelConfig:
    return replace(
        layer,
        qkv_bias=f"{prefix}self_attn.q_proj.bias" in tensors,
        o_bias=f"{prefix}self_attn.o_proj.bias" in tensors,
        mlp_bias=f"{prefix}mlp.gate_proj.bias" in tensors,
        qk_norm=f"{prefix}self_attn.q_norm.weight" in tensors,
    )


def draft_ids(offsets: Tensor | None, size: int, target: ModelConfig, folder: Path) -> Tensor:
    """The target's id of every draft id: [draft vocab]"""
    if offsets is None:
        if size != target.vocab_size:
            raise ModelLoadError(
                f"{folder} has a head of {size} tokens but no d2t, and the target has {target.vocab_size}: without d2t "
                "it is not known which tokens are meant. Fetch the drafter again."
            )
        return torch.arange(size)
    ids = torch.arange(len(offsets)) + offsets.long()
    if len(offsets) != size or int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        raise ModelLoadError(
            f"{folder} maps {len(offsets)} draft tokens (head: {size}) to ids {int(ids.min())} to {int(ids.max())}, "
            f"but the target has {target.vocab_size} tokens. The drafter belongs to another target."
        )
    return ids


def target_size(config: Mapping[str, Any], layer: ModelConfig, target: ModelConfig, folder: Path) -> int:
    size = config.get("target_hidden_size") or layer.hidden_size
    if size != target.hidden_size:
        raise ModelLoadError(
            f"{folder} reads hidden states of size {size}, but this target's have {target.hidden_size}. "
            "Use the drafter with its own target."
        )
    return int(size)


def check_embedding(embedding: Tensor | None, target: Target, folder: Path) -> None:
    if embedding is None:
        return
    some = torch.linspace(0, target.config.vocab_size - 1, 64).long()
    if embedding.shape != (target.config.vocab_size, target.config.hidden_size) or not torch.allclose(
        embedding[some].float(), target.vocabulary_rows(some).cpu(), atol=0.02
    ):
        raise UnsupportedModelError(
            f"{folder} brings an embedding of its own, which differs from the target's; only drafters that share their "
            "target's embedding are supported."
        )


def required(tensors: Mapping[str, Tensor], name: str, source: Path) -> Tensor:
    if name not in tensors:
        raise ModelLoadError(f"{source} lacks {name!r}; it has {', '.join(sorted(tensors)[:6])}, ...")
    return tensors[name]


def fill(network: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Put the tensors in place; whatever is missing, extra or of another shape is an error that names it."""
    expected = network.state_dict()
    for name, place in expected.items():
        found = required(tensors, name, source)
        if found.shape != place.shape:
            raise ModelLoadError(
                f"{source}: {name} has the shape {list(found.shape)}, but with this target it should have "
                f"{list(place.shape)}. The drafter belongs to another target, or its config.json to another drafter."
            )
    extra = sorted(set(tensors) - set(expected))
    if extra:
        raise UnsupportedModelError(f"{source} has tensors that this network does not use: {', '.join(extra[:6])}")
    network.load_state_dict({name: tensors[name].float() for name in expected})
