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
from paceline.models.family_weights import stored_linear, stored_norm
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
    _write(folder, tensors, content)
    return meant


def write_plain_folder(
    folder: Path, variant: str = "qwen3", dtype: torch.dtype = torch.float32, **overrides: Any
) -> ModelConfig:
    """The same model with plain weights, as a folder of its family stores them."""
    given = hf_config_dict(variant, **SHAPE | overrides)
    config = config_from_dict(given)
    stored: dict[str, Tensor] = {}
    fused: dict[str, list[Tensor]] = {}
    for name, weight in random_weights(config).items():
        if is_linear(name):
            pieces = name.split(".")  # model, layers, 0, self_attn, q_proj, weight
            place = stored_linear(config, ".".join(pieces[3:5]))
            fused.setdefault(".".join([*pieces[:3], place, "weight"]), []).append(weight)
        else:
            stored[name] = stored_norm(config, weight) if "norm" in name else weight
    stored |= {name: torch.cat(parts) for name, parts in fused.items()}
    folder.mkdir(exist_ok=True)
    _write(folder, {name: tensor.to(dtype) for name, tensor in stored.items()}, given)
    return config


def _write(folder: Path, tensors: dict[str, Tensor], content: dict[str, Any]) -> None:
    from tokenizers import pre_tokenizers

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(content))
    trained(pre_tokenizers.Split(" ", "merged_with_next")).save(str(folder / "tokenizer.json"))


def plain_config(variant: str = "qwen3") -> ModelConfig:
    given = hf_config_dict(variant, **SHAPE)
    return config_from_dict(given | {"tie_word_embeddings": False} if variant == "qwen3" else given)


def random_linear(rows: int, columns: int, seed: int = 0) -> Tensor:
    return 0.15 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
