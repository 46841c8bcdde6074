"""From what a user names to a drafter's network: a file of ours, a published folder, or the one that we ship.

load_network("eagle3", None, decoder)              the shipped one, where there is one for this target
load_network("eagle3", "runs/eagle3", decoder)     our file, or a folder as others publish them (formats.py)
load_network("eagle3", "untrained", decoder)       random weights: drafts nonsense, for tests of everything else
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.core.forward import Target
from paceline.core.model_config import ModelConfig
from paceline.errors import ModelLoadError
from paceline.models.drafters.dflash import DFlash, DFlashConfig
from paceline.models.drafters.distilled import Distilled, DistilledConfig
from paceline.models.drafters.eagle import Eagle, EagleConfig
from paceline.models.drafters.eagle3 import Eagle3, Eagle3Config
from paceline.models.drafters.formats import load_published
from paceline.models.drafters.medusa import Medusa, MedusaConfig
from paceline.models.drafters.store import fits_target, load_drafter, read_header

UNTRAINED = "untrained"
SHIPPED = Path(__file__).parents[2] / "drafters"  # one folder per target
METHOD_OF = {"draft": "draft_model"}  # the others are called like what they run


def load_network(kind: str, model: str | None, target: Target) -> Any:
    """The network of a drafter, in float32 on the CPU, whichever format it came in."""
    if model == UNTRAINED:
        return untrained(kind, target)
    path = Path(model).expanduser() if model is not None else find_shipped(kind, target.config)
    if path.is_dir() and (path / f"{kind}.safetensors").is_file():
        path = path / f"{kind}.safetensors"
    if not path.exists():
        raise ModelLoadError(
            f"there is no drafter at {str(path)!r}: give a file that `paceline train` wrote, or a folder as published "
            "for EAGLE, Medusa or DFlash"
        )
    if path.is_dir() or path.suffix in (".pt", ".bin"):
        return load_published(kind, path, target)
    found = read_header(path)["method"]
    if found != kind:
        raise ModelLoadError(f"{path} is a drafter of the kind {found!r}, but {kind!r} was asked for: name its method")
    return load_drafter(path, target.config, lambda ids: target.vocabulary_rows(ids, head=True).cpu())


def find_shipped(kind: str, target: ModelConfig) -> Path:
    for path in sorted(SHIPPED.glob(f"*/{kind}.safetensors")):
        if fits_target(read_header(path)["target"], target):
            return path
    others = sorted(
        METHOD_OF.get(path.stem, path.stem)
        for path in SHIPPED.glob("*/*.safetensors")
        if fits_target(read_header(path)["target"], target)
    )
    hint = f". Shipped for this target are {', '.join(others)}: choose one of these methods" if others else ""
    raise ModelLoadError(
        f"no {kind} drafter is shipped for this target (hidden size {target.hidden_size}, {target.num_layers} layers, "
        f"vocabulary {target.vocab_size}): name one with 'model', or make one with `paceline train {kind}`{hint}"
    )


def untrained(kind: str, target: Target) -> Any:
    """A small network with random weights, fit for any target."""
    config = target.config
    torch.manual_seed(0)
    layer = replace(
        config,
        num_layers=1,
        head_dim=config.head_dim + config.head_dim % 2,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        sliding_window=None,
    )
    n, hidden, vocab = config.num_layers, config.hidden_size, config.vocab_size
    network: Any
    if kind == "eagle3":
        network = Eagle3(Eagle3Config(replace(layer, qk_norm=False), hidden, vocab, tuple(sorted({0, n // 2, n}))))
    elif kind == "eagle":
        network = Eagle(EagleConfig(replace(layer, qk_norm=False), vocab, (n + 1,)))
    elif kind == "dflash":
        network = DFlash(DFlashConfig(layer, hidden, vocab, tuple(sorted({n // 2, n})), block_size=5, mask_token_id=0))
    elif kind == "draft":
        network = Distilled(DistilledConfig(layer, vocab, (0,)))
    else:
        network = Medusa(MedusaConfig(hidden, vocab, num_heads=3, shared_head=True))
    return network.eval().requires_grad_(False)
