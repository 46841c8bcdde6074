"""A small random model in a folder, its layers' matrices quantized, and the same model with the meant weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.models.config import config_from_dict
from tests.models.quantized.quantizers import FORMATS
from tests.models.small_gguf import trained
from tests.models.small_models import hf_config_dict, random_weights

SHAPE: dict[str, Any] = {
    "vocab_size": 700,
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def write_folder(folder: Path, form: str, change: Change | None = None, variant: str = "qwen3") -> dict[str, Tensor]:
    """Write the model in a format of `FORMATS`; returns what its weights mean. `change` spoils tensors or config."""
    from tokenizers import pre_tokenizers

    quantization, quantize, _ = FORMATS[form]
    given = hf_config_dict(variant, **SHAPE)
    if variant == "qwen3":
        given |= {"tie_word_embeddings": False}
    config = config_from_dict(given)
    tensors: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in random_weights(config).items():
        if not is_linear(name):
            tensors[name] = meant[name] = weight
            continue
        stored = quantize(weight)
        meant[name] = stored.meant
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in stored.tensors.items()}
    content = given | {"quantization_config": json.loads(json.dumps(quantization))}
    if change is not None:
        change(tensors, content)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(content))
    trained(pre_tokenizers.Split(" ", "merged_with_next")).save(str(folder / "tokenizer.json"))
    return meant


def plain_config(variant: str = "qwen3") -> ModelConfig:
    given = hf_config_dict(variant, **SHAPE)
    return config_from_dict(given | {"tie_word_embeddings": False} if variant == "qwen3" else given)


def random_linear(rows: int, columns: int, seed: int = 0) -> Tensor:
    return 0.15 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
