"""Our own file for a drafter: one safetensors file with its config and card in the header.

Matrices are stored as int8 with one scale per row; what is the target's anyway (a frozen vocabulary matrix) is not
stored at all. So a drafter for a 135M model is a few megabytes. `formats.py` reads and writes what others publish.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.core.model_config import ModelConfig, RopeScaling
from paceline.errors import ModelLoadError
from paceline.models.drafters.dflash import DFlash, DFlashConfig
from paceline.models.drafters.distilled import Distilled, DistilledConfig
from paceline.models.drafters.eagle import Eagle, EagleConfig
from paceline.models.drafters.eagle3 import Eagle3, Eagle3Config
from paceline.models.drafters.medusa import Medusa, MedusaConfig

FORMAT = "paceline-drafter-1"
NETWORKS: dict[str, tuple[type[Any], type[Any]]] = {
    # method -> (network, config)
    "eagle": (Eagle, EagleConfig),
    "eagle3": (Eagle3, Eagle3Config),
    "dflash": (DFlash, DFlashConfig),
    "draft": (Distilled, DistilledConfig),
    "medusa": (Medusa, MedusaConfig),
}
# Vocabulary matrices that may be the target's own rows.
SHARED_HEADS = {
    "eagle": "lm_head.weight",
    "eagle3": "lm_head.weight",
    "dflash": "lm_head.weight",
    "draft": "lm_head.weight",
    "medusa": "heads.0.weight",
}
SCALE = ".scale"
TARGET_KEYS = ("vocab_size", "hidden_size", "num_layers")


def save_drafter(
    path: Path, method: str, network: Any, *, head_is_target: bool, target: ModelConfig, card: Mapping[str, Any]
) -> None:
    """`head_is_target`: the vocabulary matrix is the target's rows and is left out."""
    tensors: dict[str, Tensor] = {"d2t": network.d2t.to(torch.int32).cpu()}
    for name, tensor in network.state_dict().items():
        if head_is_target and name == SHARED_HEADS[method]:
            continue
        if tensor.ndim == 2:
            tensors[name], tensors[name + SCALE] = quantize_rows(tensor.detach().float().cpu())
        else:
            tensors[name] = tensor.detach().to(torch.float16).cpu()
    header = {
        "format": FORMAT,
        "method": method,
        "config": json.dumps(asdict(network.config)),
        "head_is_target": json.dumps(head_is_target),
        "target": json.dumps({key: getattr(target, key) for key in TARGET_KEYS}),
        "card": json.dumps(dict(card)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=header)


def read_header(path: Path) -> dict[str, Any]:
    """Method, config, target and card of a drafter file, without its weights."""
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is not a whole safetensors file ({error}). Train or fetch it again.") from error
    if header.get("format") != FORMAT:
        raise ModelLoadError(f"{path} is no drafter of ours (format {header.get('format')!r}, expected {FORMAT!r}).")
    return {name: value if name in ("format", "method") else json.loads(value) for name, value in header.items()}


def load_drafter(path: Path, target: ModelConfig, head_rows: Callable[[Tensor], Tensor]) -> Any:
    """The network in float32, its head filled in from the target's where it is shared.

    `head_rows`: the target's head at some token ids, [ids] -> [ids, hidden]"""
    header = read_header(path)
    check_target(header["target"], target, str(path))
    method = header["method"]
    network_class, _ = NETWORKS[method]
    network: nn.Module = network_class(config_from_dict(method, header["config"]))
    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    d2t = stored.pop("d2t").long()
    state = {
        name: tensor.float() * stored[name + SCALE].float()[:, None] if tensor.dtype == torch.int8 else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith(SCALE)
    }
    if header["head_is_target"]:
        state[SHARED_HEADS[method]] = head_rows(d2t).float().cpu()
    network.load_state_dict(state)
    network.d2t = d2t
    return network.eval().requires_grad_(False)


def fits_target(described: Mapping[str, Any], target: ModelConfig) -> bool:
    return all(described[key] == getattr(target, key) for key in TARGET_KEYS)


def check_target(described: Mapping[str, Any], target: ModelConfig, source: str) -> None:
    """Refuse a drafter made for another target."""
    for key in TARGET_KEYS:
        wanted, found = described[key], getattr(target, key)
        if wanted != found:
            raise ModelLoadError(
                f"{source} was trained for a target with {key} {wanted}, but this one has {found}. "
                "Use the drafter with its own target, or train one for this target."
            )


def config_from_dict(method: str, content: Mapping[str, Any]) -> Any:
    _, config_class = NETWORKS[method]
    values = _with_tuples(content)
    if "layer" in values:
        layer = _with_tuples(values["layer"])
        scaling = RopeScaling(**_with_tuples(layer["rope_scaling"]))
        values["layer"] = ModelConfig(**(layer | {"rope_scaling": scaling}))
    return config_class(**values)


def _with_tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}


def quantize_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [rows, columns] and float32 [rows]: matrix is about int8 * scale."""
    scale = (matrix.abs().amax(dim=1) / 127).clamp(min=1e-12)
    return (matrix / scale[:, None]).round().to(torch.int8), scale
