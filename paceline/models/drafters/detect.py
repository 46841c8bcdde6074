"""Which method a drafter on this disk is for, by what its file or folder says of itself.

| found                                                      | method                                       |
|------------------------------------------------------------|----------------------------------------------|
| our own file, or a folder with one                         | what its header says                         |
| config.json with `speculators_config`                      | its algorithm, and how many tokens it drafts |
| config.json of DFlash, Medusa or EAGLE-3, by its own keys  | that one                                     |
| Medusa's heads under their usual name                      | `medusa`                                     |
| one decoder layer behind an `fc`                           | `eagle` or `eagle3`, by its tensors          |
| anything else                                              | None: a model like any other                 |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.config import read_json
from paceline.models.drafters.eagle_format import ONLY_IN_EAGLE3
from paceline.models.drafters.formats import MEDUSA_FILES
from paceline.models.drafters.load import METHOD_OF
from paceline.models.drafters.store import NETWORKS, read_header
from paceline.models.hf import read_folder

PUBLISHED = ("eagle", "eagle3", "medusa", "dflash")  # what formats.py reads


@dataclass(frozen=True, slots=True)
class Found:
    method: str
    num_speculative_tokens: int | None = None  # None: the folder says nothing


def find_method(model: str) -> Found | None:
    path = Path(model).expanduser()
    if path.is_file():
        if path.name in MEDUSA_FILES:
            return Found("medusa")
        return _of_header(path) if path.suffix == ".safetensors" else None
    if not path.is_dir():
        return None
    own = [path / f"{kind}.safetensors" for kind in NETWORKS if (path / f"{kind}.safetensors").is_file()]
    if len(own) > 1:
        kinds = ", ".join(METHOD_OF.get(one.stem, one.stem) for one in own)
        raise ModelLoadError(f"{path} has several drafters: name one of the methods {kinds}, or one of the files")
    if own:
        return _of_header(own[0])
    if any((path / name).is_file() for name in MEDUSA_FILES):
        return Found("medusa")
    return _of_folder(path) if (path / "config.json").is_file() else None


def _of_header(path: Path) -> Found:
    kind = read_header(path)["method"]
    return Found(METHOD_OF.get(kind, kind))


def _of_folder(folder: Path) -> Found | None:
    config = read_json(folder / "config.json")
    if "speculators_model_type" in config or "speculators_config" in config:
        return _of_speculators(config, folder)
    names = " ".join(map(str, config.get("architectures") or ())).lower()
    if "dflash_config" in config or "dflash" in names:
        return Found("dflash")
    if "eagle3" in names or "eagle_config" in config:
        return Found("eagle3")
    if "medusa" in names or "medusa_num_heads" in config or config.get("model_type") == "medusa":
        return Found("medusa")
    if config.get("num_hidden_layers") != 1 and "eagle" not in names:
        return None
    tensors = _tensor_names(folder)
    if not {"fc.weight", "fusion_fc.weight"} & tensors:
        return None
    return Found("eagle3" if any(ONLY_IN_EAGLE3.match(name) for name in tensors) else "eagle")


def _of_speculators(config: Mapping[str, Any], folder: Path) -> Found:
    said = config.get("speculators_config") or {}
    method = config.get("speculators_model_type") or said.get("algorithm")
    if method not in PUBLISHED:
        raise UnsupportedModelError(
            f"{folder} is a drafter of the kind {method!r}, which is not read: known are {', '.join(PUBLISHED)}"
        )
    proposals = said.get("proposal_methods") or [{}]
    number = proposals[0].get("speculative_tokens")
    return Found(str(method), number if isinstance(number, int) else None)


def _tensor_names(folder: Path) -> set[str]:
    path = folder / "model.safetensors"
    if not path.is_file():
        return set(read_folder(folder))  # one layer, so it is small
    with safe_open(path, framework="pt") as file:
        return set(file.keys())
