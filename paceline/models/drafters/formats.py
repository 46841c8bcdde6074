"""Drafters as others publish them: EAGLE and EAGLE-3 (SafeAILab, SpecForge), `speculators`, Medusa, z-lab's DFlash.

The formats agree on tensors and disagree on what the numbers around them mean:

| trap                                                    | what is done                                             |
|---------------------------------------------------------|----------------------------------------------------------|
| `d2t` holds offsets: target id = i + d2t[i]             | made absolute when read                                  |
| SpecForge names layers by their outputs, 1, N/2-1, N-4  | + 1: the stream entering the next layer is the same      |
| vLLM and speculators name them by inputs: 2, N/2, N-3   | taken as they are                                        |
| DFlash counts outputs, speculators' DFlash one more     | + 1 unless the folder is of speculators                  |
| a missing `norm_before_residual`                        | vLLM takes it for true; SafeAILab's code for false       |
| `embed_tokens` present                                  | refused unless it is the target's: ours has no other one |

What does not fit its target is refused, with the tensor and the two shapes (checkpoint.py). EAGLE-1's folders have
traps of their own: eagle_format.py.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.forward import Target
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.config import read_json
from paceline.models.drafters.checkpoint import (
    check_embedding,
    draft_ids,
    fill,
    layer_geometry,
    required,
    target_size,
    with_biases,
)
from paceline.models.drafters.dflash import DFlash, DFlashConfig
from paceline.models.drafters.eagle3 import Eagle3, Eagle3Config
from paceline.models.drafters.eagle_format import check_generation, read_eagle
from paceline.models.drafters.medusa import Medusa, MedusaConfig
from paceline.models.hf import read_folder, read_tensors

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
LAYER_OUTPUTS_KEY = "eagle_aux_hidden_state_layer_ids"


def load_published(kind: str, path: Path, target: Target) -> Any:
    """The network of a published drafter: a folder with config.json and weights, or a bare Medusa file."""
    readers = {"eagle": read_eagle, "eagle3": _eagle3, "medusa": _medusa, "dflash": _dflash}
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
    stored = read_folder(folder)
    check_generation("eagle3", config, stored, folder)
    variants = [key for key in ("fc_norm", "norm_output") if config.get(key)]
    if variants:
        raise UnsupportedModelError(f"{folder} sets {' and '.join(variants)}, a variant of EAGLE-3 that is not built")
    tensors = {_eagle3_name(name): tensor for name, tensor in stored.items()}
    tensors.pop("t2d", None)  # says the same as d2t
    layer = layer_geometry({"vocab_size": target.config.vocab_size} | dict(layer_config), 1, target.config, folder)
    layer = with_biases(layer, tensors, "midlayer.")
    head = required(tensors, "lm_head.weight", folder)
    d2t = draft_ids(tensors.pop("d2t", None), len(head), target.config, folder)
    check_embedding(tensors.pop("embed_tokens.weight", None), target, folder)
    network = Eagle3(
        Eagle3Config(
            layer,
            target_size(config, layer, target.config, folder),
            len(head),
            _eagle3_layers(config, of_speculators, target.config.num_layers),
            norm_before_residual=bool(config.get("norm_before_residual", of_speculators)),
            norm_before_fc=bool(config.get("norm_before_fc", False)),
        )
    )
    fill(network, tensors, folder)
    network.d2t = d2t
    return network


def _eagle3_name(name: str) -> str:
    """Ours, for a tensor as published: speculators counts layers and has another name for the norm before fc."""
    return re.sub(r"^input_norm\.", "fc_norm.", re.sub(r"^layers\.0\.", "midlayer.", name))


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
    layer = layer_geometry({"vocab_size": target.config.vocab_size} | dict(config), num_layers, target.config, folder)
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
    fill(network, tensors, folder)
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
    fill(network, tensors, file)
    return network
