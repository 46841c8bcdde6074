"""Drafters as others publish them: EAGLE-3 (SafeAILab, SpecForge), `speculators`, Medusa heads, z-lab's DFlash.

The formats agree on tensors and disagree on what the numbers around them mean:

| trap                                                    | what is done                                             |
|---------------------------------------------------------|----------------------------------------------------------|
| `d2t` holds offsets: target id = i + d2t[i]             | made absolute when read                                  |
| SpecForge names layers by their outputs, 1, N/2-1, N-4  | + 1: the stream entering the next layer is the same      |
| vLLM and speculators name them by inputs: 2, N/2, N-3   | taken as they are                                        |
| DFlash counts outputs, speculators' DFlash one more     | + 1 unless the folder is of speculators                  |
| a missing `norm_before_residual`                        | vLLM takes it for true; SafeAILab's code for false       |
| `embed_tokens` present                                  | refused unless it is the target's: ours has no other one |

What does not fit its target is refused, with the tensor and the two shapes.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.model_config import ModelConfig
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.config import config_from_dict, read_json
from paceline.models.drafters.dflash import DFlash, DFlashConfig
from paceline.models.drafters.eagle3 import Eagle3, Eagle3Config
from paceline.models.drafters.medusa import Medusa, MedusaConfig
from paceline.models.drafters.store import Target
from paceline.models.hf import read_folder, read_tensors

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
LAYER_OUTPUTS_KEY = "eagle_aux_hidden_state_layer_ids"


def load_published(kind: str, path: Path, target: Target) -> Any:
    """The network of a published drafter: a folder with config.json and weights, or a bare Medusa file."""
    readers = {"eagle3": _eagle3, "medusa": _medusa, "dflash": _dflash}
    if kind not in readers:
        raise UnsupportedModelError(
            f"{path} cannot be read as {kind!r}: folders as published are known for {', '.join(readers)}"
        )
    network: nn.Module = readers[kind](path, target)
    return network.eval().requires_grad_(False)


def _eagle3(folder: Path, target: Target) -> Eagle3:
    config = read_json(folder / "config.json")
    of_speculators = "speculators_model_type" in config
    layer_config = config.get("transformer_layer_config", {}) if of_speculators else config
    tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in read_folder(folder).items()}
    tensors.pop("t2d", None)  # says the same as d2t
    layer = _layer_config({"vocab_size": target.config.vocab_size} | dict(layer_config), 1, target.config, folder)
    layer = _with_biases(layer, tensors, "midlayer.")
    head = _tensor(tensors, "lm_head.weight", folder)
    d2t = _draft_ids(tensors.pop("d2t", None), len(head), target.config, folder)
    _check_embedding(tensors.pop("embed_tokens.weight", None), target, folder)
    network = Eagle3(
        Eagle3Config(
            layer,
            _target_size(config, layer, target.config, folder),
            len(head),
            _eagle3_layers(config, of_speculators, target.config.num_layers),
            norm_before_residual=bool(config.get("norm_before_residual", of_speculators)),
            norm_before_fc=bool(config.get("norm_before_fc", False)),
        )
    )
    _fill(network, tensors, folder)
    network.d2t = d2t
    return network


def _eagle3_layers(config: Mapping[str, Any], of_speculators: bool, num_layers: int) -> tuple[int, ...]:
    """Ids as in core/forward.py: the stream entering these layers."""
    given = (
        config.get(LAYER_OUTPUTS_KEY) if of_speculators else (config.get("eagle_config") or {}).get(LAYER_OUTPUTS_KEY)
    )
    if given is None:
        return 2, num_layers // 2, num_layers - 3
    ids = tuple(int(i) for i in given)
    # SpecForge writes layer outputs; a folder that was made for vLLM has inputs under the same key.
    outputs = not of_speculators and ids == (1, num_layers // 2 - 1, num_layers - 4)
    return tuple(i + 1 for i in ids) if outputs else ids


def _dflash(folder: Path, target: Target) -> DFlash:
    config = read_json(folder / "config.json")
    own = config.get("dflash_config") or config
    num_layers = int(config["num_hidden_layers"])
    layer = _layer_config({"vocab_size": target.config.vocab_size} | dict(config), num_layers, target.config, folder)
    if config.get("num_target_layers", target.config.num_layers) != target.config.num_layers:
        raise ModelLoadError(
            f"{folder} was made for a target with {config['num_target_layers']} layers, but this one has "
            f"{target.config.num_layers}. Use the drafter with its own target."
        )
    shift = 0 if "speculators_model_type" in config else 1
    ids = tuple(int(i) + shift for i in own["target_layer_ids"])
    vocab = target.config.vocab_size
    network = DFlash(
        DFlashConfig(layer, target.config.hidden_size, vocab, ids, int(config["block_size"]), int(own["mask_token_id"]))
    )
    tensors = read_folder(folder)
    tensors["lm_head.weight"] = target.vocabulary_rows(torch.arange(vocab), head=True).cpu()
    _fill(network, tensors, folder)
    return network


def _medusa(path: Path, target: Target) -> Medusa:
    file = path
    if path.is_dir():
        there = [path / name for name in MEDUSA_FILES if (path / name).is_file()]
        if not there:
            raise ModelLoadError(f"{path} has none of {', '.join(MEDUSA_FILES)}: is it a folder of Medusa heads?")
        file = there[0]
    stored = {name.removeprefix("medusa_head."): tensor for name, tensor in read_tensors(file).items()}
    counts: dict[int, int] = {}  # head -> blocks before its vocabulary matrix
    for name in stored:
        head, block, *_ = name.split(".")
        counts[int(head)] = max(counts.get(int(head), 0), int(block))
    if not counts or len(set(counts.values())) != 1:
        raise ModelLoadError(f"{file} does not look like Medusa heads: it has {', '.join(sorted(stored)[:4])}, ...")
    num_layers = counts[0]
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        head, block, rest = name.split(".", 2)
        is_matrix = int(block) == num_layers
        tensors[f"heads.{head}.{rest}" if is_matrix else f"blocks.{head}.{block}.{rest}"] = tensor
    network = Medusa(MedusaConfig(target.config.hidden_size, target.config.vocab_size, len(counts), num_layers))
    _fill(network, tensors, file)
    return network


def _layer_config(content: Mapping[str, Any], num_layers: int, target: ModelConfig, folder: Path) -> ModelConfig:
    """The geometry of a drafter's layers; the architecture's own name does not matter."""
    family = "Qwen3ForCausalLM" if content.get("model_type") == "qwen3" else "LlamaForCausalLM"
    known = {"max_position_embeddings": target.max_position} | dict(content)
    return config_from_dict(
        known | {"architectures": [family], "num_hidden_layers": num_layers}, source=str(folder / "config.json")
    )


def _with_biases(layer: ModelConfig, tensors: Mapping[str, Tensor], prefix: str) -> ModelConfig:
    return replace(
        layer,
        qkv_bias=f"{prefix}self_attn.q_proj.bias" in tensors,
        o_bias=f"{prefix}self_attn.o_proj.bias" in tensors,
        mlp_bias=f"{prefix}mlp.gate_proj.bias" in tensors,
        qk_norm=f"{prefix}self_attn.q_norm.weight" in tensors,
    )


def _draft_ids(offsets: Tensor | None, size: int, target: ModelConfig, folder: Path) -> Tensor:
    """The target's id of every draft id: [draft vocab]"""
    if offsets is None:
        if size != target.vocab_size:
            raise ModelLoadError(
                f"{folder} has a head of {size} tokens but no d2t, and the target has {target.vocab_size}: without d2t "
                "nobody knows which tokens are meant. Fetch the drafter again."
            )
        return torch.arange(size)
    ids = torch.arange(len(offsets)) + offsets.long()
    if len(offsets) != size or int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        raise ModelLoadError(
            f"{folder} maps {len(offsets)} draft tokens (head: {size}) to ids {int(ids.min())} to {int(ids.max())}, "
            f"but the target has {target.vocab_size} tokens. The drafter belongs to another target."
        )
    return ids


