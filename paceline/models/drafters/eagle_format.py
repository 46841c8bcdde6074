"""EAGLE-1 and EAGLE-2 drafters as SafeAILab and `speculators` publish them (HASS trains the same network).

| trap                                                    | what is done                                             |
|---------------------------------------------------------|----------------------------------------------------------|
| no `bias` in SafeAILab's config.json                    | means that `fc` has one; vLLM would leave it out         |
| no `fusion_bias` in a `speculators` folder              | means that `fc` has none                                 |
| layer 0 has no norm before its attention                | none is added; one that is in the file is used           |
| no head                                                 | the target's; one that is in the file is used            |
| `speculators` says `fusion_fc.` and `transformer.`      | renamed to `fc.` and `layers.0.`                         |
| `speculators` with `layernorms`                         | refused: readers disagree on where these norms stand     |
| the feature is the state *after* the target's final norm| taken there, id N + 1 of core/forward.py                 |
| an EAGLE-3 folder, or the other way round               | refused, naming the method that reads it                 |
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.forward import Target
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.config import read_json
from paceline.models.drafters.checkpoint import check_embedding, fill, layer_geometry, with_biases
from paceline.models.drafters.eagle import Eagle, EagleConfig
from paceline.models.hf import read_folder

RENAMED = {"fusion_fc.": "fc.", "transformer.": "layers.0."}  # speculators -> SafeAILab
ONLY_IN_EAGLE3 = re.compile(r"midlayer\.|layers\.0\.hidden_norm\.|d2t$")


def read_eagle(folder: Path, target: Target) -> Eagle:
    config = read_json(folder / "config.json")
    stored = read_folder(folder)
    check_generation("eagle", config, stored, folder)
    of_speculators = "speculators_model_type" in config
    content = config.get("transformer_layer_config", {}) if of_speculators else config
    _check_sizes(content, target, folder)
    tensors = {_renamed(name): tensor for name, tensor in stored.items() if not name.endswith("rotary_emb.inv_freq")}
    _check_variant(config, tensors, of_speculators, folder)
    vocab = target.config.vocab_size
    layer = layer_geometry({"vocab_size": vocab} | dict(content), 1, target.config, folder)
    check_embedding(tensors.pop("embed_tokens.weight", None), target, folder)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = target.vocabulary_rows(torch.arange(vocab), head=True).cpu()
    network = Eagle(
        EagleConfig(
            with_biases(layer, tensors, "layers.0."),
            vocab,
            (target.config.num_layers + 1,),
            fc_bias="fc.bias" in tensors,
            input_norm="layers.0.input_layernorm.weight" in tensors,
        )
    )
    fill(network, tensors, folder)
    return network


def check_generation(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse an EAGLE-3 drafter where EAGLE-1 was asked for, and the other way round."""
    found = config.get("speculators_model_type")
    if found is None:
        is_third = any(ONLY_IN_EAGLE3.match(name) for name in tensors)
        found = "eagle3" if is_third else "eagle"
    if found != method:
        raise UnsupportedModelError(
            f"{folder} is a drafter for the method {found!r}, not {method!r}: ask for {found!r}"
        )


def _renamed(name: str) -> str:
    for old, new in RENAMED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _check_sizes(content: Mapping[str, Any], target: Target, folder: Path) -> None:
    """The target's states go in and its head reads what comes out, so these sizes are the target's."""
    for key in ("hidden_size", "vocab_size"):
        said, own = content.get(key), getattr(target.config, key)
        if said is not None and said != own:
            raise ModelLoadError(
                f"{folder} was made for a target with {key} {said}, but this one has {own}. "
                "Use the drafter with its own target."
            )


def _check_variant(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], of_speculators: bool, folder: Path
) -> None:
    if config.get("layernorms"):
        raise UnsupportedModelError(
            f"{folder} has 'layernorms': speculators puts its last norm before the head, vLLM before fc, and nothing "
            "in the folder says which it was trained with. EAGLE drafters without these extra norms are read."
        )
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    if len(layers) > 1:
        raise UnsupportedModelError(
            f"{folder} has {len(layers)} decoder layers; EAGLE's draft head has one, and only that is supported"
        )
    key, unsaid = ("fusion_bias", False) if of_speculators else ("bias", True)
    said = bool(config.get(key, unsaid))
    if said != ("fc.bias" in tensors):
        right = str(not said).lower()
        raise ModelLoadError(
            f"{folder}: {key!r} is {config.get(key, f'missing, which means {unsaid}')} in config.json, but the weights "
            f"have {'no fc.bias' if said else 'fc.bias'}. If they are whole, set {key!r} to {right} there; else fetch "
            "the drafter again."
        )