def _target_size(config: Mapping[str, Any], layer: ModelConfig, target: ModelConfig, folder: Path) -> int:
    size = config.get("target_hidden_size") or layer.hidden_size
    if size != target.hidden_size:
        raise ModelLoadError(
            f"{folder} reads hidden states of size {size}, but this target's have {target.hidden_size}. "
            "Use the drafter with its own target."
        )
    return int(size)


def _check_embedding(embedding: Tensor | None, target: Target, folder: Path) -> None:
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


def _tensor(tensors: Mapping[str, Tensor], name: str, source: Path) -> Tensor:
    if name not in tensors:
        raise ModelLoadError(f"{source} lacks {name!r}; it has {', '.join(sorted(tensors)[:6])}, ...")
    return tensors[name]


def _fill(network: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Put the tensors in place; whatever is missing, extra or of another shape is an error that names it."""
    expected = network.state_dict()
    for name, place in expected.items():
        found = _tensor(tensors, name, source)
        if found.shape != place.shape:
            raise ModelLoadError(
                f"{source}: {name} has the shape {list(found.shape)}, but with this target it should have "
                f"{list(place.shape)}. The drafter belongs to another target, or its config.json to another drafter."
            )
    extra = sorted(set(tensors) - set(expected))
    if extra:
        raise UnsupportedModelError(f"{source} has tensors that this network does not use: {', '.join(extra[:6])}")
    network.load_state_dict({name: tensors[name].float() for name in expected})
